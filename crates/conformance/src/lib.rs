//! Measures every tier of etalon, and other people's kernels, against the exact reference.
//!
//! A [`tier::Tier`] answers a [`tier::Request`]; [`tensor`] is what goes in and out; [`profile`]
//! declares with which arithmetic; [`report`] is what a run leaves behind. [`cases`] makes the
//! questions, [`laws`] judge the answers, [`suite`] runs them, and the [`zoo`] judges the laws.

pub use etalon_oracle::{bounds, gates, generate, profile, stochastic, tensor, types, typical};
pub use etalon_reference::trace as traces;

pub mod candidate;
pub mod capabilities;
pub mod cases;
pub mod check;
pub mod conventions;
pub mod declared;
pub mod laws;
pub mod live;
pub mod power;
mod probes;
pub mod questions;
pub mod report;
mod roster;
pub mod shapes;
mod shrink;
pub mod suite;
pub mod tier;
pub mod tiers;
mod vacuity;
pub mod vector_set;
pub mod vectors;
mod wire;
pub mod zoo;
