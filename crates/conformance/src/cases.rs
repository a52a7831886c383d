//! Cases: problems with inputs, each made from its name alone.
//!
//! A case is drawn in two steps. Its discrete structure is a point of a grid (mask × options ×
//! shape × sequences × family × cotangents × storage type), and a run visits points such that every
//! pair of values of two axes occurs. All that remains (lengths, widths, ids, elements) follows
//! from the point's name and the seed by the streams of [`crate::generate`].

mod covering;
mod factors;
mod family;

pub use factors::{DlseKind, MaskKind, OptionKind, SequenceKind};
pub use family::Family;

use crate::generate::Stream;
use crate::shapes::ShapeClass;
use crate::tensor::{Tensor, Tensors};
use etalon_problem::{
    Algorithm, Attention, AttentionLse, Blocking, Dtype, Error, Operand, Pass, Precision, Problem,
    Role, Scores,
};
use std::fmt;
use std::str::FromStr;

/// How much a run does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Depth {
    /// Every pair of the grid once; under a minute on two cores.
    #[default]
    Core,
    /// Every pair of the grid in every storage type, for several seeds.
    Full,
    /// As [`Depth::Full`], for as many seeds as an hour or so takes.
    Soak,
}

impl Depth {
    /// Every depth.
    pub const ALL: [Depth; 3] = [Depth::Core, Depth::Full, Depth::Soak];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Depth::Core => "core",
            Depth::Full => "full",
            Depth::Soak => "soak",
        }
    }

    fn seeds(self) -> u64 {
        match self {
            Depth::Core => 1,
            Depth::Full => 4,
            Depth::Soak => 64,
        }
    }
}

/// A point of the grid and a seed: all that a case is made of. Its `Display` is the case's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spec {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The storage type.
    pub dtype: Dtype,
    /// The kind of mask.
    pub mask: MaskKind,
    /// The options that are set.
    pub options: OptionKind,
    /// The class of extents.
    pub shape: ShapeClass,
    /// How the rows divide into sequences.
    pub sequences: SequenceKind,
    /// The family of the elements.
    pub family: Family,
    /// Whether there is a cotangent of lse.
    pub dlse: DlseKind,
    /// The seed.
    pub seed: u64,
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{:x}", self.point(), self.seed)
    }
}

impl FromStr for Spec {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let parts: Vec<&str> = name.split('/').collect();
        let [algorithm, dtype, mask, options, shape, sequences, family, dlse, seed] = parts[..]
        else {
            let expected = "algorithm/dtype/mask/options/shape/sequences/family/dlse/seed";
            return Err(Error::value("case", expected, name));
        };
        let shapes = ShapeClass::ALL.map(|shape| (shape.name(), shape));
        Ok(Spec {
            algorithm: algorithm.parse()?,
            dtype: dtype.parse()?,
            mask: factors::find("case.mask", &MaskKind::ALL.map(|x| (x.name(), x)), mask)?,
            options: factors::find(
                "case.options",
                &OptionKind::ALL.map(|x| (x.name(), x)),
                options,
            )?,
            shape: factors::find("case.shape", &shapes, shape)?,
            sequences: factors::find(
                "case.sequences",
                &SequenceKind::ALL.map(|x| (x.name(), x)),
                sequences,
            )?,
            family: factors::find("case.family", &Family::ALL.map(|x| (x.name(), x)), family)?,
            dlse: factors::find("case.dlse", &DlseKind::ALL.map(|x| (x.name(), x)), dlse)?,
            seed: u64::from_str_radix(seed, 16)
                .map_err(|_| Error::value("case.seed", "a hexadecimal number", seed))?,
        })
    }
}

impl Spec {
    fn point(&self) -> String {
        [
            self.algorithm.name(),
            self.dtype.name(),
            self.mask.name(),
            self.options.name(),
            self.shape.name(),
            self.sequences.name(),
            self.family.name(),
            self.dlse.name(),
        ]
        .join("/")
    }

    /// A seed of its own: the discrete draws differ between points, but not between storage types.
    fn draw_seed(&self) -> u64 {
        let point = self.point().replacen(&format!("/{}/", self.dtype), "/", 1);
        self.seed ^ crate::generate::fnv(&point)
    }

