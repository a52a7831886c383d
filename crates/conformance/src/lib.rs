//! Measures every tier of etalon, and other people's kernels, against the exact reference.
//!
//! A [`tier::Tier`] answers a [`tier::Request`]; [`tensor`] is what goes in and out; [`profile`]
//! declares with which arithmetic; [`report`] is what a run leaves behind.

pub mod bounds;
pub mod gates;
pub mod profile;
pub mod report;
pub mod tensor;
pub mod tier;
pub mod vectors;
