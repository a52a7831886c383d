//! Drafts the steps of a pass of any algorithm.

use crate::call::PassCall;
use crate::pass::PassPlan;
use crate::{linear_attention, linear_cross_entropy, softmax};
use etalon_problem::{Problem, Result};

pub(crate) fn draft<'a>(problem: &'a Problem, call: &PassCall<'_, '_>) -> Result<PassPlan<'a>> {
    call.options.blocking.map_or(Ok(()), |blocking| blocking.check())?;
    match problem {
        Problem::LinearAttention(problem) => linear_attention::draft(problem, call),
        Problem::LinearCrossEntropy(problem) => linear_cross_entropy::draft(problem, call),
        Problem::LazyAttention(_) => softmax::draft_lazy(problem, call),
        _ => softmax::draft(problem, call),
    }
}
