//! The module `etalon._etalon`, on which the Python package `etalon` stands: problems, passes by name over tensors
//! of any framework, and the judge.
//!
//! Tensors are borrowed (`tensor.rs`) and never copied, but for whole numbers of 32 bits and flags. Passes run without
//! the interpreter's lock, on threads of the module's own (`engine.rs`). XLA calls them without Python (`ffi.rs`).

mod command;
mod conform;
// This file alone asks whether this build has the CUDA tier.
#[cfg_attr(not(feature = "cuda"), path = "no_device.rs")]
mod device;
mod engine;
mod error;
mod ffi;
mod judge;
mod openmp;
mod overlap;
mod problem;
mod shard;
mod tensor;
mod xla;

use pyo3::prelude::*;

/// Compiled parts of `etalon`.
#[pymodule]
mod _etalon {
    #[pymodule_export]
    use super::command::command;
    #[pymodule_export]
    use super::conform::{cases, conform};
    #[pymodule_export]
    use super::device::DevicePass;
    #[pymodule_export]
    use super::engine::{
        after_fork, cpu_tier, find_openmp, get_num_threads, get_precision, release_memory,
        set_num_threads, set_precision,
    };
    #[pymodule_export]
    use super::ffi::xla_handlers;
    #[pymodule_export]
    use super::judge::{bounds, check, check_trace, trace};
    #[pymodule_export]
    use super::problem::Problem;
    #[pymodule_export]
    use super::shard::{count_nodes, run_shard};
}
