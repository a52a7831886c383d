//! linear_attention: `kernels/linear_attention/`.

mod args;
mod draft;
mod hopper;
mod log_decays;
mod passes;
mod prepared;
mod tables;

pub(crate) use args::ARGUMENTS;
pub(crate) use draft::draft;
pub(crate) use log_decays::check_log_decays;

/// Tokens of a chunk, and of a micro-chunk: a tile.
pub(crate) const CHUNK: usize = 128;
const SIDE: usize = 64;
