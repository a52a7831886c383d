//! The steps of a pass on a device, and the memory that it takes: no device is needed.

use crate::call::{Operands, PassCall};
use crate::draft::draft;
use crate::options::{Level, Options};
use crate::pass::Choice;
use crate::shared::declared_bytes;
use crate::softmax::chosen;
use crate::step;
use crate::target::Target;
use crate::unit::Unit;
use etalon_problem::{Blocking, Dtype, Mode, Pass, Problem, Result, Table};

/// The steps of a pass that computes every result, of dense operands, with the sequences and the mask of the problem.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The hypothetical device.
    pub target: Target,
    /// The level whose kernels compute it.
    pub level: Level,
    /// The other levels that cannot compute it, and why.
    pub refusals: Vec<(Level, &'static str)>,
    /// The form of a backward pass that has several: never [`Mode::Auto`].
    pub mode: Option<Mode>,
    /// Queries and keys of a tile; `None` where there is no choice.
    pub blocking: Option<Blocking>,
    /// The tiles that the level has kernels for; the first is taken unless
    /// [`Options::blocking`](crate::Options::blocking) asks for another.
    pub blockings: Vec<Blocking>,
    /// The kernels in their order. Those for numbers that are not finite count no terms.
    pub steps: Vec<Step>,
    /// The parts of the scratch memory that have a name, and their bytes.
    pub buffers: Vec<(&'static str, usize)>,
    scratch_bytes: usize,
}

/// A kernel of a pass.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// Its name.
    pub kernel: &'static str,
    /// The level that it is one of.
    pub level: Level,
    /// Its launches.
    pub launches: usize,
    /// The blocks of a launch.
    pub blocks: usize,
    /// Threads of a block.
    pub threads: u32,
    /// The shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Multiplications and additions of products for each visible pair of a query and a key, in all launches.
    pub terms: usize,
    /// The arithmetic that computes them.
    pub unit: Unit,
    /// Bytes of partial sums that are written or read for each visible pair.
    pub partials: f64,
    /// Bytes of sums that are read and written beside.
    pub sums: usize,
    /// The blocks of a launch that have something to do, about.
    pub working: usize,
}

impl Plan {
    pub(crate) fn of(
        problem: &Problem,
        call: (Pass, Dtype),
        table: &Table,
        options: &Options,
        target: &Target,
    ) -> Result<Plan> {
        let gradient = options.mode == Mode::ForwardGradient && matches!(problem, Problem::AttentionLse(_));
        let plan = draft(problem, &PassCall::new(*target, call, table, Operands::All { gradient }, options))?;
        let Choice { level, refusals, mode, blockings } = plan.choice;
        Ok(Plan {
            target: *target,
            level: if level == options.level.kernels() { options.level } else { level },
            refusals,
            mode,
            blocking: (!blockings.is_empty()).then(|| chosen(&blockings, options.blocking)),
            blockings,
            steps: kernels(&plan.steps),
            scratch_bytes: plan.scratch.bytes(),
            buffers: plan.scratch.into_buffers(),
        })
    }

    /// The scratch memory of a call, in bytes.
    pub fn workspace_bytes(&self) -> usize {
        self.scratch_bytes
    }

    /// Multiplications and additions of products for each visible pair.
    pub fn terms(&self) -> usize {
        self.steps.iter().map(|step| step.terms).sum()
    }
}

/// The kernels of these steps, with all launches over as many blocks.
fn kernels(steps: &[step::Step]) -> Vec<Step> {
    let mut list = Vec::<(&step::Kernel, Step)>::new();
    for step in steps {
        let step::Step::Launch { kernel, blocks, work, .. } = step else { continue };
        let blocks = *blocks as usize;
        let step = Step {
            kernel: kernel.name,
            level: kernel.variant.level(),
            launches: 1,
            blocks,
            threads: kernel.threads,
            shared_bytes: kernel.shared_bytes() + declared_bytes(&kernel.variant, kernel.name).unwrap_or(0),
            terms: work.terms,
            unit: work.unit,
            partials: work.partials,
            sums: work.sums,
            working: if work.working > 0 { work.working } else { blocks },
        };
        let same = |(other, own): &&mut (&step::Kernel, Step)| *other == kernel && own.blocks == step.blocks;
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
