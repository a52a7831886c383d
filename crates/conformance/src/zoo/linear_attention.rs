//! The host of linear_attention: chunks of tokens, and a state between them.

mod backward;
mod forward;
mod head;

use super::job::{Job, Results};
use etalon_problem::{LinearAttention, Pass};
use head::Linear;

/// The results of a forward or backward pass.
pub(super) fn results(job: &Job, problem: &LinearAttention) -> Results {
    let linear = Linear::new(job, problem);
    match job.pass {
        Pass::Backward => backward::backward(&linear),
        _ => forward::forward(&linear),
    }
}
