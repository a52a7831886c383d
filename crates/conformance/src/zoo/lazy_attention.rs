//! The host of lazy_attention: a sweep for lse, a sweep for o, a sweep for the gradients.

mod backward;
mod forward;
mod pairs;

use super::job::{Job, Results};
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
