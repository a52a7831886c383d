//! Laws of the reference of lazy attention, each written once and run over every problem of `cases.rs`.

mod activity;
mod backward;
mod cases;
mod derivatives;
mod determinism;
mod errors;
mod fixtures;
mod forward;
mod naive;
mod precision;
mod rearranged;
mod semantics;
mod skips;
mod stats;
mod tensors;
