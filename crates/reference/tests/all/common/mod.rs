//! What the tests of every algorithm are made of.
#![allow(dead_code, reason = "no test binary uses all of it")]

pub mod bounded;
pub mod fixtures;
pub mod tensors;
