//! linear_attention: `kernels/linear*.cu*`.

mod call;
mod hopper;
mod hopper_modules;
mod log_decays;
mod maps;
mod passes;
mod prepared;
mod ready;
mod second;
mod shared;
mod tables;

pub(crate) use log_decays::check_log_decays;
pub(crate) use ready::Ready;
pub use shared::{LinearKernel, linear_shared};

/// Tokens of a chunk, and of a micro-chunk: a tile.
pub(crate) const CHUNK: usize = 128;
const SIDE: usize = 64;

/// A call of a prepared pass.
type Job<'a> = crate::job::Job<'a, prepared::Prepared<'a>>;
