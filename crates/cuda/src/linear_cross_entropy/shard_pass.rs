//! The passes of a shard of classes, which go over one node of the tree after the other, each as if its classes were
//! all; and the returns of shards, put together along the tree. Kernels: `kernels/linear_cross_entropy/shards.cu`,
//! beside those of the pass.

use super::args::{CrossEntropyArgs, FoldArgs, NODE, Outputs, ShardArgs, behind};
use super::plan::Walked;
use super::prepared::{Prepared, Steps};
use super::run::{Run, clear};
use crate::args::filled;
use crate::call::PassCall;
use crate::family::Family;
use crate::memory::{Layout, MemoryRange, memory};
use crate::options::Level;
use crate::parts::Parts;
use crate::pass::{Choice, PassPlan, TableImage};
use crate::step::{self, Work};
use crate::variant::Variant;
use etalon_problem::linear_cross_entropy::shard::{Dh, Partial, depth, merges, nodes};
use etalon_problem::{LinearCrossEntropy, Pass, Result};
use std::ops::Range;

/// A pass of a shard.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Step {
    /// (C33) of its nodes: `partials`.
    Forward,
    /// The outputs, from the totals of all shards.
    Output,
    /// dw and dbias of its classes, and what these add to dh: one sum, or those of its nodes.
    Backward(Dh),
}

impl Step {
    /// The pass of the problem that it is a part of.
    pub fn pass(self) -> Pass {
        if let Step::Backward(_) = self { Pass::Backward } else { Pass::Forward }
    }
}

/// As [`Prepared::new`], of a table whose tensors are those of a shard.
pub(crate) fn draft_shard(
    (problem, classes): (&LinearCrossEntropy, Range<usize>),
    step: Step,
    call: &PassCall<'_, '_>,
) -> Result<PassPlan<'static>> {
    let call = if step == Step::Output { call.on(Level::Portable) } else { *call };
    let own: Vec<_> = nodes(problem.vocab, classes.clone()).collect();
    let widest = own.iter().map(|node| node.len()).max().unwrap_or(0);
    let all = classes.len();
    let of = |widest, nodes| {
        let walked = Walked { classes: all, widest, nodes };
        Prepared::new((problem, Some(walked)), &call)
    };
    // The level is known from now on.
    let mut prepared = of(widest, true)?;
    // Tensor cores sum dh over all classes of a shard as over a block, if they are no node; and dw does not know of
    // nodes.
    let nodes_matter = match step {
        Step::Forward => true,
        Step::Output => false,
        Step::Backward(dh) => prepared.spec.dh && !(dh == Dh::Sum && prepared.spec.tensor),
    };
    if !nodes_matter && widest < all {
        prepared = of(all, false)?;
    }
    let whole = std::iter::once(classes.clone()).filter(|x| !x.is_empty());
    let spans: Vec<_> = if nodes_matter { own } else { whole.collect() };
    let layout = &mut prepared.scratch;
    let totals = layout.range(if step == Step::Forward { 0 } else { NODE[0] * problem.tokens })?;
    let adds = step == Step::Backward(Dh::Sum) && nodes_matter && spans.len() > 1;
    let part = layout.array_if(adds, 4, &[problem.tokens, problem.dim])?;
    let steps = Steps::new(&prepared)?;
    clear(&steps)?;
    let walk = Walk { step, problem, classes, spans, totals, part, all: Run::new(&steps) };
    match step {
        Step::Forward => walk.forward()?,
        Step::Output => {
            walk.finish()?;
            walk.all.launch("loss", (1, 256), &walk.all.args)?;
        }
        Step::Backward(_) => walk.backward()?,
    }
    let steps = steps.finish()?;
    Ok(prepared.plan(steps))
}

struct Walk<'a> {
    step: Step,
    problem: &'a LinearCrossEntropy,
    classes: Range<usize>,
    /// The classes that are walked by themselves: the nodes of the shard, or all at once.
    spans: Vec<Range<usize>>,
    /// The totals of tokens that count, where `finish` finds them.
    totals: MemoryRange,
    /// dh of a node, before it is added to that of the nodes before it.
    part: Option<MemoryRange>,
    /// The pass as that of all classes.
    all: Run<'a>,
}

