//! A pass of linear_cross_entropy: its operands, its memory, its kernels.

use super::args::{COMMON, CrossEntropyArgs, PULL, TOKEN};
use super::plan::{PassSpec, Plan, Walked};
use super::tokens::counted;
use crate::call::PassCall;
use crate::level_table::{LINEAR_CROSS_ENTROPY, LevelSpec};
use crate::memory::{Layout, MemoryRange};
use crate::options::Level;
use crate::parts::Parts;
use crate::pass::{Choice, PassPlan, TableImage};
use crate::step::{self, Region, Step};
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Dtype, LinearCrossEntropy, Pass, Result};

pub(crate) struct Prepared<'a> {
    pub parts: Parts,
    pub problem: &'a LinearCrossEntropy,
    /// Some tokens may be ignored.
    pub ignores: bool,
    /// Operands lie in memory of the call, which begins and ends with whole words.
    pub whole_words: bool,
    pub spec: PassSpec,
    pub plan: Plan,
    /// The addresses of scratch memory that kernels share.
    pub memory: CrossEntropyArgs,
    /// On tensor cores, a copy of the rows of h of a chunk of tokens; without it they lie side by side in h.
    pub packed: Option<MemoryRange>,
    /// On tensor cores, of f16, the factor of da of each chunk of tokens: f32.
    pub scales: Option<MemoryRange>,
    pub filter: Option<Filtering>,
    pub scratch: Layout,
    pub choice: Choice,
}

pub(super) type Steps<'a> = step::Steps<'a, Prepared<'a>>;

/// A filter, and where it keeps what it finds.
#[derive(Clone, Copy)]
pub(crate) struct Filtering {
    pub filter: Filter,
    pub of_tokens: MemoryRange,
    pub of_classes: MemoryRange,
    pub by_token: MemoryRange,
    pub by_class: MemoryRange,
    /// A byte for each band of tokens and tile of classes: 1 where it is left out.
    pub left_out: MemoryRange,
    /// B of (C37) and C of (C38).
    pub dh: MemoryRange,
    pub dw: MemoryRange,
}

fn memory(plan: &Plan, spec: PassSpec, layout: &mut Layout) -> Result<CrossEntropyArgs> {
    let PassSpec { tokens, second, .. } = spec;
    let mut range = |bytes| Ok(layout.range(bytes)?.address(Region::Scratch.symbol()));
    Ok(CrossEntropyArgs {
        tokens: range(TOKEN * tokens)?.into(),
        common: range(COMMON)?.into(),
        z: range(plan.plane)?.into(),
        motion: range(if second { plan.plane } else { 0 })?.into(),
        picked: range(8 * tokens)?.into(),
        nodes: range(plan.nodes)?.into(),
        pulls: if spec.gradients() { range(PULL[usize::from(second)] * tokens)? } else { 0 }.into(),
        terms: range(16 * tokens)?.into(),
        hidden: range(plan.hidden)?.into(),
        head: range(plan.head)?.into(),
        head_bias: range(plan.head_bias)?.into(),
        ..CrossEntropyArgs::default()
    })
}

impl<'a> Prepared<'a> {
    /// Targets and weights of the host are looked at here. `shard`: the classes that are walked of the table's shard.
    pub fn new(
        (problem, shard): (&'a LinearCrossEntropy, Option<Walked>),
        call: &PassCall<'_, '_>,
    ) -> Result<Prepared<'a>> {
        let (PassCall { storage, options, .. }, inputs) = (*call, call.inputs());
        let counted = inputs.map(|inputs| counted(problem, inputs)).transpose()?;
        let ignores = counted.is_none_or(|counted| counted < problem.tokens);
        let mut layout = Layout::default();
        let parts = Parts::new(call, |_| false, &mut layout)?;
        let boxes = parts.begin_aligned(&["h", "w", "dh", "dw"]);
        let level = LevelSpec { facts: call.facts(), dim: problem.dim, value_dim: 0, empty: false, boxes };
        let choice = Choice::of(&LINEAR_CROSS_ENTROPY, &level, options.level)?;
        let tensor = choice.level == Level::Sm90a;
        let LinearCrossEntropy { tokens, dim, vocab, .. } = *problem;
        let second = call.pass == Pass::DoubleBackward;
        let gradients = if second { ["gh", "gw", "gbias"] } else { ["dh", "dw", "dbias"] };
        let [dh, dw, dbias] = gradients.map(|name| parts.has(name));
        let wide = problem.wide_gradients || storage == Dtype::F32;
        let (budget, side_by_side) = (options.memory_budget, call.target.multiprocessors / 2);
        let spec = PassSpec { dh, dw, dbias, wide, second, tokens, dim, vocab, budget, tensor, side_by_side };
        let plan = shard.map_or_else(|| Plan::new(spec), |walked| Plan::of_shard(spec, walked))?;
        let memory = memory(&plan, spec, &mut layout)?;
        let packed = layout.array_if(tensor && ignores, 2, &[plan.rows, dim])?;
        let scales = tensor && storage == Dtype::F16;
        let scales = layout.array_if(scales, 4, &[tokens.div_ceil(plan.rows)])?;
        Ok(Prepared {
            problem,
            ignores,
            whole_words: inputs.is_some(),
            spec,
            plan,
            memory,
            packed,
            scales,
            filter: None,
            scratch: layout,
            choice,
            parts,
        })
    }

    pub fn plan(self, steps: Vec<Step>) -> PassPlan<'static> {
        let Prepared { parts, scratch, choice, .. } = self;
        PassPlan { parts, tables: Box::new(|| Ok(TableImage::default())), scratch, steps, choice }
    }
}

crate::read_as::read_as!(Prepared<'_>, parts: Parts);
