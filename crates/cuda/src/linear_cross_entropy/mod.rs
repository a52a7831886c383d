//! The backward pass of linear cross-entropy with a filter, on a device: [`filtered_backward`]; and its classes in
//! shards: [`shard`]. Its passes are those of [`run_in`](crate::run_in).
#![cfg_attr(doc, doc = include_str!("../../../../docs/assets/links.md"))]

mod args;
mod filter;
mod filtered;
mod hopper;
mod plan;
mod prepared;
mod run;
pub mod shard;
mod shard_pass;
mod tokens;

pub(crate) use args::ARGUMENTS;
pub use etalon_problem::linear_cross_entropy::Filter;
pub use filtered::{Certificate, filtered_backward};
pub(crate) use run::draft;

/// Classes of a tile of a filter, which begins at a multiple of as many.
pub const TILE: usize = plan::TILE;
