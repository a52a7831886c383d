//! The steps of a pass of attention or attention_lse.

use crate::call::PassCall;
use crate::memory::Layout;
use crate::options::{Level, Options};
use crate::pass::PassPlan;
use crate::softmax::dq_partials::{DqPartials, Shares};
use crate::softmax::hopper::Plan;
use crate::softmax::prepared::Prepared;
use crate::softmax::second::{self, Between};
use crate::softmax::spec::{LEVELS, Spec};
use crate::softmax::{Steps, blocks, hopper, hopper_backward, portable};
use etalon_problem::{Error, Mode, Pass, Problem};

/// Drafts the steps of a pass, as [`Prepared::new`].
pub(crate) fn draft<'a>(problem: &'a Problem, call: &PassCall<'_, '_>) -> Result<PassPlan<'a>, Error> {
    let mut layout = Layout::default();
    let mut prepared = Prepared::new(problem, call, &LEVELS, &mut layout)?;
    let between = match prepared.pass {
        Pass::DoubleBackward | Pass::Jvp => Some(Between::new(&prepared, &mut layout)?),
        _ => None,
    };
    let tensor = prepared.level == Level::Sm80;
    prepared.partials = shares(&prepared.spec, prepared.level)
        .map(|shares| DqPartials::new(shares, &prepared.spec, tensor, &mut layout))
        .transpose()?;
    let plan = match prepared.level {
        Level::Sm90a => Some(Plan::new(&prepared, &mut layout)?),
        _ => None,
    };
    prepared.choice.mode = mode(&prepared, call.options);
    prepared.choice.blockings = blocks::of_level(&prepared.spec, prepared.level);
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