impl Walk<'_> {
    fn arguments(&self, args: &CrossEntropyArgs) -> ShardArgs {
        let LinearCrossEntropy { vocab, outputs, .. } = *self.problem;
        ShardArgs {
            c: *args,
            vocab: vocab as i32,
            nodes: self.spans.len() as i32,
            argmax: i32::from(outputs.argmax),
            ..ShardArgs::default()
        }
    }

    fn launch(&self, name: &'static str, grid: (usize, u32), args: &ShardArgs) -> Result<()> {
        let variant = Variant::cross_entropy(Family::CrossEntropyShards, self.all.steps.prepared.storage, false);
        self.all.steps.launch((&variant, name), grid, args)
    }

    /// The pass over one span, as if its classes were all, of tokens whose targets become classes of it.
    fn over(&self, tokens: &Range<usize>, number: usize, span: &Range<usize>) -> Result<Run<'_>> {
        let args = self.arguments(&self.all.of_tokens(tokens));
        let args = ShardArgs { first: span.start as i32, ..args };
        self.launch("place", (tokens.len().div_ceil(128), 128), &args)?;
        let Prepared { parts, spec, .. } = self.all.steps.prepared;
        let LinearCrossEntropy { dim, outputs, .. } = *self.problem;
        let args = self.all.args;
        let dh = match (self.step, self.part) {
            (_, Some(part)) if number > 0 => self.all.steps.at(part),
            (Step::Backward(Dh::Nodes), _) => behind(args.dh.0, 4 * number * self.problem.tokens * dim),
            _ => args.dh.0,
        };
        let before = span.start - self.classes.start;
        let stored = parts.storage.bytes();
        let gradient = if spec.wide { 4 } else { stored };
        let forward = self.step == Step::Forward;
        // Kernels of the totals look whether there is an address, and write nothing there.
        let argmax = if forward && outputs.argmax { self.all.steps.address("partials") } else { 0 };
        let args = CrossEntropyArgs {
            vocab: span.len() as i32,
            w: behind(args.w.0, stored * before * dim).into(),
            bias: behind(args.bias.0, stored * before).into(),
            class_weights: behind(args.class_weights.0, 4 * span.start).into(),
            dh: dh.into(),
            dw: behind(args.dw.0, gradient * before * dim).into(),
            dbias: behind(args.dbias.0, gradient * before).into(),
            // Whoever combines partials asks for outputs; here no kernel writes any.
            entropy: if forward { i32::from(outputs.entropy) } else { args.entropy },
            argmax: argmax.into(),
            outputs: Outputs::default(),
            ..args
        };
        let head_bias = self.all.head_bias + 4 * before as u64;
        Ok(Run { steps: self.all.steps, args, wide_hidden: true, head_bias })
    }

    fn forward(&self) -> Result<()> {
        let out = self.all.steps.address("partials");
        let args = ShardArgs { partials: out.into(), ..self.arguments(&self.all.args) };
        let all = self.spans.len().checked_mul(self.problem.tokens).ok_or_else(|| memory(usize::MAX))?;
        self.launch("identities", (all.div_ceil(128), 128), &args)?;
        self.all.launch("tokens", (1, 1024), &self.all.args)?;
        for tokens in self.all.tokens() {
            self.all.gather(&tokens)?;
            for (number, span) in self.spans.iter().enumerate() {
                let run = self.over(&tokens, number, span)?;
                run.totals(&tokens)?;
                let args = self.arguments(&run.of_tokens(&tokens));
                let partials = behind(out, Partial::BYTES * number * self.problem.tokens).into();
                let args = ShardArgs { partials, first: span.start as i32, ..args };
                self.launch("partials", (tokens.len().div_ceil(128), 128), &args)?;
            }
        }
        Ok(())
    }

    /// Outputs of all tokens, and what they pull with, from the totals.
    fn finish(&self) -> Result<()> {
        let LinearCrossEntropy { tokens, vocab, .. } = *self.problem;
        self.all.launch("tokens", (1, 1024), &self.all.args)?;
        // The totals are one node of the tree, and lie side by side.
        let all = CrossEntropyArgs {
            nodes: self.all.steps.at(self.totals).into(),
            leaf: vocab as i32,
            rows: tokens as i32,
            ..self.all.of_tokens(&(0..tokens))
        };
        let totals = self.all.steps.address("totals").into();
        let args = ShardArgs { partials: totals, ..self.arguments(&all) };
        self.launch("recall", (tokens.div_ceil(128), 128), &args)?;
        self.all.launch("finish", (tokens.div_ceil(128), 128), &all)
    }

    fn backward(&self) -> Result<()> {
        let Prepared { parts, spec, plan, .. } = self.all.steps.prepared;
        if self.spans.is_empty() {
            if let Some(part) = parts.part("dh").filter(|part| part.wanted) {
                let bytes = part.bytes * part.operand.len();
                self.all.steps.fill(self.all.steps.address("dh"), bytes, 0);
            }
            return Ok(());
        }
        self.finish()?;
        for tokens in self.all.tokens() {
            self.all.gather(&tokens)?;
            self.all.scale(&self.all.of_tokens(&tokens))?;
            for (number, span) in self.spans.iter().enumerate() {
                let run = self.over(&tokens, number, span)?;
                run.pull(&tokens)?;
                if self.part.is_some() && number > 0 {
                    // dh of a node is added to that of the nodes before it.
                    let (args, sums) = (run.of_tokens(&tokens), self.all.args.dh.0.into());
                    let blocks = tokens.len() * self.problem.dim.div_ceil(1024);
                    let args = ShardArgs { sums, part: args.dh.0.into(), ..self.arguments(&args) };
                    self.launch("add", (blocks, 256), &args)?;
                }
            }
        }
        if plan.apart && spec.gradients() {
            for (number, span) in self.spans.iter().enumerate() {
                self.over(&(0..self.problem.tokens), number, span)?.by_classes()?;
            }
        }
        Ok(())
    }
}

