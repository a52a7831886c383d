//! The host of attention and attention_lse.

pub(super) mod backward;
pub(super) mod forward;

use super::job::{Job, Results};
use super::scores::Heads;
use etalon_problem::{Pass, Scores};

/// The results of a forward pass, or of a backward pass that finds those of the forward pass among
/// its inputs.
pub(super) fn results(job: &Job, scores: &Scores) -> Results {
    let heads = Heads::new(job, scores);
    match job.pass {
        Pass::Forward => forward::forward(&heads),
        _ => backward::backward(&heads),
    }
}
