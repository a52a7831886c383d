//! The judge: whether results are right.

use crate::engine::Engine;
use crate::error::exception;
use crate::problem::{Problem, copied};
use etalon_cli::{Judgement, Refused, judge};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

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
) -> PyResult<(&'static str, String, String)> {
    let pass = pass_.parse().map_err(exception)?;
    let (inputs, outputs) = (copied(inputs)?, copied(outputs)?);
    let judged = Engine::get()?.run(py, f64::INFINITY, || {
        judge(&problem.inner, pass, inputs, &outputs, &only, (profile, generic))
    });
    let Judgement { status, text, json } = judged.map_err(|refused| match refused {
        Refused::Question(error) => exception(error),
        Refused::Other(line) => PyValueError::new_err(line),
    })?;
    Ok((status.name(), text, json))
}
