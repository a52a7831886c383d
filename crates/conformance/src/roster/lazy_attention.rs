//! Lazy_attention: its cases, and its host: a sweep for lse, a sweep for o, a sweep for the gradients.

mod backward;
mod bugs;
mod cases;
mod forward;
mod pairs;

pub(crate) use bugs::MUTANTS;
pub use cases::Point;

use crate::zoo::job::Job;
use crate::zoo::rows::Results;
use etalon_problem::{LazyAttention, Pass};
use pairs::Lazy;

/// The results of a forward pass, or of a backward pass that finds those of the forward pass among
/// its inputs.
pub(super) fn results(job: &Job, problem: &LazyAttention) -> Results {
    let lazy = Lazy::new(job, problem);
    match job.pass {
        Pass::Forward => forward::forward(&lazy),
        _ => backward::backward(&lazy),
    }
}
