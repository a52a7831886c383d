//! The steps of a pass of attention, attention_lse or lazy_attention, and of the statistics of the last.

use crate::call::PassCall;
use crate::memory::{Layout, MemoryRange};
use crate::options::Level;
use crate::pass::PassPlan;
use crate::softmax::dq_partials::DqPartials;
use crate::softmax::hopper::{self, HopperSteps, Plan};
use crate::softmax::hopper_lazy::LazyPlan;
use crate::softmax::lazy::{Memory, Passes};
use crate::softmax::prepared::Prepared;
use crate::softmax::rows::Rows;
use crate::softmax::second::{self, Between};
use crate::softmax::spec::{LAZY_LEVELS, LEVELS};
use crate::softmax::{Steps, fallback, hopper_backward, modules, portable};
use crate::step::Step;
use etalon_problem::{Blocking, DistanceBias, Error, Mode, Pass, Problem};

/// Drafts the steps of a pass, as [`Prepared::new`].
pub(crate) fn draft<'a>(problem: &'a Problem, call: &PassCall<'_, '_>) -> Result<PassPlan<'a>, Error> {
    let mut layout = Layout::default();
    let mut prepared = Prepared::new(problem, call, &LEVELS, &mut layout)?;
    let level = prepared.choice.level;
    let between = match prepared.pass {
        Pass::DoubleBackward | Pass::Jvp => Some(Between::new(&prepared, &mut layout)?),
        _ => None,
    };
    prepared.flags = fallback::reserve(&prepared, &mut layout)?;
    prepared.partials = DqPartials::new(&prepared.spec, level, &mut layout)?;
    let plan = if level == Level::Sm90a { Some(Plan::new(&prepared, &mut layout)?) } else { None };
    let mode = match prepared.partials {
        _ if call.options.mode == Mode::ForwardGradient && prepared.value_dim.is_none() => Mode::ForwardGradient,
        Some(_) => Mode::FusedPartials,
        None => Mode::Separate,
    };
    prepared.choice.mode = (prepared.pass == Pass::Backward).then_some(mode);
    prepared.choice.blockings = modules::of_level(&prepared.spec, level);
    let steps = with_tables(Steps::new(&prepared)?)?;
    compute(&steps, plan.as_ref(), between.as_ref())?;
    let steps = steps.finish()?;
    Ok(planned(prepared, layout, steps))
}

/// Steps that find the tables: of arrays that calls give, the device makes them first.
fn with_tables(steps: Steps<'_>) -> Result<Steps<'_>, Error> {
    match &steps.prepared.given {
        Some((given, _)) => given.make(steps),
        None => Ok(steps),
    }
}

/// The plan of a pass, of drafted steps.
fn planned<'a>(prepared: Prepared<'a>, scratch: Layout, steps: Vec<Step>) -> PassPlan<'a> {
    let Prepared { parts, given, tables, scores, choice, .. } = prepared;
    let tables = move || match given {
        Some((_, image)) => Ok(image),
        None => Ok(tables.image(Rows::new(scores)?, scores)),
    };
    PassPlan { parts, tables: Box::new(tables), scratch, steps, choice }
}

fn compute(steps: &Steps<'_>, plan: Option<&Plan>, between: Option<&Between>) -> Result<(), Error> {
    steps.fill_results()?;
    if steps.prepared.computes_forward() {
        match plan {
            Some(plan) => hopper::forward(HopperSteps { steps, plan })?,
            None => portable::forward(steps)?,
        }
    }
    match (steps.prepared.pass, plan, between) {
        (Pass::Forward, ..) if steps.is_there("gradient") => portable::gradient_of_lse(steps),
        (Pass::Backward, Some(plan), _) => hopper_backward::backward(HopperSteps { steps, plan }),
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
    let level = prepared.choice.level;
    if level != Level::Portable || prepared.pass == Pass::Backward {
        prepared.flags = Some(fallback::range(&prepared, &mut layout)?);
    }
    let memory = Memory::new(&prepared, bias, &mut layout)?;
    let plan = if level == Level::Sm90a { Some(LazyPlan::new(&prepared, &mut layout)?) } else { None };
    let steps = with_tables(Steps::new(&prepared)?)?;
    steps.fill_results()?;
    let passes = Passes::new(&steps, &memory, bias, plan.as_ref());
    match prepared.pass {
        Pass::Backward => passes.backward()?,
        _ => passes.forward()?,
    }
    let steps = steps.finish()?;
    Ok(planned(prepared, layout, steps))
}

/// The statistics of a problem in place of its forward pass, of tiles of this size, with the ranges where the kernels
/// leave so many bytes of figures of every row and of states of every tile.
pub(crate) fn draft_stats<'a>(
    (problem, bias): (&'a Problem, Option<DistanceBias>),
    call: &PassCall<'_, '_>,
    (tile, [figures, states]): (Blocking, [usize; 2]),
) -> Result<(PassPlan<'a>, [MemoryRange; 2]), Error> {
    let mut layout = Layout::default();
    let call = call.on(Level::Portable);
    let prepared = Prepared::new(problem, &call, &LAZY_LEVELS, &mut layout)?;
    let memory = Memory::new(&prepared, bias, &mut layout)?;
    let ranges = [layout.range(figures)?, layout.range(states)?];
    let steps = with_tables(Steps::new(&prepared)?)?;
    ranges.into_iter().for_each(|range| steps.clear(range));
    Passes::new(&steps, &memory, bias, None).measure(ranges.map(|range| steps.at(range)), tile)?;
    let steps = steps.finish()?;
    Ok((planned(prepared, layout, steps), ranges))
}
