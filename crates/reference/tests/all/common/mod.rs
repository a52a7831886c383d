//! Parts that the tests of every algorithm are made of.

pub mod bounded;
pub mod fixtures;
pub mod precision;
pub mod tensors;
pub mod traces;
