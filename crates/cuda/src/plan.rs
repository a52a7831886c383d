//! The steps of a pass of any algorithm on a device, and the memory that it takes: no device is needed.

use crate::call::{Operands, PassCall};
use crate::family::Unit;
use crate::options::{Level, Options};
use crate::pass::{Choice, PassPlan};
use crate::shared::declared_bytes;
use crate::target::Target;
use crate::{levels, linear_attention, linear_cross_entropy, softmax, step};
use etalon_problem::{Blocking, Dtype, Mode, Pass, Problem, Result};

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
    /// The scratch memory of a call, in bytes.
    pub fn workspace_bytes(&self) -> usize {
        self.scratch_bytes
    }

    /// Multiplications and additions of products for each visible pair.
    pub fn terms(&self) -> usize {
        self.steps.iter().map(|step| step.terms).sum()
    }
}

/// The steps that a prepared pass enqueues on a device like `target`, which may be hypothetical. Fails as
/// [`run`](crate::run()) does.
///
/// ```
/// use etalon_cuda::{Level, Options, Precision, Target, plan};
/// use etalon_problem::{Attention, Dtype, Extents, Mode, Pass};
///
/// let extents = Extents { batch: 4, query_heads: 16, key_heads: 16, queries: 4096, keys: 4096, dim: 128 };
/// let problem = Attention::new(extents).into();
/// let options = Options { precision: Precision::Flash, ..Options::default() };
/// let of = |mode| {
///     let options = Options { mode, ..options };
///     plan(&problem, Pass::Backward, Dtype::Bf16, &options, &Target::of("sm_90")?)
/// };
/// // Sums of dq in f32 take scratch memory.
/// let plan = of(Mode::Auto)?;
/// assert_eq!((plan.level, plan.mode), (Level::Sm90a, Some(Mode::FusedPartials)));
/// assert!(plan.workspace_bytes() > 128 << 20);
/// let plan = of(Mode::Separate)?;
/// assert_eq!((plan.level, plan.mode), (Level::Sm90a, Some(Mode::Separate)));
/// assert!(plan.workspace_bytes() < 16 << 20);
/// # Ok::<(), etalon_problem::Error>(())
/// ```
pub fn plan(problem: &Problem, pass: Pass, storage: Dtype, options: &Options, target: &Target) -> Result<Plan> {
    let table = problem.checked_table(pass)?;
    levels::check(options, problem.algorithm(), pass, storage)?;
    let gradient = options.mode == Mode::ForwardGradient && matches!(problem, Problem::AttentionLse(_));
    let operands = Operands::All { gradient };
    let call = PassCall { target: *target, pass, storage, table: &table, operands, arrays: &[], options: *options };
    let plan = draft(problem, &call)?;
    let Choice { level, refusals, mode, blockings } = plan.choice;
    Ok(Plan {
        target: *target,
        level: if level == options.level.kernels() { options.level } else { level },
        refusals,
        mode,
        blocking: (!blockings.is_empty()).then(|| softmax::chosen(&blockings, options.blocking)),
        blockings,
        steps: kernels(&plan.steps),
        scratch_bytes: plan.scratch.bytes(),
        buffers: plan.scratch.into_buffers(),
    })
}

/// The steps of a pass of any algorithm, and the memory that they take.
pub(crate) fn draft<'a>(problem: &'a Problem, call: &PassCall<'_, '_>) -> Result<PassPlan<'a>> {
    call.options.blocking.map_or(Ok(()), |blocking| blocking.check())?;
    match problem {
        Problem::LinearAttention(problem) => linear_attention::draft(problem, call),
        Problem::LinearCrossEntropy(problem) => linear_cross_entropy::draft(problem, call),
        Problem::LazyAttention(_) => softmax::draft_lazy(problem, call),
        _ => softmax::draft(problem, call),
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
