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
mod tree;

pub(crate) use ready::Ready;
pub(crate) use shard::{ShardReady, Step};
pub(crate) use sums::Sums;
pub(crate) use tokens::counted;
pub(crate) use tree::nodes;

/// Numbers of 32 bits in a partial: `Partial` of `cross_entropy_shards.cu`.
pub(crate) const WORDS: usize = 9;

/// Tokens and classes of a tile of a filter.
pub(crate) const FILTER_TILE: [usize; 2] = [plan::SIDE, plan::TILE];
