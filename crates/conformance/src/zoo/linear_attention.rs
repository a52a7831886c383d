//! The host of linear_attention: chunks of tokens, and a state between them.

mod backward;
mod forward;
mod head;

use super::job::{Job, Results};
use etalon_problem::{Error, LinearAttention, Pass};
use head::Linear;

/// The results of a forward or backward pass; an error for a state that would grow.
pub(super) fn results(job: &Job, problem: &LinearAttention) -> Result<Results, Error> {
    let linear = Linear::new(job, problem);
    for sequence in problem.list_sequences() {
        for h in 0..problem.extents.key_heads {
            let head = linear.head(&sequence, h);
            if let Some(g) = head.g.iter().find(|g| g.is_nan() || **g > 0.0) {
                return Err(Error::value("g", "at most 0", g));
            }
        }
    }
    Ok(match job.pass {
        Pass::Backward => backward::backward(&linear),
        _ => forward::forward(&linear),
    })
}
