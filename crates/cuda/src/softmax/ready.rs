//! The steps of a pass of attention or attention_lse.

use crate::options::{Level, Options};
use crate::parts::{Holds, On};
use crate::pass::PreparedPass;
use crate::room::Layout;
use crate::softmax::given::GivenArray;
use crate::softmax::hopper::Plan;
use crate::softmax::prepared::Prepared;
use crate::softmax::second::{self, Between};
use crate::softmax::slots::{Shares, Slots};
use crate::softmax::spec::{LEVELS, Spec};
use crate::softmax::{Steps, hopper, hopper_backward, portable};
use crate::step::Step;
use crate::workspace::Held;
use etalon_problem::{Dtype, Error, Pass, Problem, Table};
use std::sync::Arc;

/// A pass, the memory of its calls, and its steps.
pub(crate) struct Drafted<'a> {
    pub prepared: Prepared<'a>,
    pub layout: Layout,
    pub steps: Vec<Step>,
}

/// Drafts the steps of a pass, as [`Prepared::new`].
pub(crate) fn draft<'a>(
    on: On,
    problem: &'a Problem,
    call: (Pass, Dtype),
    table: &Table,
    operands: (Holds<'_>, &[GivenArray]),
    options: &Options,
) -> Result<Drafted<'a>, Error> {
    let mut layout = Layout::default();
    let levels = (&LEVELS[..], options);
    let mut prepared = Prepared::new(on, problem, call, table, operands, levels, &mut layout)?;
    let between = match prepared.pass {
        Pass::DoubleBackward | Pass::Jvp => Some(Between::new(&prepared, &mut layout)?),
        _ => None,
    };
    let tensor = prepared.level == Level::Sm80;
    prepared.slots = shares(&prepared.spec, prepared.level)
        .map(|shares| Slots::new(shares, &prepared.spec, tensor, &mut layout))
        .transpose()?;
    let plan = match prepared.level {
        Level::Sm90a => Some(Plan::new(&prepared, &mut layout)?),
        _ => None,
    };
    let steps = prepared.draft(|steps| compute(steps, plan.as_ref(), between.as_ref()))?;
    Ok(Drafted { prepared, layout, steps })
}

/// The same, with its tables, and with kernels that are compiled or loaded.
pub(crate) fn prepare(
    held: Arc<Held>,
    problem: &Problem,
    call: (Pass, Dtype),
    table: &Table,
    operands: (Holds<'_>, &[GivenArray]),
    options: &Options,
) -> Result<Box<PreparedPass>, Error> {
    let drafted = draft(On::Device(held), problem, call, table, operands, options)?;
    drafted.prepared.load(drafted.layout.bytes(), drafted.steps)
}

/// How slots share their memory, where the gradient of q is computed in the pass by keys.
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
        (Pass::Forward, ..) if steps.address("gradient") != 0 => portable::gradient_of_lse(steps),
        (Pass::Backward, Some(plan), _) => hopper_backward::backward(steps, plan),
        (Pass::Backward, None, _) => portable::backward(steps, 0),
        (_, _, Some(between)) => second::run(steps, between),
        _ => Ok(()),
    }
}
