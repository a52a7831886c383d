//! Cases: problems with inputs, each made from its name alone.
//!
//! A case is drawn in two steps. Its discrete structure is a point of a grid (mask × options ×
//! shape × sequences × family × cotangents × storage type), and a run visits points such that every
//! pair of values of two axes occurs. Large extents are no part of it: a budget of cost selects cases
//! of them. All that remains (lengths, widths, ids, elements) follows
//! from the point's name and the seed by the streams of [`crate::generate`].

pub(crate) mod axes;
mod choices;
mod covering;
mod large;

pub(crate) use axes::SHAPE;

pub use crate::roster::{Point, attention, linear_attention};
pub(crate) use large::cost;

use crate::capabilities::{Capabilities, Fit, Kernel, LOSS};
use crate::generate::Stream;
use crate::roster::each;
use crate::tensor::{Stored, Tensor, Tensors};
use axes::Grid;
pub(crate) use choices::Choices;
use etalon_problem::{
    Algorithm, Axis, Blocking, Dtype, Error, Operand, Pass, Precision, Problem, Role, named,
};
use ndarray::ArrayD;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

named! {
    /// Amount of checking in a run.
    #[derive(Default)]
    Depth, "depth" {
        /// So few cases that every law looks at two, where it can; a tenth of what core depth costs, to run
        /// beside one's editor.
        Smoke = "smoke",
        /// Every pair of the grid once, and a few large cases; about a minute on two cores.
        #[default]
        Core = "core",
        /// Every pair of the grid in every storage type, and every large shape with every value of each
        /// axis, for several seeds.
        Full = "full",
        /// As [`Depth::Full`], for as many seeds as an hour or so takes.
        Soak = "soak",
    }
}

impl Depth {
    fn seeds(self) -> u64 {
        match self {
            Depth::Smoke | Depth::Core => 1,
            Depth::Full => 4,
            Depth::Soak => 64,
        }
    }

    /// True if a point of the grid is tried in every storage type, not in one.
    fn has_all_types(self) -> bool {
        matches!(self, Depth::Full | Depth::Soak)
    }
}

/// A point of the grid and a seed: all that a case is made of. Its `Display` is the case's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spec {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The storage type.
    pub dtype: Dtype,
    /// The point of the algorithm's grid.
    pub point: Point,
    /// The seed.
    pub seed: u64,
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Spec { algorithm, dtype, seed, .. } = self;
        write!(f, "{algorithm}/{dtype}/{}/{seed:x}", self.coordinates())
    }
}

impl FromStr for Spec {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let parts: Vec<&str> = name.split('/').collect();
        let [algorithm, dtype, point @ .., seed] = &parts[..] else {
            return Err(Error::value("case", "algorithm/dtype/…/seed", name));
        };
        let algorithm: Algorithm = algorithm.parse()?;
        let axes = Point::axes(algorithm);
        if point.len() != axes.len() {
            let axes: Vec<&str> = axes.iter().map(|(name, _)| *name).collect();
            let expected = format!("algorithm/dtype/{}/seed", axes.join("/"));
            return Err(Error::value("case", expected, name));
        }
        Ok(Spec {
            algorithm,
            dtype: dtype.parse()?,
            point: Point::parse(algorithm, point)?,
            seed: u64::from_str_radix(seed, 16)
                .map_err(|_| Error::value("case.seed", "a hexadecimal number", seed))?,
        })
    }
}

impl Spec {
    fn coordinates(&self) -> String {
        each!(&self.point, point => point.names()).join("/")
    }

    /// Its value on every axis, as in `mask=causal`.
    pub fn values(&self) -> Vec<String> {
        let names = each!(&self.point, point => point.names());
        let axes = Point::axes(self.algorithm).into_iter();
        axes.zip(names).map(|((axis, _), name)| format!("{axis}={name}")).collect()
    }

