//! linear_cross_entropy.

mod args;
mod filter;
mod hopper;
mod levels;
mod plan;
mod prepared;
mod ready;
mod run;
mod shard;
mod sums;
mod tokens;
mod tree;

pub(crate) use args::ARGUMENTS;
pub(crate) use ready::{prepare, prepare_filtered};
pub(crate) use shard::{Step, WORDS, prepare_shard};
pub(crate) use sums::prepare_sums;
pub(crate) use tokens::counted;
pub(crate) use tree::nodes;

/// Tokens and classes of a tile of a filter.
pub(crate) const FILTER_TILE: [usize; 2] = [plan::SIDE, plan::TILE];
