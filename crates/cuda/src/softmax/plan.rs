//! The plan of a pass: its steps, drafted without a device.

use crate::levels::refusals;
use crate::options::{Level, Options};
use crate::parts::{Laid, On};
use crate::plan::{Plan, Step};
use crate::softmax::blocks;
use crate::softmax::ready::{Drafted, draft};
use crate::softmax::spec::{LEVELS, Spec};
use crate::step;
use crate::target::Target;
use crate::variant::declared_bytes;
use etalon_problem::{Blocking, Dtype, Error, Mode, Operand, Pass, Problem, Role, Table, find};

/// How a pass works on a device, every result being asked for.
pub(crate) fn plan(
    problem: &Problem,
    call: (Pass, Dtype),
    table: &Table,
    options: &Options,
    target: &Target,
) -> Result<Plan, Error> {
    let is_lse = matches!(problem, Problem::AttentionLse(_));
    let gradient = options.mode == Mode::ForwardGradient && is_lse;
    let takes_part = |x: &Operand| match x.role {
        Role::OptionalSaved | Role::OptionalOutput => gradient,
        _ => true,
    };
    let holds = |name: &str, result: bool| {
        let operand = find(&table.operands, name).filter(|x| takes_part(x))?;
        let is_result = matches!(operand.role, Role::Output | Role::OptionalOutput);
        (is_result == result).then_some(Laid { strides: None, aligned: true })
    };
    let operands = (&holds as &dyn Fn(&str, bool) -> Option<Laid>, &[][..]);
    let Drafted { prepared, layout, steps } =
        draft(On::Target(*target), problem, call, table, operands, options)?;
    let (spec, level) = (&prepared.spec, prepared.level);
    let fused = if prepared.slots.is_some() { Mode::FusedPartials } else { Mode::Separate };
    let mode = if gradient { Mode::ForwardGradient } else { fused };
    let blockings = blockings(spec, level);
    Ok(Plan {
        target: *target,
        level: match level {
            Level::Sm80 if options.level == Level::Sm80Narrow => Level::Sm80Narrow,
            level => level,
        },
        refusals: refusals(&LEVELS, spec),
        mode: (prepared.pass == Pass::Backward).then_some(mode),
        blocking: blocks::chosen(&blockings, options.blocking),
        blockings,
        steps: kernels(&steps),
        buffers: layout.into_buffers(),
    })
}

/// The tiles that a level has kernels for.
fn blockings(spec: &Spec, level: Level) -> Vec<Blocking> {
    match level {
        Level::Sm90a => blocks::of_hopper(spec, spec.hopper()),
        Level::Sm80 => blocks::of_tensor(spec),
        _ => blocks::of_portable(),
    }
}

/// The kernels of these steps, each with all of its launches over as many blocks.
fn kernels(steps: &[step::Step]) -> Vec<Step> {
    let mut list = Vec::<(&step::Kernel, Step)>::new();
    for step in steps {
        let step::Step::Launch { kernel, blocks, work, .. } = step else { continue };
        let step = of_launch(kernel, *blocks as usize, work);
        let same = |(other, own): &&mut (&step::Kernel, Step)| {
            *other == kernel && own.blocks == step.blocks
        };
        match list.iter_mut().find(same) {
            Some((_, own)) => {
                own.launches += 1;
                own.terms += step.terms;
                own.partials += step.partials;
                own.sums += step.sums;
            }
            None => list.push((kernel, step)),
        }
    }
    list.into_iter().map(|(_, step)| step).collect()
}

fn of_launch(kernel: &step::Kernel, blocks: usize, work: &step::Work) -> Step {
    let declared = declared_bytes(&kernel.variant, kernel.name).unwrap_or(0);
    Step {
        kernel: kernel.name,
        level: kernel.variant.level(),
        launches: 1,
        blocks,
        threads: kernel.threads,
        shared_bytes: kernel.shared_bytes() + declared,
        terms: work.terms,
        unit: work.unit,
        partials: work.partials,
        sums: work.sums,
        working: if work.working > 0 { work.working } else { blocks },
    }
}
