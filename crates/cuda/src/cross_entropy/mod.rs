//! linear_cross_entropy.

mod call;
mod hopper;
mod maps;
mod plan;
mod prepared;
mod ready;
mod run;
mod tokens;

pub(crate) use ready::Ready;
