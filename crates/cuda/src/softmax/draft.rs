//! The steps of a pass of attention, attention_lse or lazy_attention, and of the statistics of the last.

use super::dq_partials::DqPartials;
use super::hopper::{self, HopperSteps, Plan};
use super::hopper_lazy::LazyPlan;
use super::lazy::Passes;
use super::lazy_args::Memory;
use super::prepared::Prepared;
use super::rows::Rows;
use super::second::{self, Between};
use super::spec::{LAZY_LEVELS, LEVELS};
use super::{Steps, fallback, hopper_backward, modules, portable};
use crate::call::PassCall;
use crate::memory::{Layout, MemoryRange};
use crate::options::Level;
use crate::pass::PassPlan;
use etalon_problem::{Blocking, Mode, Pass, Problem, Result};

pub(crate) fn draft<'a>(problem: &'a Problem, call: &PassCall<'_, '_>) -> Result<PassPlan<'a>> {
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
        _ if call.options.mode == Mode::ForwardGradient && prepared.spec.value_dim.is_none() => Mode::ForwardGradient,
        Some(_) => Mode::FusedPartials,
        None if plan.as_ref().is_some_and(|plan| plan.dq_sums.is_some()) => Mode::FusedPartials,
        None => Mode::Separate,
    };
    prepared.choice.mode = (prepared.pass == Pass::Backward).then_some(mode);
    prepared.choice.blockings = modules::of_level(&prepared.spec, level);
    planned(prepared, layout, |steps| compute(steps, plan.as_ref(), between.as_ref()))
}

/// The plan of what `compute` adds, behind the tables that the device makes.
fn planned<'a>(
    prepared: Prepared<'a>,
    scratch: Layout,
    compute: impl FnOnce(&Steps<'_>) -> Result<()>,
) -> Result<PassPlan<'a>> {
    let steps = Steps::new(&prepared)?;
    let steps = match &prepared.given {
        Some((given, _)) => given.make(steps)?,
        None => steps,
    };
    compute(&steps)?;
    let steps = steps.finish()?;
    let Prepared { parts, given, tables, scores, choice, .. } = prepared;
    let tables = move || match given {
        Some((_, image)) => Ok(image),
        None => Ok(tables.image(Rows::new(scores)?, scores)),
    };
    Ok(PassPlan { parts, tables: Box::new(tables), scratch, steps, choice })
}

fn compute(steps: &Steps<'_>, plan: Option<&Plan>, between: Option<&Between>) -> Result<()> {
    steps.fill_results()?;
    let hopper = plan.map(|plan| HopperSteps { steps, plan });
    if steps.prepared.computes_forward() {
        hopper.map_or_else(|| portable::forward(steps), hopper::forward)?;
    }
    match (steps.prepared.pass, hopper, between) {
        (Pass::Forward, ..) if steps.is_there("gradient") => portable::gradient_of_lse(steps),
        (Pass::Backward, Some(steps), _) => hopper_backward::backward(steps),
        (Pass::Backward, None, _) => portable::backward(steps),
        (_, _, Some(between)) => second::run(steps, between),
        _ => Ok(()),
    }
}

pub(crate) fn draft_lazy<'a>(problem: &'a Problem, call: &PassCall<'_, '_>) -> Result<PassPlan<'a>> {
    let mut layout = Layout::default();
    let mut prepared = Prepared::new(problem, call, &LAZY_LEVELS, &mut layout)?;
    let level = prepared.choice.level;
    if level != Level::Portable || prepared.pass == Pass::Backward {
        prepared.flags = Some(fallback::range(&prepared, 0, &mut layout)?);
    }
    let memory = Memory::new(&prepared, &mut layout)?;
    let plan = if level == Level::Sm90a { Some(LazyPlan::new(&prepared, &mut layout)?) } else { None };
    planned(prepared, layout, |steps| {
        steps.fill_results()?;
        let passes = Passes::new(steps, &memory, plan.as_ref());
        match steps.prepared.pass {
            Pass::Backward => passes.backward(),
            _ => passes.forward(),
        }
    })
}

/// Statistics in place of a forward pass, with ranges of so many bytes for figures of rows and states of tiles.
pub(crate) fn draft_stats<'a>(
    problem: &'a Problem,
    call: &PassCall<'_, '_>,
    (tile, [figures, states]): (Blocking, [usize; 2]),
) -> Result<(PassPlan<'a>, [MemoryRange; 2])> {
    let mut layout = Layout::default();
    let prepared = Prepared::new(problem, &call.on(Level::Portable), &LAZY_LEVELS, &mut layout)?;
    let memory = Memory::new(&prepared, &mut layout)?;
    let ranges = [layout.range(figures)?, layout.range(states)?];
    let plan = planned(prepared, layout, |steps| {
        ranges.into_iter().for_each(|range| steps.clear(range));
        Passes::new(steps, &memory, None).measure(ranges.map(|range| steps.at(range)), tile)
    })?;
    Ok((plan, ranges))
}
