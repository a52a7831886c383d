//! A pass of linear_cross_entropy: its operands, its memory, its kernels.

use super::args::{COMMON, PULL, TOKEN};
use super::filter::Filtering;
use super::hopper::Hopper;
use super::levels::LEVELS;
use super::plan::{PassSpec, Plan, Walked};
use super::tokens::counted;
use crate::call::PassCall;
use crate::level_table::LevelSpec;
use crate::memory::{Layout, MemoryRange};
use crate::options::Level;
use crate::parts::Parts;
use crate::pass::{Choice, PassPlan, TableImage};
use crate::step::Step;
use crate::variant::Variant;
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Dtype, Error, LinearCrossEntropy, Pass};
use std::ops::Deref;

/// A pass whose memory is laid out.
#[derive(Debug)]
pub(crate) struct Prepared<'a> {
    pub parts: Parts,
    pub problem: &'a LinearCrossEntropy,
    /// Some tokens may be ignored.
    pub ignores: bool,
    /// Operands lie in memory of the call, which begins and ends with whole words.
    pub whole_words: bool,
    pub spec: PassSpec,
    pub plan: Plan,
    pub ranges: Ranges,
    /// The portable kernels.
    pub kernels: Variant,
    /// The kernels of the level sm90a, which take the place of those that multiply.
    pub hopper: Option<Hopper>,
    /// The filter of dh and dw.
    pub filter: Option<Filtering>,
    /// The scratch memory so far.
    pub scratch: Layout,
    pub choice: Choice,
}

/// Ranges of scratch memory.
#[derive(Debug)]
pub(crate) struct Ranges {
    pub tokens: MemoryRange,
    pub common: MemoryRange,
    pub z: MemoryRange,
    pub motion: MemoryRange,
    pub picked: MemoryRange,
    pub nodes: MemoryRange,
    pub pulls: MemoryRange,
    pub terms: MemoryRange,
    pub hidden: MemoryRange,
    pub head: MemoryRange,
    pub head_bias: MemoryRange,
}

impl Ranges {
    fn new(plan: &Plan, spec: PassSpec, tokens: usize, layout: &mut Layout) -> Result<Ranges, Error> {
        let pulls = if spec.gradients() { PULL[usize::from(spec.second)] } else { 0 };
        Ok(Ranges {
            tokens: layout.range(TOKEN * tokens)?,
            common: layout.range(COMMON)?,
            z: layout.range(plan.plane)?,
            motion: layout.range(if spec.second { plan.plane } else { 0 })?,
            picked: layout.range(8 * tokens)?,
            nodes: layout.range(plan.nodes)?,
            pulls: layout.range(pulls * tokens)?,
            terms: layout.range(16 * tokens)?,
            hidden: layout.range(plan.hidden)?,
            head: layout.range(plan.head)?,
            head_bias: layout.range(plan.head_bias)?,
        })
    }
}

impl<'a> Prepared<'a> {
    /// Lays the memory of a pass out. Targets and weights in memory of the host are looked at here. `shard`: the
    /// classes that are walked of the shard that the table is of.
    pub fn new(
        (problem, shard): (&'a LinearCrossEntropy, Option<Walked>),
        call: &PassCall<'_, '_>,
    ) -> Result<Prepared<'a>, Error> {
        let (PassCall { storage, options, .. }, inputs) = (*call, call.inputs());
        let counted = inputs.map(|inputs| counted(problem, inputs)).transpose()?;
        let ignores = counted.is_none_or(|counted| counted < problem.tokens);
        let mut layout = Layout::default();
        let parts = Parts::new(call, |_| false, &mut layout)?;
        let boxes = parts.begin_aligned(&["h", "w", "dh", "dw"]);
        let level = LevelSpec { facts: call.facts(), dim: problem.dim, value_dim: 0, empty: false, boxes };
        let choice = Choice::of(&LEVELS, &level, options.level)?;
        let tensor = choice.level == Level::Sm90a;
        let spec = spec_of(&parts, problem, tensor);
        let sizes = (problem.tokens, problem.dim, problem.vocab);
        let plan = match shard {
            Some(walked) => Plan::of_shard(sizes, spec, options.memory_budget, walked)?,
            None => Plan::new(sizes, spec, options.memory_budget)?,
        };
        let ranges = Ranges::new(&plan, spec, problem.tokens, &mut layout)?;
        let hopper = tensor.then(|| Hopper::new(storage, sizes, &plan, ignores, &mut layout));
        Ok(Prepared {
            problem,
            ignores,
            whole_words: inputs.is_some(),
            spec,
            plan,
            ranges,
            kernels: Variant::cross_entropy(storage, spec.second),
            hopper: hopper.transpose()?,
            filter: None,
            scratch: layout,
            choice,
            parts,
        })
    }

    /// The same with a filter, of kernels without tensor cores.
    pub fn filtered(mut self, filter: Filter) -> Result<Self, Error> {
        let filter = Filtering::new(filter, self.problem, &self.plan, &mut self.scratch)?;
        Ok(Prepared { filter: Some(filter), ..self })
    }

    /// The plan of the pass, of drafted steps.
    pub fn plan(self, steps: Vec<Step>) -> PassPlan<'static> {
        let Prepared { parts, scratch, choice, .. } = self;
        PassPlan { parts, tables: Box::new(|| Ok(TableImage::default())), scratch, steps, choice }
    }
}

impl Deref for Prepared<'_> {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.parts
    }
}

fn spec_of(parts: &Parts, problem: &LinearCrossEntropy, tensor: bool) -> PassSpec {
    let second = parts.pass == Pass::DoubleBackward;
    let gradients = if second { ["gh", "gw", "gbias"] } else { ["dh", "dw", "dbias"] };
    let [dh, dw, dbias] = gradients.map(|name| parts.has(name));
    let wide = problem.wide_gradients || parts.storage == Dtype::F32;
    let side_by_side = parts.target.multiprocessors / 2;
    PassSpec { dh, dw, dbias, wide, second, tensor, side_by_side }
}
