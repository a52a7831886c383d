//! The judge: whether results are right.

use crate::engine::Engine;
use crate::error::exception;
use crate::problem::{Problem, copied, without_file};
use crate::tensor::array;
use etalon_cli::{Judgement, Refused, judge, judge_trace, trace_of};
use etalon_conformance::vectors;
use etalon_problem::{Dtype, Error, Walk};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::Path;

/// Judges results of a pass on these inputs as those of a kernel of a profile: a name, "usual" for the one that goes
/// with the type of the first input, or "auto" for the strictest that holds. Returns the status (passed, undecided,
/// failed), and the report as text, with the verdict in its first line, and in JSON.
#[pyfunction]
#[pyo3(signature = (problem, pass_, inputs, outputs, *, profile = "usual", only = Vec::new(), generic = None))]
#[allow(clippy::too_many_arguments, reason = "keywords in Python")]
pub fn check(
    py: Python<'_>,
    problem: &Problem,
    pass_: &str,
    inputs: &Bound<'_, PyDict>,
    outputs: &Bound<'_, PyDict>,
    profile: &str,
    only: Vec<String>,
    generic: Option<bool>,
) -> PyResult<Told> {
    let pass = pass_.parse().map_err(exception)?;
    let (inputs, outputs) = (copied(inputs)?, copied(outputs)?);
    let check = || judge(&problem.inner, pass, inputs, &outputs, &only, (profile, generic));
    asked(py, check).map(told)
}

/// The exact results of a pass in f64, by name, each with the bound of every element for a kernel of a profile, which
/// stores some results in other types than usual.
#[pyfunction]
#[pyo3(signature = (problem, pass_, inputs, *, profile, stored))]
pub fn bounds<'py>(
    py: Python<'py>,
    problem: &Problem,
    pass_: &str,
    inputs: &Bound<'py, PyDict>,
    profile: &str,
    stored: Vec<(String, String)>,
) -> PyResult<Bound<'py, PyDict>> {
    let pass = pass_.parse().map_err(exception)?;
    let inputs = copied(inputs)?;
    let own = stored.into_iter().map(|(name, dtype)| Ok((name, dtype.parse()?)));
    let own: Vec<(String, Dtype)> = own.collect::<Result<_, Error>>().map_err(exception)?;
    let found = asked(py, || etalon_cli::bounds(&problem.inner, pass, inputs, profile, &own))?;
    let results = PyDict::new(py);
    for (name, (value, bound)) in found {
        results.set_item(name, (array(py, &value)?, array(py, &bound)?))?;
    }
    Ok(results)
}

/// The exact trace of a pass in f64, by name, along a walk in JSON; of these tensors, or of all.
#[pyfunction]
pub fn trace<'py>(
    py: Python<'py>,
    problem: &Problem,
    pass_: &str,
    inputs: &Bound<'py, PyDict>,
    walk: &str,
    only: Vec<String>,
) -> PyResult<Bound<'py, PyDict>> {
    let pass = pass_.parse().map_err(exception)?;
    let (inputs, walk) = (copied(inputs)?, parsed(walk)?);
    let found = asked(py, || trace_of(&problem.inner, pass, inputs, &walk, &only))?;
    let results = PyDict::new(py);
    for (name, values) in found {
        results.set_item(name, array(py, &values)?)?;
    }
    Ok(results)
}

/// Judges what a kernel held after each tile of a walk. Returns what [`check`] returns.
#[pyfunction]
#[pyo3(signature = (problem, pass_, inputs, steps, walk, *, profile = "usual"))]
pub fn check_trace(
    py: Python<'_>,
    problem: &Problem,
    pass_: &str,
    inputs: &Bound<'_, PyDict>,
    steps: &Bound<'_, PyDict>,
    walk: &str,
    profile: &str,
) -> PyResult<Told> {
    let pass = pass_.parse().map_err(exception)?;
    let (inputs, steps, walk) = (copied(inputs)?, copied(steps)?, parsed(walk)?);
    let check = || judge_trace(&problem.inner, pass, inputs, (&walk, &steps), profile);
    asked(py, check).map(told)
}

/// An answer of the command's functions, on all threads and without the interpreter's lock.
fn asked<T: Send>(py: Python<'_>, work: impl Send + FnOnce() -> Result<T, Refused>) -> PyResult<T> {
    Engine::get()?.run(py, f64::INFINITY, work).map_err(refusal)
}

fn parsed(walk: &str) -> PyResult<Walk> {
    vectors::parse_json(Path::new("walk"), "walk", walk).map_err(without_file)
}

/// A judgement: the status, and the report as text and in JSON.
pub type Told = (&'static str, String, String);

pub fn told(Judgement { status, text, json }: Judgement) -> Told {
    (status.name(), text, json)
}

/// The exception where there is no judgement.
pub fn refusal(refused: Refused) -> PyErr {
    match refused {
        Refused::Question(error) => exception(error),
        Refused::Other(line) => PyValueError::new_err(line),
    }
}
