//! The steps of a pass of lazy_attention, and of its statistics.

use crate::call::PassCall;
use crate::memory::{Layout, MemoryRange};
use crate::options::{Level, Options};
use crate::pass::PassPlan;
use crate::softmax::hopper_lazy::LazyPlan;
use crate::softmax::lazy::{Memory, Passes};
use crate::softmax::prepared::Prepared;
use crate::softmax::spec::LAZY_LEVELS;
use etalon_problem::{Blocking, DistanceBias, Error, Pass, Problem};

/// Drafts the steps of a pass, as [`Prepared::new`].
pub(crate) fn draft_lazy<'a>(
    (problem, bias): (&'a Problem, Option<DistanceBias>),
    call: &PassCall<'_, '_>,
) -> Result<PassPlan<'a>, Error> {
    let mut layout = Layout::default();
    let prepared = Prepared::new(problem, call, &LAZY_LEVELS, &mut layout)?;
    let memory = Memory::new(&prepared, bias, call.options.assume_finite, &mut layout)?;
    let plan = match prepared.level {
        Level::Sm90a => Some(LazyPlan::new(&prepared, &mut layout)?),
        _ => None,
    };
    let steps = prepared.draft(|steps| {
        steps.fill_results()?;
        let passes = Passes::new(steps, &memory, bias, plan.as_ref());
        match steps.prepared.pass {
            Pass::Backward => passes.backward(),
            _ => passes.forward(),
        }
    })?;
    Ok(prepared.plan(layout, steps))
}

/// The statistics of a problem in place of its forward pass, of tiles of this size, with the ranges where the kernels
/// leave so many bytes of figures of every row and of states of every tile.
pub(crate) fn draft_stats<'a>(
    (problem, bias): (&'a Problem, Option<DistanceBias>),
    call: &PassCall<'_, '_>,
    (tile, [figures, states]): (Blocking, [usize; 2]),
) -> Result<(PassPlan<'a>, [MemoryRange; 2]), Error> {
    let mut layout = Layout::default();
    let options = Options { level: Level::Portable, ..*call.options };
    let call = PassCall { options: &options, ..*call };
    let prepared = Prepared::new(problem, &call, &LAZY_LEVELS, &mut layout)?;
    let memory = Memory::new(&prepared, bias, options.assume_finite, &mut layout)?;
    let ranges = [layout.range(figures)?, layout.range(states)?];
    let steps = prepared.draft(|steps| {
        ranges.into_iter().for_each(|range| steps.clear(range));
        Passes::new(steps, &memory, bias, None).measure(ranges.map(|range| steps.at(range)), tile)
    })?;
    Ok((prepared.plan(layout, steps), ranges))
}
