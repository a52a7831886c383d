//! Passes of linear_cross_entropy that may be enqueued.

use crate::linear_cross_entropy::prepared::Prepared;
use crate::linear_cross_entropy::run::run;
use crate::options::Options;
use crate::parts::Holds;
use crate::pass::{PreparedPass, Steps};
use crate::room::Room;
use crate::step::Draft;
use crate::workspace::Held;
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Dtype, Error, LinearCrossEntropy, Pass, Table, Views};
use std::sync::Arc;

/// Prepares a pass, as [`Prepared::new`].
pub(crate) fn prepare(
    held: Arc<Held>,
    problem: &LinearCrossEntropy,
    call: (Pass, Dtype),
    table: &Table,
    holds: Holds<'_>,
    inputs: Option<&Views<'_>>,
    options: &Options,
) -> Result<Box<PreparedPass>, Error> {
    let problem = (problem, None);
    draft(Prepared::new(held, problem, call, table, holds, inputs, options)?)
}

/// The same with a filter; the rooms of its results in scratch memory: the tiles that are left out, B and C.
pub(crate) fn prepare_filtered(
    held: Arc<Held>,
    (problem, filter): (&LinearCrossEntropy, Filter),
    call: (Pass, Dtype),
    table: &Table,
    holds: Holds<'_>,
    inputs: &Views<'_>,
    options: &Options,
) -> Result<(Box<PreparedPass>, [Room; 3]), Error> {
    let problem = (problem, None);
    let prepared = Prepared::new(held, problem, call, table, holds, Some(inputs), options)?;
    let prepared = prepared.filtered(filter)?;
    let rooms = prepared.filter.map(|x| [x.left_out, x.dh, x.dw]).unwrap_or_default();
    Ok((draft(prepared)?, rooms))
}

/// Drafts the steps of a pass and loads their kernels.
fn draft(prepared: Prepared<'_>) -> Result<Box<PreparedPass>, Error> {
    let draft = Draft::new(prepared.parts.target);
    run(&Steps::new(&prepared, &draft))?;
    prepared.load(draft)
}
