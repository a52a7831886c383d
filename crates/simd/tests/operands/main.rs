//! Tests of the public functions with operands of many kinds. One program, because every program of its own
//! would compile every kernel again.

mod blind;
mod common;
mod cross_entropy;
mod errors;
mod filter;
mod lazy;
mod linear;
mod modes;
mod pairs;
mod shards;
mod strides;
mod waves;
