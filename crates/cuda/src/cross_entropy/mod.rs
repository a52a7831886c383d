//! linear_cross_entropy.

mod call;
mod filter;
mod hopper;
mod plan;
mod prepared;
mod ready;
mod run;
mod shard;
mod sums;
mod tokens;

pub(crate) use ready::Ready;
pub(crate) use shard::{ShardReady, Step};
pub(crate) use sums::Sums;
pub(crate) use tokens::counted;

/// Tokens and classes of a tile of a filter.
pub(crate) const FILTER_TILE: [usize; 2] = [plan::SIDE, plan::TILE];
