//! Errors of the crates as exceptions.

use etalon_problem::Error;
use pyo3::PyErr;
use pyo3::exceptions::{
    PyMemoryError, PyNotImplementedError, PyRuntimeError, PyTypeError, PyValueError,
};

/// The exception for an error: TypeError for a tensor that is missing, of no use or of another type, ValueError for
/// a shape or a value, NotImplementedError where a tier has no kernel.
pub fn exception(error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Dtype { .. } | Error::Missing { .. } | Error::Unexpected { .. } => {
            PyTypeError::new_err(text)
        }
        Error::Shape { .. } | Error::Value { .. } | Error::Work { .. } => {
            PyValueError::new_err(text)
        }
        Error::Unsupported { .. } => PyNotImplementedError::new_err(text),
        Error::Memory { .. } => PyMemoryError::new_err(text),
        _ => PyRuntimeError::new_err(text),
    }
}
