//! Problems, and passes of them.

use crate::engine::{Engine, level, precision};
use crate::error::exception;
use crate::tensor::{self, Borrowed};
use etalon_conformance::tensor::Tensors;
use etalon_conformance::vectors;
use etalon_problem::{
    self as problem, Axis, Error, Operand, Pass, Precision, Role, View, Views, ViewsMut,
};
use etalon_simd::{Level, Options};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use smallvec::SmallVec;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

/// A problem, what a kernel computes: an algorithm, its extents and options, and its mask.
#[pyclass(frozen, module = "etalon", name = "Problem")]
pub struct Problem {
    pub inner: problem::Problem,
    /// Multiplications of its forward pass, about.
    pub multiplications: f64,
    text: String,
    hash: u64,
}

/// A tensor of a pass: its name, role and shape, and whose type it has.
type Told = (&'static str, &'static str, Vec<usize>, &'static str);

#[pymethods]
impl Problem {
    /// Reads a problem in JSON. Arrays that its mask and its sequences name are those of `arrays`.
    #[new]
    #[pyo3(signature = (text, arrays = None))]
    fn new(text: &str, arrays: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let arrays = arrays.map_or(Ok(Tensors::new()), copied)?;
        let [own, of_arrays] = ["problem", "arrays"].map(Path::new);
        let inner = vectors::parse_problem(own, text, of_arrays, &arrays).map_err(without_file)?;
        Problem::of(inner)
    }

    /// The problem in JSON, without the elements of its arrays.
    fn json(&self) -> &str {
        &self.text
    }

    /// The name of the algorithm.
    #[getter]
    fn algorithm(&self) -> &'static str {
        self.inner.algorithm().name()
    }

    /// The keys of its file, without the elements of its arrays.
    #[getter]
    fn options<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import("json")?.call_method1("loads", (&self.text,))
    }

    /// The arrays that its mask and its sequences name, by name.
    #[getter]
    fn arrays<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let arrays = PyDict::new(py);
        let own = vectors::with_arrays(&self.inner, Tensors::new()).map_err(exception)?;
        for (name, tensor) in own {
            arrays.set_item(name, tensor::array(py, &tensor)?)?;
        }
        Ok(arrays)
    }

    /// The names of the passes.
    #[getter]
    fn passes(&self) -> Vec<&'static str> {
        self.inner.algorithm().passes().iter().map(|pass| pass.name()).collect()
    }

    /// The extent of an axis by its symbol: "N", "Hq".
    fn extent(&self, axis: &str) -> PyResult<usize> {
        let passes = self.inner.algorithm().passes().iter();
        let operands = passes.flat_map(|&pass| self.inner.operands(pass));
        let axes = operands.flat_map(|operand| operand.axes.into_iter().zip(operand.shape));
        let mut found = axes.filter(|(other, _)| other.symbol() == axis);
        let (_, extent) = found.next().ok_or_else(|| {
            let algorithm = self.algorithm();
            exception(Error::value("axis", format!("an axis of {algorithm}, such as \"D\""), axis))
        })?;
        Ok(extent)
    }

    /// The tensors of a pass, in their order: of each its name, role, shape, and whose type it has.
    #[pyo3(signature = (pass_ = "forward"))]
    fn operands(&self, pass_: &str) -> PyResult<Vec<Told>> {
        let table =
            self.inner.checked_table(pass_.parse().map_err(exception)?).map_err(exception)?;
        let told = |Operand { name, role, shape, precision, .. }: Operand| {
            (name, word(role), shape, type_word(precision))
        };
        Ok(table.operands.into_iter().map(told).collect())
    }

    /// Of each tensor of the forward pass its name, whether it is an input, and the names of its gradient, of the
    /// cotangent of that, of the gradient of second order and of its tangent, if it has them.
    fn families(&self) -> Vec<(&'static str, bool, Option<[&'static str; 4]>)> {
        self.inner.families().iter().map(|x| (x.name, x.input, x.companions)).collect()
    }

    /// Runs a pass: reads `inputs` and writes `outputs`, both by name. Results without a place are not computed.
    #[pyo3(signature = (pass_, inputs, outputs, *, tier = "auto", recompute = false, memory_budget = None))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn run(
        &self,
        py: Python<'_>,
        pass_: &str,
        inputs: &Bound<'_, PyDict>,
        outputs: &Bound<'_, PyDict>,
        tier: &str,
        recompute: bool,
        memory_budget: Option<usize>,
    ) -> PyResult<()> {
        let pass: Pass = pass_.parse().map_err(exception)?;
        let inputs = borrowed(inputs, Borrowed::input)?;
        let mut outputs = borrowed(outputs, Borrowed::output)?;
        check_memory(&inputs, &outputs)?;
        let (views, mut places) = (views(&inputs)?, places(&mut outputs)?);
        let tier = Tier::of(tier, &views)?;
        let mut options = Options { recompute, ..Options::default() };
        options.memory_budget = memory_budget.unwrap_or(options.memory_budget);
        let engine = Engine::get()?;
        let ran = engine.run(py, self.multiplications, || {
            tier.run(&engine, &self.inner, pass, &views, &mut places, options)
        });
        ran.map_err(exception)
    }

    fn __repr__(&self) -> String {
        format!("Problem({:?})", self.text)
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.inner == other.inner
    }

    fn __hash__(&self) -> u64 {
        self.hash
    }

    /// Pickled and copied by its text; one with arrays is not.
    fn __getnewargs__(&self) -> (&str,) {
        (&self.text,)
    }
}

