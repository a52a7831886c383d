//! Laws of linear attention, each written once and run over every problem of `cases.rs`.

mod cases;
mod derivatives;
mod determinism;
mod errors;
mod exact;
mod fixtures;
mod forms;
mod identities;
mod naive;
mod precision;
mod semantics;
mod tensors;
mod traces;
