//! The cuda tier in the command; `no_cuda.rs` has the same names for a build without it.

pub mod archive;
pub mod gpu;
pub mod levels;
pub mod plans;
mod rates;