impl Problem {
    /// One that has passed its check.
    pub fn of(inner: problem::Problem) -> PyResult<Self> {
        let text = serde_json::to_string(&inner);
        let text = text.map_err(|error| PyValueError::new_err(error.to_string()))?;
        let mut hasher = DefaultHasher::new();
        text.hash(&mut hasher);
        Ok(Problem { multiplications: multiplications(&inner), hash: hasher.finish(), inner, text })
    }
}

/// The tier that computes a pass.
#[derive(Clone, Copy)]
pub enum Tier {
    Reference,
    Simd(Level, etalon_simd::Precision),
}

impl Tier {
    /// The reference for tensors of f64, and else the best instruction set of the precision that is set.
    pub fn usual(inputs: &Views<'_>) -> Tier {
        match inputs.iter().next() {
            Some((_, View::F64(_))) => Tier::Reference,
            _ => Tier::best(),
        }
    }

    /// The best instruction set of the precision that is set.
    fn best() -> Tier {
        let precision = precision();
        Tier::Simd(level(precision), precision)
    }

    /// Runs a pass on the threads of the caller, which are those of the engine.
    pub fn run(
        self,
        engine: &Engine,
        problem: &problem::Problem,
        pass: Pass,
        inputs: &Views<'_>,
        outputs: &mut ViewsMut<'_>,
        options: Options,
    ) -> Result<(), Error> {
        match self {
            Tier::Reference => etalon_reference::run(problem, pass, inputs, outputs),
            Tier::Simd(level, precision) => {
                let options = Options { level, precision, ..options };
                etalon_simd::run_in(&engine.workspace, problem, pass, inputs, outputs, &options)
            }
        }
    }

    /// Reads the name of a tier: "auto" is [`Tier::usual`].
    fn of(name: &str, inputs: &Views<'_>) -> PyResult<Tier> {
        match name {
            "auto" => Ok(Tier::usual(inputs)),
            "simd" => Ok(Tier::best()),
            "reference" => Ok(Tier::Reference),
            _ => match name.strip_prefix("simd/").and_then(Options::by_name) {
                Some(named) => Ok(Tier::Simd(named.level, named.precision)),
                None => {
                    let levels = Options::of_levels().map(|x| format!(", simd/{}", x.name()));
                    let names =
                        format!("one of auto, reference, simd{}", levels.collect::<String>());
                    Err(exception(Error::value("tier", names, name)))
                }
            },
        }
    }
}

