//! The steps of a pass of attention, attention_lse or lazy_attention, and of the statistics of the last.

use crate::call::PassCall;
use crate::memory::{Layout, MemoryRange};
use crate::options::{Level, Options};
use crate::pass::PassPlan;
use crate::softmax::dq_partials::{DqPartials, Shares};
use crate::softmax::hopper::Plan;
use crate::softmax::hopper_lazy::LazyPlan;
use crate::softmax::lazy::{Memory, Passes};
use crate::softmax::prepared::Prepared;
use crate::softmax::second::{self, Between};
use crate::softmax::spec::{LAZY_LEVELS, LEVELS, Spec};
use crate::softmax::{Steps, fallback, hopper, hopper_backward, modules, portable};
use etalon_problem::{Blocking, DistanceBias, Error, Mode, Pass, Problem};

/// Drafts the steps of a pass, as [`Prepared::new`].
pub(crate) fn draft<'a>(problem: &'a Problem, call: &PassCall<'_, '_>) -> Result<PassPlan<'a>, Error> {
    let mut layout = Layout::default();
    let mut prepared = Prepared::new(problem, call, &LEVELS, &mut layout)?;
    let between = match prepared.pass {
        Pass::DoubleBackward | Pass::Jvp => Some(Between::new(&prepared, &mut layout)?),
        _ => None,
    };
    prepared.flags = fallback::reserve(&prepared, &mut layout)?;
    prepared.partials =
        shares(&prepared.spec, prepared.level).map(|shares| DqPartials::new(shares, &mut layout)).transpose()?;
    let plan = match prepared.level {
        Level::Sm90a => Some(Plan::new(&prepared, &mut layout)?),
        _ => None,
    };
    prepared.choice.mode = mode(&prepared, call.options);
    prepared.choice.blockings = modules::of_level(&prepared.spec, prepared.level);
    let steps = prepared.draft(|steps| compute(steps, plan.as_ref(), between.as_ref()))?;
    Ok(prepared.plan(layout, steps))
}

/// The form of a backward pass.
fn mode(prepared: &Prepared<'_>, options: &Options) -> Option<Mode> {
    let gradient = options.mode == Mode::ForwardGradient && prepared.value_dim.is_none();
    let fused = if prepared.partials.is_some() { Mode::FusedPartials } else { Mode::Separate };
    let mode = if gradient { Mode::ForwardGradient } else { fused };
    (prepared.pass == Pass::Backward).then_some(mode)
}

/// Shares of partial sums in their memory, where the gradient of q is computed in the pass by keys.
fn shares(spec: &Spec, level: Level) -> Option<Shares> {
    let by_pass = match (level, spec.pass) {
        (Level::Portable, Pass::Backward) => true,
        (Level::Portable, Pass::DoubleBackward) => !spec.has_tensor_second(),
        (Level::Sm80, _) => spec.insists(),
        _ => false,
    };
    Shares::new(spec).filter(|_| by_pass)
}

fn compute(steps: &Steps<'_>, plan: Option<&Plan>, between: Option<&Between>) -> Result<(), Error> {
    steps.fill_results()?;
    if steps.prepared.computes_forward() {
        match plan {
            Some(plan) => hopper::forward(steps, plan)?,
            None => portable::forward(steps)?,
        }
    }
    match (steps.prepared.pass, plan, between) {
        (Pass::Forward, ..) if steps.is_there("gradient") => portable::gradient_of_lse(steps),
        (Pass::Backward, Some(plan), _) => hopper_backward::backward(steps, plan),
        (Pass::Backward, None, _) => portable::backward(steps),
        (_, _, Some(between)) => second::run(steps, between),
        _ => Ok(()),
    }
}

/// Drafts the steps of a pass, as [`Prepared::new`].
pub(crate) fn draft_lazy<'a>(
    (problem, bias): (&'a Problem, Option<DistanceBias>),
    call: &PassCall<'_, '_>,
) -> Result<PassPlan<'a>, Error> {
    let mut layout = Layout::default();
    let mut prepared = Prepared::new(problem, call, &LAZY_LEVELS, &mut layout)?;
    if prepared.level != Level::Portable || prepared.pass == Pass::Backward {
        prepared.flags = Some(fallback::range(&prepared, &mut layout)?);
    }
    let memory = Memory::new(&prepared, bias, &mut layout)?;
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
    let memory = Memory::new(&prepared, bias, &mut layout)?;
    let ranges = [layout.range(figures)?, layout.range(states)?];
    let steps = prepared.draft(|steps| {
        ranges.into_iter().for_each(|range| steps.clear(range));
        Passes::new(steps, &memory, bias, None).measure(ranges.map(|range| steps.at(range)), tile)
    })?;
    Ok((prepared.plan(layout, steps), ranges))
}