    /// The problem of this point.
    pub fn problem(&self) -> Problem {
        let seed = self.draw_seed();
        let mut shape = self.shape.draw(seed);
        if self.sequences == SequenceKind::Packed {
            shape.extents.batch = 1;
        }
        let mut scores = Scores::new(shape.extents);
        self.options.set(&mut scores, seed);
        if self.family == Family::Holes && scores.bias.is_none() {
            let (batch, heads) = (shape.extents.batch, shape.extents.query_heads);
            scores.bias = Some(etalon_problem::BiasExtents { batch, heads });
        }
        scores.sequences = self.sequences.draw(&shape.extents, seed);
        scores.mask = self.mask.draw(&shape.extents, seed);
        match self.algorithm {
            Algorithm::Attention => Attention { scores, value_dim: shape.value_dim }.into(),
            Algorithm::AttentionLse => AttentionLse { scores }.into(),
        }
    }

    /// One tensor of a pass, as the family has it.
    pub fn tensor(&self, problem: &Problem, operand: &Operand) -> Tensor {
        let dtype = match operand.precision {
            Precision::Storage => self.dtype,
            Precision::Wide if self.dtype == Dtype::F64 => Dtype::F64,
            Precision::Wide => Dtype::F32,
        };
        let values = self.family.values(problem, operand, self.dtype, self.draw_seed());
        Tensor::round(&values, dtype)
    }

    /// The inputs and cotangents of a pass.
    pub fn tensors(&self, problem: &Problem, pass: Pass) -> Tensors {
        let given = |operand: &Operand| {
            operand.role != Role::Output
                && !(operand.name == "dlse"
                    && operand.role == Role::OptionalCotangent
                    && self.dlse == DlseKind::Absent)
        };
        let operands = problem.operands(pass);
        operands
            .iter()
            .filter(|operand| given(operand))
            .map(|operand| (operand.name.to_string(), self.tensor(problem, operand)))
            .collect()
    }

    /// The case of this point: its problem, and the inputs of the forward and backward pass.
    pub fn build(&self) -> Case {
        let problem = self.problem();
        let inputs = self.tensors(&problem, Pass::Backward);
        Case { name: self.to_string(), spec: *self, dtype: self.dtype, problem, inputs }
    }
}

/// A problem with inputs.
#[derive(Debug, Clone)]
pub struct Case {
    /// Its name, from which [`Spec::from_str`] makes it again.
    pub name: String,
    /// What it was made from.
    pub spec: Spec,
    /// The problem.
    pub problem: Problem,
    /// The storage type.
    pub dtype: Dtype,
    /// The inputs and cotangents of the forward and backward pass.
    pub inputs: Tensors,
}

impl Case {
    /// The tile sizes with which the case is asked, unless a law is about tile sizes: those of the
    /// tier, or some so small that even a short case has several tiles in both directions.
    pub fn blocking(&self) -> Option<Blocking> {
        let sizes = [None, Some(Blocking::new(8, 16)), Some(Blocking::new(24, 64))];
        Stream::new(self.spec.seed, &self.name).pick(0, &sizes)
    }
}

/// The points of a run.
pub fn specs(algorithm: Algorithm, depth: Depth, seed: u64) -> impl Iterator<Item = Spec> + use<> {
    const STORAGE: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];
    (0..depth.seeds()).flat_map(move |round| {
        let seed = seed.wrapping_add(round);
        covering::points(algorithm, seed).into_iter().flat_map(move |spec| {
            STORAGE
                .into_iter()
                .filter(move |&dtype| depth != Depth::Core || dtype == spec.dtype)
                .map(move |dtype| Spec { dtype, ..spec })
        })
    })
}

/// The cases of a run, each made when it is asked for.
pub fn cases(algorithm: Algorithm, depth: Depth, seed: u64) -> impl Iterator<Item = Case> + use<> {
    specs(algorithm, depth, seed).map(|spec| spec.build())
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
                assert_eq!(
                    case.inputs.contains_key("dlse"),
                    spec.dlse == DlseKind::Present,
                    "{spec}"
                );
            }
        }
    }
}