/// Multiplications of the forward pass of a problem, about.
pub fn multiplications(problem: &problem::Problem) -> f64 {
    let product =
        |axes: &[Axis]| axes.iter().map(|&axis| problem.extent(axis) as f64).product::<f64>();
    match problem {
        problem::Problem::LinearCrossEntropy(_) => {
            product(&[Axis::Targets, Axis::Dim, Axis::Classes])
        }
        problem::Problem::LinearAttention(_) => {
            product(&[Axis::Batch, Axis::QueryHeads, Axis::Tokens, Axis::Dim, Axis::ValueDim])
        }
        _ => product(&[Axis::Batch, Axis::QueryHeads, Axis::Queries, Axis::Keys, Axis::Dim]),
    }
}

/// The tensors of a dictionary, without those that are None.
pub fn borrowed<'py>(
    tensors: &Bound<'py, PyDict>,
    borrow: fn(&str, &Bound<'py, PyAny>) -> PyResult<Borrowed<'py>>,
) -> PyResult<SmallVec<[Borrowed<'py>; 8]>> {
    let given = tensors.iter().filter(|(_, tensor)| !tensor.is_none());
    given
        .map(|(name, tensor)| borrow(name.cast::<PyString>()?.to_cow()?.as_ref(), &tensor))
        .collect()
}

/// Views of borrowed tensors by name.
pub fn views<'a>(tensors: &'a [Borrowed<'_>]) -> PyResult<Views<'a>> {
    tensors.iter().try_fold(Views::new(), |mut views, tensor| {
        views.push(&tensor.name, tensor.view()?);
        Ok(views)
    })
}

/// Places of results in borrowed tensors by name.
pub fn places<'a>(tensors: &'a mut [Borrowed<'_>]) -> PyResult<ViewsMut<'a>> {
    tensors.iter_mut().try_fold(ViewsMut::new(), |mut places, tensor| {
        let (name, place) = tensor.place_of_result()?;
        places.push(name, place);
        Ok(places)
    })
}

/// Copies of the tensors of a dictionary.
pub fn copied(tensors: &Bound<'_, PyDict>) -> PyResult<Tensors> {
    let tensors = borrowed(tensors, Borrowed::input)?;
    Ok(tensors.iter().map(|tensor| (tensor.name.clone(), tensor.copied())).collect())
}

/// Fails where a result would be written over another tensor of the call.
pub fn check_memory(inputs: &[Borrowed<'_>], outputs: &[Borrowed<'_>]) -> PyResult<()> {
    for (at, output) in outputs.iter().enumerate() {
        let Some(place) = &output.place else { continue };
        let shares =
            |other: &&Borrowed<'_>| other.place.as_ref().is_some_and(|other| place.shares(other));
        if let Some(other) = outputs[at + 1..].iter().chain(inputs).find(shares) {
            let (name, other) = (&output.name, &other.name);
            return Err(PyValueError::new_err(format!(
                "`{name}` is written and must share no memory with `{other}`"
            )));
        }
    }
    Ok(())
}

fn word(role: Role) -> &'static str {
    match role {
        Role::Input => "input",
        Role::Saved => "saved",
        Role::OptionalSaved => "optional_saved",
        Role::Cotangent => "cotangent",
        Role::OptionalCotangent => "optional_cotangent",
        Role::Output => "output",
        Role::OptionalOutput => "optional_output",
    }
}

fn type_word(precision: Precision) -> &'static str {
    match precision {
        Precision::Storage => "storage",
        Precision::Wide => "wide",
        Precision::Integer => "integer",
    }
}

/// The exception for a problem that comes from no file: without the file, and its only line.
pub fn without_file(error: vectors::Error) -> PyErr {
    match error {
        vectors::Error::Content { source, .. } => exception(source),
        vectors::Error::Format { reason, .. } => {
            let reason = reason.trim_start_matches("not a valid problem file: ");
            PyValueError::new_err(reason.trim_start_matches("line 1: ").to_string())
        }
        error => PyValueError::new_err(error.to_string()),
    }
}
