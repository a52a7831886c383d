//! Laws of the references of attention and of its log-sum-exp, each written once and run over every problem
//! of `cases.rs`.

mod backward;
mod cases;
mod derivatives;
mod determinism;
mod errors;
mod fixtures;
mod forward;
mod precision;
mod rearranged;
mod scalars;
mod second_order;
mod semantics;
mod tensors;
mod traces;
mod visible;