    /// Its value on the axis of shapes.
    pub fn shape(&self) -> &'static str {
        let names = each!(&self.point, point => point.names());
        let at = Point::axes(self.algorithm).iter().position(|(axis, _)| *axis == SHAPE);
        at.map_or("", |at| names[at])
    }

    /// The axes of its algorithm, with the values of each.
    pub fn choices(&self) -> Vec<(&'static str, Vec<&'static str>)> {
        Point::axes(self.algorithm)
    }

    /// True if a shape of its algorithm is one whose extents are large.
    pub fn is_large_shape(&self, name: &str) -> bool {
        Point::large(self.algorithm).contains(&name)
    }

    /// The same with other values on some axes.
    pub(crate) fn with(&self, values: &[(&str, &str)]) -> Option<Spec> {
        let own = each!(&self.point, point => point.names());
        let value = |((axis, _), own): ((&'static str, _), &'static str)| {
            values.iter().find(|(name, _)| *name == axis).map_or(own, |(_, value)| *value)
        };
        let names: Vec<&str> = self.choices().into_iter().zip(own).map(value).collect();
        Some(Spec { point: Point::parse(self.algorithm, &names).ok()?, ..*self })
    }

    /// The point with these values on some axes and the first on all others. Its draws follow from `name` alone, and
    /// not from the names of all axes.
    pub(crate) fn drawn_by(
        name: &str,
        (algorithm, dtype): (Algorithm, Dtype),
        values: &[(&str, &str)],
    ) -> Result<Spec, Error> {
        let axes = Point::axes(algorithm);
        for (axis, value) in values {
            let known = axes.iter().find(|(name, _)| name == axis);
            let (_, names) = known.ok_or_else(|| {
                let names: Vec<&str> = axes.iter().map(|(name, _)| *name).collect();
                Error::value("axis", format!("one of {}", names.join(", ")), axis)
            })?;
            if !names.contains(value) {
                return Err(Error::value(*axis, format!("one of {}", names.join(", ")), value));
            }
        }
        let own = |axis: &str| values.iter().find(|(name, _)| *name == axis).map(|x| x.1);
        let names: Vec<&str> =
            axes.iter().map(|(axis, names)| own(axis).unwrap_or(names[0])).collect();
        let spec = Spec { algorithm, dtype, point: Point::parse(algorithm, &names)?, seed: 0 };
        Ok(Spec { seed: crate::generate::fnv(name) ^ spec.draw_seed(), ..spec })
    }

    /// A seed of its own: the discrete draws differ between points, but not between storage types.
    fn draw_seed(&self) -> u64 {
        self.seed ^ crate::generate::fnv(&format!("{}/{}", self.algorithm, self.coordinates()))
    }

    /// The problem of this point.
    pub fn problem(&self) -> Problem {
        self.fitted(&|_| {})
    }

    /// The problem of this point with extents that fit a declared kernel, the first that takes the problem then.
    pub(crate) fn problem_for(&self, capabilities: &Capabilities) -> Problem {
        let own = capabilities.kernels.iter().filter(|kernel| kernel.algorithm == self.algorithm);
        let takes = |problem: &Problem| {
            let mut passes = self.algorithm.passes().iter();
            passes.any(|&pass| capabilities.takes(problem, pass, self.dtype).is_ok())
        };
        let mut fitted = own.map(|kernel| self.problem_to_fit(kernel));
        fitted.find(takes).unwrap_or_else(|| self.problem())
    }

    /// The problem of this point with extents that fit a kernel, unless the rest of the point does not go with them.
    pub(crate) fn problem_to_fit(&self, kernel: &Kernel) -> Problem {
        let fitted = self.fitted(&|numbers| kernel.fit(numbers));
        if fitted.check().is_ok() { fitted } else { self.problem() }
    }

    fn fitted(&self, fit: Fit<'_>) -> Problem {
        each!(&self.point, point => point.problem(self.algorithm, self.draw_seed(), fit))
    }

    /// One tensor of a pass, as the family has it.
    pub fn tensor(&self, problem: &Problem, operand: &Operand) -> Tensor {
        let seed = self.draw_seed();
        let values = each!(&self.point, point => point.values(problem, operand, self.dtype, seed));
        Tensor::store(&values, Stored::of(operand.precision, self.dtype))
    }

    /// True if its extents are large: gates and contracts alone look at such a case.
    pub fn is_large(&self) -> bool {
        let names = each!(&self.point, point => point.names());
        names.iter().any(|name| Point::large(self.algorithm).contains(name))
    }

    /// True if an operand that may be absent is there: in the second order, and of tangents, one in four
    /// is not, whatever the point.
    pub(crate) fn given(&self, operand: &Operand, pass: Pass) -> bool {
        let absent = operand.role == Role::OptionalCotangent
            && matches!(pass, Pass::DoubleBackward | Pass::Jvp)
            && Stream::new(self.draw_seed(), operand.name).below(usize::MAX, 4) == 0;
        operand.role.is_given() && !absent && each!(&self.point, point => point.given(operand))
    }

    /// The inputs and cotangents of a pass.
    pub fn tensors(&self, problem: &Problem, pass: Pass) -> Tensors {
        let given = |operand: &Operand| self.given(operand, pass);
        let operands = problem.operands(pass);
        operands
            .iter()
            .filter(|operand| given(operand))
            .map(|operand| (operand.name.to_string(), self.tensor(problem, operand)))
            .collect()
    }

    /// Description of the elements in a few words: that of their family, or its name.
    pub fn few_words(&self) -> &'static str {
        match &self.point {
            Point::Attention(point) => point.family.name(),
            Point::LinearAttention(point) => point.family.name(),
            Point::LazyAttention(point) => point.elements.name(),
            Point::LinearCrossEntropy(point) => point.family.few_words(),
        }
    }

    /// The case of this point: its problem, and the inputs of the forward and backward pass.
    pub fn build(&self) -> Case {
        self.with_inputs(self.problem())
    }

    /// The same with extents that fit a declared kernel. The name stays: it makes the case again for the same
    /// capabilities.
    pub fn build_for(&self, capabilities: &Capabilities) -> Case {
        self.with_inputs(self.problem_for(capabilities))
    }

    fn with_inputs(&self, problem: Problem) -> Case {
        let inputs = self.tensors(&problem, Pass::Backward);
        Case {
            name: self.to_string(),
            spec: *self,
            dtype: self.dtype,
            problem,
            inputs,
            further: no_inputs(),
            given: false,
        }
    }
}