/// `totals` of a table from `partials`, or `dh` from `parts`, which hold these classes.
pub(crate) fn draft_sums(
    problem: &LinearCrossEntropy,
    classes: &[Range<usize>],
    call: &PassCall<'_, '_>,
) -> Result<PassPlan<'static>> {
    let mut layout = Layout::default();
    let parts = Parts::new(call, |_| false, &mut layout)?;
    let merges = merges(classes);
    let bytes = bytemuck::cast_slice(&merges);
    let range = Layout::default().range(bytes.len())?;
    let mut tables = TableImage::new(bytes.len());
    tables.put(range, bytes);
    let own = &parts;
    let steps = step::Steps::new(&own)?;
    let length = |name: &str| parts.part(name).map_or(0, |part| part.operand.len());
    let (name, count, [threads, each, bytes]) = match parts.has("dh") {
        true => ("sum", length("dh"), [64, 4, 16]),
        false => ("combine", length("totals") / Partial::WORDS, [32, 1, NODE[0]]),
    };
    let address = |name| steps.address(name);
    let args = FoldArgs {
        sums: address("parts").into(),
        merges: steps.table(range).into(),
        count: count as i64,
        parts: classes.len() as i32,
        whole: i32::from(count.is_multiple_of(4) && parts.begin_aligned(&["parts"])),
        wide: i32::from(parts.part("dh").is_some_and(|part| part.bytes == 4)),
        entropy: i32::from(problem.outputs.entropy),
        smoothing: i32::from(problem.label_smoothing > 0.0),
        argmax: i32::from(problem.outputs.argmax),
        ..filled!(FoldArgs: names(address) [partials totals dh])
    };
    // Each thread keeps a branch of the tree, nodes or vectors, in shared memory.
    let shared = threads * bytes * depth(&merges).max(1);
    let grid = (count.div_ceil(each * threads), threads as u32);
    let variant = Variant::cross_entropy(Family::CrossEntropyShards, parts.storage, false);
    steps.push((&variant, name), grid, shared as u32, &args, Work::NONE)?;
    let steps = steps.finish()?;
    let (mode, refusals, blockings) = (None, Vec::new(), Vec::new());
    let choice = Choice { level: Level::Portable, refusals, mode, blockings };
    Ok(PassPlan { parts, tables: Box::new(move || Ok(tables)), scratch: layout, steps, choice })
}
