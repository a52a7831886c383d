//! The steps of a pass of linear_cross_entropy.

use super::prepared::{Filtering, Prepared, Steps};
use super::run::run;
use crate::call::PassCall;
use crate::memory::MemoryRange;
use crate::pass::PassPlan;
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Error, LinearCrossEntropy};

pub(crate) fn draft(problem: &LinearCrossEntropy, call: &PassCall<'_, '_>) -> Result<PassPlan<'static>, Error> {
    plan(Prepared::new((problem, None), call)?)
}

/// The same with a filter; the ranges of its results in scratch memory: the tiles that are left out, B and C.
pub(crate) fn draft_filtered(
    (problem, filter): (&LinearCrossEntropy, Filter),
    call: &PassCall<'_, '_>,
) -> Result<(PassPlan<'static>, [MemoryRange; 3]), Error> {
    let mut prepared = Prepared::new((problem, None), call)?;
    let filter = Filtering::new(filter, &mut prepared)?;
    prepared.filter = Some(filter);
    Ok((plan(prepared)?, [filter.left_out, filter.dh, filter.dw]))
}

fn plan(prepared: Prepared<'_>) -> Result<PassPlan<'static>, Error> {
    let steps = Steps::new(&prepared)?;
    run(&steps)?;
    let steps = steps.finish()?;
    Ok(prepared.plan(steps))
}