/// The inputs of further passes before anybody asks for them.
fn no_inputs() -> BTreeMap<Pass, OnceLock<Tensors>> {
    Pass::ALL.map(|pass| (pass, OnceLock::new())).into()
}

/// A problem with inputs.
#[derive(Debug, Clone)]
pub struct Case {
    /// Its name, from which [`Spec::from_str`] makes it again.
    pub name: String,
    /// The point that it was made from; of a problem that somebody brings, which no point describes, the plainest
    /// point of its algorithm with its storage type and seed.
    pub spec: Spec,
    /// The problem.
    pub problem: Problem,
    /// The storage type.
    pub dtype: Dtype,
    /// The inputs and cotangents of the forward and backward pass.
    pub inputs: Tensors,
    /// Values of further passes, computed at the first request.
    further: BTreeMap<Pass, OnceLock<Tensors>>,
    /// Set of a problem that somebody brought.
    given: bool,
}

impl Case {
    /// A problem that somebody brings, which has passed its check. Probes alone look at it: they choose the
    /// elements, so that these inputs are zeros, beside targets that are classes. Of the optional
    /// cotangents it has those that are named.
    pub fn given(
        name: &str,
        problem: Problem,
        dtype: Dtype,
        seed: u64,
        cotangents: &[String],
    ) -> Result<Self, Error> {
        let algorithm = problem.algorithm();
        let plainest: Vec<&str> =
            Point::axes(algorithm).iter().map(|(_, names)| names[0]).collect();
        let spec = Spec { algorithm, dtype, point: Point::parse(algorithm, &plainest)?, seed };
        let classes = Stream::new(seed, "targets");
        let vocab = problem.extent(Axis::Classes);
        let tensor = |operand: Operand| {
            let element = |at: usize| match operand.precision {
                Precision::Integer => classes.below(at, vocab) as f64,
                _ if operand.name == LOSS => 1.0,
                _ => 0.0,
            };
            let values = (0..operand.len()).map(element).collect();
            let values = ArrayD::from_shape_vec(operand.shape.as_slice(), values);
            let stored = Stored::of(operand.precision, dtype);
            values.map(|values| (operand.name.to_string(), Tensor::store(&values, stored)))
        };
        let is_there = |x: &Operand| match x.role {
            Role::OptionalCotangent => {
                x.name == LOSS || cotangents.iter().any(|name| name == x.name)
            }
            role => role.is_given(),
        };
        let operands = problem.operands(Pass::Backward).into_iter().filter(is_there);
        let inputs = operands.map(tensor).collect::<Result<_, _>>();
        let inputs = inputs.map_err(|error| Error::value("shape", "addressable", error))?;
        let (name, further) = (name.to_string(), no_inputs());
        Ok(Case { name, spec, dtype, problem, inputs, further, given: true })
    }

    /// Tells whether somebody brought the problem, so that it must stand as it is: the points of a grid take any
    /// change.
    pub(crate) fn is_given(&self) -> bool {
        self.given
    }

    /// The inputs and cotangents of a pass.
    pub fn inputs_of(&self, pass: Pass) -> &Tensors {
        match pass {
            Pass::Forward | Pass::Backward | Pass::ForwardBackward => &self.inputs,
            _ => self.further[&pass].get_or_init(|| self.spec.tensors(&self.problem, pass)),
        }
    }

    /// Other elements for a pass of the same problem: those of a later seed.
    pub(crate) fn afresh(&self, pass: Pass, later: u64) -> Tensors {
        let seed = self.spec.seed.wrapping_add(later);
        Spec { seed, ..self.spec }.tensors(&self.problem, pass)
    }

    /// True if its bounds must be small against its results.
    pub(crate) fn is_rich(&self) -> bool {
        each!(&self.spec.point, point => point.is_rich(&self.problem))
    }

