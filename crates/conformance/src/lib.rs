//! Measures every tier of etalon, and other people's kernels, against the exact reference.
//!
//! A [`tier::Tier`] answers a [`tier::Request`]; [`tensor`] is what goes in and out; [`profile`]
//! declares with which arithmetic; [`report`] is what a run leaves behind. [`cases`] makes the
//! questions, [`laws`] judge the answers, [`suite`] runs them, and the [`zoo`] judges the laws.

pub mod algorithms;
pub mod bounds;
pub mod cases;
mod conventions;
pub mod gates;
pub mod generate;
pub mod laws;
mod probes;
pub mod profile;
pub mod report;
pub mod shapes;
pub mod suite;
pub mod tensor;
pub mod tier;
pub mod tiers;
pub mod vectors;
pub mod zoo;
