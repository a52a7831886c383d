//! Laws of the reference of linear cross-entropy.

mod cases;
mod derivatives;
mod determinism;
mod errors;
mod filter;
mod fixtures;
mod identities;
mod naive;
mod precision;
mod semantics;
mod shards;
mod tensors;
