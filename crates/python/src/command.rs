//! The command `etalon`, in the same library.

use pyo3::prelude::*;
use std::ffi::OsString;

/// Runs the command `etalon` with these arguments, the name of the program first, and returns its exit status.
/// `program` is the command line that starts it again in another process.
#[pyfunction]
pub fn command(py: Python<'_>, program: Vec<OsString>, arguments: Vec<OsString>) -> u8 {
    py.detach(|| etalon_cli::status(program, arguments))
}
