//! Passes on tensors of a GPU in a build without the feature `cuda`: there are none.

use crate::error::exception;
use crate::problem::Problem;
use etalon_conformance::tiers::NO_CUDA;
use etalon_problem::Error;
use pyo3::prelude::*;

/// A pass that is prepared for tensors of a device: nobody gets one.
#[pyclass(frozen, module = "etalon._etalon")]
pub struct DevicePass {}

#[pymethods]
impl DevicePass {
    /// Why this build has no CUDA tier.
    #[classattr]
    fn absent() -> Option<&'static str> {
        Some(NO_CUDA)
    }

    /// Raises NotImplementedError.
    #[new]
    #[pyo3(signature = (problem, pass_, inputs, outputs, *, device))]
    fn new(
        problem: &Problem,
        pass_: &str,
        inputs: &Bound<'_, PyAny>,
        outputs: &Bound<'_, PyAny>,
        device: usize,
    ) -> PyResult<Self> {
        let _ = (inputs, outputs);
        Err(absent(problem, pass_, device))
    }

    /// Raises NotImplementedError.
    #[staticmethod]
    #[pyo3(signature = (problem, step, classes, inputs, outputs, *, device))]
    fn of_shards(
        problem: &Problem,
        step: &str,
        classes: &Bound<'_, PyAny>,
        inputs: &Bound<'_, PyAny>,
        outputs: &Bound<'_, PyAny>,
        device: usize,
    ) -> PyResult<Self> {
        let _ = (classes, inputs, outputs);
        Err(absent(problem, step, device))
    }
}

fn absent(problem: &Problem, pass_: &str, device: usize) -> PyErr {
    let what = format!("{} {pass_} on GPU {device}", problem.inner.algorithm());
    exception(Error::unsupported(what, NO_CUDA))
}
