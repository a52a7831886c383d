//! The steps of a pass of linear_cross_entropy.

use crate::linear_cross_entropy::prepared::Prepared;
use crate::linear_cross_entropy::run::run;
use crate::options::Options;
use crate::parts::Holds;
use crate::pass::{PassPlan, draft_steps};
use crate::room::Room;
use crate::target::Target;
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Dtype, Error, LinearCrossEntropy, Pass, Table, Views};

/// Drafts the steps of a pass, as [`Prepared::new`].
pub(crate) fn draft(
    target: Target,
    problem: &LinearCrossEntropy,
    call: (Pass, Dtype),
    table: &Table,
    holds: Holds<'_>,
    inputs: Option<&Views<'_>>,
    options: &Options,
) -> Result<PassPlan<'static>, Error> {
    let problem = (problem, None);
    plan(Prepared::new(target, problem, call, table, holds, inputs, options)?)
}

/// The same with a filter; the rooms of its results in scratch memory: the tiles that are left out, B and C.
pub(crate) fn draft_filtered(
    target: Target,
    (problem, filter): (&LinearCrossEntropy, Filter),
    call: (Pass, Dtype),
    table: &Table,
    holds: Holds<'_>,
    inputs: &Views<'_>,
    options: &Options,
) -> Result<(PassPlan<'static>, [Room; 3]), Error> {
    let problem = (problem, None);
    let prepared = Prepared::new(target, problem, call, table, holds, Some(inputs), options)?;
    let prepared = prepared.filtered(filter)?;
    let rooms = prepared.filter.map(|x| [x.left_out, x.dh, x.dw]).unwrap_or_default();
    Ok((plan(prepared)?, rooms))
}

fn plan(prepared: Prepared<'_>) -> Result<PassPlan<'static>, Error> {
    let steps = draft_steps(&prepared, |steps| run(&steps))?;
    Ok(prepared.plan(steps))
}
