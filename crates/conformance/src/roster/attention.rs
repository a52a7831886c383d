//! Attention and attention_lse: the cases of both, and their host.

mod backward;
mod bugs;
mod cases;
mod factors;
mod family;
mod forward;
mod scores;

pub(crate) use backward::{Gradients, Pair};
pub(crate) use bugs::MUTANTS;
pub use cases::{DlseKind, Family, MaskKind, OptionKind, Point, SequenceKind};
pub(crate) use cases::{has_many_pairs, scores};
pub(crate) use factors::{cuts, lengths};
pub(crate) use family::zero_half;
pub(crate) use forward::{maximum, stream};
pub(crate) use scores::{Heads, Query, Score};

use crate::zoo::job::Job;
use crate::zoo::rows::Results;
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