    /// True if the errors of a kernel are random. Those of a row that sees few keys are not, nor those of a
    /// key that few rows see: their gradients are differences of what nearly cancels.
    pub(crate) fn is_generic(&self) -> bool {
        let sums = self.problem.scores().is_none_or(|scores| {
            let e = &scores.extents;
            let rows = (e.batch * e.query_heads * e.queries.max(e.keys)) as u128;
            scores.visible_pairs().is_ok_and(|pairs| pairs as u128 >= FEW_PAIRS * rows)
        });
        sums && each!(&self.spec.point, point => point.is_generic())
    }

    /// True if a small change of any input changes results by about as much.
    pub(crate) fn is_smooth(&self) -> bool {
        each!(&self.spec.point, point => point.is_smooth())
    }

    /// The scores of its problem; laws that presuppose them are asked for no other algorithm.
    pub(crate) fn scores(&self) -> Result<&etalon_problem::Scores, Error> {
        self.problem.scores().ok_or_else(|| Error::Unsupported {
            what: format!("scores of {}", self.problem.algorithm()),
            reason: "the algorithm has none".to_string(),
        })
    }

    /// Its point, if it is one of attention or attention_lse.
    pub fn attention(&self) -> Option<&attention::Point> {
        if let Point::Attention(point) = &self.spec.point { Some(point) } else { None }
    }

    /// The family that its queries, keys and values are drawn from, if it has them.
    pub(crate) fn family(&self) -> Option<attention::Family> {
        match &self.spec.point {
            Point::Attention(point) => Some(point.family),
            Point::LazyAttention(point) => Some(point.elements.of_attention()),
            _ => None,
        }
    }

    /// The tile sizes with which the case is asked, unless a law is about tile sizes: those of the
    /// tier, or some so small that even a short case has several tiles in both directions; for linear
    /// attention also several micro-chunks in a chunk. Of a large case those that its shape is about.
    pub fn blocking(&self) -> Option<Blocking> {
        if self.given {
            return None;
        }
        if self.spec.is_large() {
            return each!(&self.spec.point, point => point.blocking());
        }
        let mut sizes = vec![None, Some(Blocking::new(8, 16)), Some(Blocking::new(24, 64))];
        if self.spec.algorithm == Algorithm::LinearAttention {
            sizes.push(Some(Blocking::new(64, 16)));
        }
        Stream::new(self.spec.seed, &self.name).pick(0, &sizes)
    }
}

/// Rows that see fewer keys in the mean, or keys that fewer rows see, are not judged by the size of their
/// errors.
const FEW_PAIRS: u128 = 4;

/// The storage types of an algorithm's cases.
pub fn storage(algorithm: Algorithm) -> &'static [Dtype] {
    Point::storage(algorithm)
}

/// The points of a run, before the suite leaves out those that no law looks at.
pub fn specs(algorithm: Algorithm, depth: Depth, seed: u64) -> impl Iterator<Item = Spec> + use<> {
    specs_for(algorithm, depth, seed, None)
}

/// The same of values that declared capabilities take, as far as these go together.
pub(crate) fn specs_for(
    algorithm: Algorithm,
    depth: Depth,
    seed: u64,
    capabilities: Option<&Capabilities>,
) -> impl Iterator<Item = Spec> + use<> {
    let choices = match capabilities {
        Some(capabilities) => Choices::within(algorithm, capabilities),
        None => Choices::all(algorithm),
    };
    let of_seed = |seed| {
        let points = covering::points(&choices, seed).into_iter().flat_map(|spec| {
            let types = choices.storage.iter().copied();
            let types = types.filter(move |&dtype| depth.has_all_types() || dtype == spec.dtype);
            types.map(move |dtype| Spec { dtype, ..spec })
        });
        points.chain(large::points(&choices, depth, seed)).collect::<Vec<_>>()
    };
    let rounds = (0..depth.seeds()).map(|round| of_seed(seed.wrapping_add(round)));
    rounds.collect::<Vec<_>>().into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_made_again_from_its_name() {
        for algorithm in Algorithm::ALL {
            for spec in specs(algorithm, Depth::Core, 7).step_by(11) {
                let again: Spec = spec.to_string().parse().unwrap();
                assert_eq!(again, spec);
                assert_eq!(again.build().problem, spec.build().problem);
            }
        }
        assert!("attention/f32/diagonal".parse::<Spec>().is_err());
    }

    #[test]
    fn every_case_is_a_valid_problem() {
        for algorithm in Algorithm::ALL {
            for spec in specs(algorithm, Depth::Core, 3) {
                let case = spec.build();
                case.problem.check().unwrap_or_else(|error| panic!("{spec}: {error}"));
            }
        }
    }
}
