//! The passes of a shard of classes, which go over one node of the tree after the other, each as if its classes were
//! all: `kernels/linear_cross_entropy/shards.cu` beside the kernels of the pass.

use super::args::{CrossEntropyArgs, NODE, Outputs, ShardArgs, behind};
use super::plan::Walked;
use super::prepared::Prepared;
use super::run::{Run, Steps, clear};
use crate::call::PassCall;
use crate::memory::{MemoryRange, memory};
use crate::options::Level;
use crate::pass::PassPlan;
use crate::variant::Variant;
use etalon_problem::linear_cross_entropy::shard::{Partial, nodes};
use etalon_problem::{Error, LinearCrossEntropy, Pass};
use std::ops::Range;

/// A pass of a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// (C33) of its nodes: `partials`.
    Forward,
    /// The outputs, from the totals of all shards.
    Output,
    /// dw and dbias of its classes, and what these add to dh: one sum, or those of its nodes.
    Backward { summed: bool },
}

impl Step {
    /// The pass of the problem that it is a part of.
    pub fn pass(self) -> Pass {
        if let Step::Backward { .. } = self { Pass::Backward } else { Pass::Forward }
    }
}

/// The spans of a shard that are walked one after the other, and their memory.
struct Shard {
    step: Step,
    classes: Range<usize>,
    /// The classes that are walked by themselves: the nodes of the shard, or all at once.
    spans: Vec<Range<usize>>,
    kernels: Variant,
    /// The totals of tokens that count, where `finish` finds them.
    totals: MemoryRange,
    /// dh of a node, before it is added to that of the nodes before it.
    part: Option<MemoryRange>,
}

/// Drafts the steps of a pass of a shard, as [`Prepared::new`], of a table whose tensors are those of a shard.
pub(crate) fn draft_shard(
    (problem, classes): (&LinearCrossEntropy, Range<usize>),
    step: Step,
    call: &PassCall<'_, '_>,
) -> Result<PassPlan<'static>, Error> {
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
        Step::Backward { summed } => prepared.spec.dh && !(summed && prepared.hopper.is_some()),
    };
    if !nodes_matter && widest < all {
        prepared = of(all, false)?;
    }
    let whole = std::iter::once(classes.clone()).filter(|x| !x.is_empty());
    let spans = if nodes_matter { own } else { whole.collect() };
    let shard = Shard::new(step, (classes, spans), nodes_matter, &mut prepared)?;
    let steps = Steps::new(&prepared)?;
    clear(&steps)?;
    Walk { own: &shard, steps: &steps, all: Run::new(&steps) }.run()?;
    let steps = steps.finish()?;
    Ok(prepared.plan(steps))
}

impl Shard {
    /// With scratch memory behind that of the pass.
    fn new(
        step: Step,
        (classes, spans): (Range<usize>, Vec<Range<usize>>),
        nodes_matter: bool,
        prepared: &mut Prepared<'_>,
    ) -> Result<Shard, Error> {
        let problem = prepared.problem;
        let layout = &mut prepared.scratch;
        let recalls = if step == Step::Forward { 0 } else { NODE[0] * problem.tokens };
        let totals = layout.range(recalls)?;
        let adds = step == Step::Backward { summed: true } && nodes_matter && spans.len() > 1;
        let part = layout.array_if(adds, 4, &[problem.tokens, problem.dim])?;
        let kernels = Variant::cross_entropy_shards(prepared.parts.storage);
        Ok(Shard { step, classes, spans, kernels, totals, part })
    }
}

/// The steps of a pass of a shard.
struct Walk<'a> {
    own: &'a Shard,
    steps: &'a Steps<'a>,
    /// The pass as that of all classes.
    all: Run<'a>,
}

impl Walk<'_> {
    fn problem(&self) -> &LinearCrossEntropy {
        self.steps.prepared.problem
    }

    fn run(&self) -> Result<(), Error> {
        match self.own.step {
            Step::Forward => self.forward(),
            Step::Output => {
                self.finish()?;
                self.all.launch("loss", 1, 256, &self.all.args)
            }
            Step::Backward { .. } => self.backward(),
        }
    }

    fn arguments(&self, args: &CrossEntropyArgs) -> ShardArgs {
        let LinearCrossEntropy { vocab, outputs, .. } = *self.problem();
        ShardArgs {
            c: *args,
            vocab: vocab as i32,
            nodes: self.own.spans.len() as i32,
            argmax: i32::from(outputs.argmax),
            ..ShardArgs::default()
        }
    }

    fn launch(&self, name: &'static str, blocks: usize, threads: u32, args: &ShardArgs) -> Result<(), Error> {
        self.steps.launch((&self.own.kernels, name), (blocks, threads), args)
    }

    /// The pass over one span, as if its classes were all.
    fn of(&self, number: usize, span: &Range<usize>) -> Run<'_> {
        let Prepared { parts, spec, .. } = self.steps.prepared;
        let (args, dim) = (self.all.args, self.problem().dim);
        let before = span.start - self.own.classes.start;
        let stored = parts.storage.bytes();
        let gradient = if spec.wide { 4 } else { stored };
        let outputs = self.problem().outputs;
        let forward = self.own.step == Step::Forward;
        // Kernels of the totals look whether there is an address, and write nothing there.
        let argmax = if forward && outputs.argmax { self.steps.address("partials") } else { 0 };
        let args = CrossEntropyArgs {
            vocab: span.len() as i32,
            w: behind(args.w.0, stored * before * dim).into(),
            bias: behind(args.bias.0, stored * before).into(),
            class_weights: behind(args.class_weights.0, 4 * span.start).into(),
            dh: self.dh(number).into(),
            dw: behind(args.dw.0, gradient * before * dim).into(),
            dbias: behind(args.dbias.0, gradient * before).into(),
            // Whoever combines partials asks for outputs; here no kernel writes any.
            entropy: if forward { i32::from(outputs.entropy) } else { args.entropy },
            argmax: argmax.into(),
            outputs: Outputs::default(),
            ..args
        };
        let head_bias = self.all.head_bias + 4 * before as u64;
        Run { steps: self.steps, args, wide_hidden: true, head_bias }
    }

    /// The address of dh of a span.
    fn dh(&self, number: usize) -> u64 {
        let dh = self.all.args.dh.0;
        let LinearCrossEntropy { tokens, dim, .. } = *self.problem();
        match (self.own.step, self.own.part) {
            (_, Some(part)) if number > 0 => self.steps.at(part),
            (Step::Backward { summed: false }, _) => behind(dh, 4 * number * tokens * dim),
            _ => dh,
        }
    }

    /// Makes the targets of some tokens classes of a span.
    fn place(&self, tokens: &Range<usize>, span: &Range<usize>) -> Result<(), Error> {
        let args = self.arguments(&self.all.chunk(tokens, &(0..0)));
        let args = ShardArgs { first: span.start as i32, ..args };
        self.launch("place", tokens.len().div_ceil(128), 128, &args)
    }

    fn forward(&self) -> Result<(), Error> {
        let out = self.steps.address("partials");
        let (spans, tokens) = (&self.own.spans, self.problem().tokens);
        let args = ShardArgs { partials: out.into(), ..self.arguments(&self.all.args) };
        let all = spans.len().checked_mul(tokens).ok_or_else(|| memory(usize::MAX))?;
        self.launch("identities", all.div_ceil(128), 128, &args)?;
        self.all.launch("tokens", 1, 1024, &self.all.args)?;
        for tokens in self.all.tokens() {
            let h = self.all.rows(&tokens)?;
            for (number, span) in spans.iter().enumerate() {
                self.place(&tokens, span)?;
                let run = self.of(number, span);
                run.totals(&tokens, h)?;
                let args = self.arguments(&run.chunk(&tokens, &(0..0)));
                let partials = behind(out, Partial::BYTES * number * self.problem().tokens).into();
                let args = ShardArgs { partials, first: span.start as i32, ..args };
                self.launch("partials", tokens.len().div_ceil(128), 128, &args)?;
            }
        }
        Ok(())
    }

    /// Outputs of all tokens, and what they pull with, from the totals.
    fn finish(&self) -> Result<(), Error> {
        let LinearCrossEntropy { tokens, vocab, .. } = *self.problem();
        self.all.launch("tokens", 1, 1024, &self.all.args)?;
        // The totals are one node of the tree, and lie side by side.
        let all = CrossEntropyArgs {
            nodes: self.steps.at(self.own.totals).into(),
            leaf: vocab as i32,
            rows: tokens as i32,
            ..self.all.chunk(&(0..tokens), &(0..0))
        };
        let totals = self.steps.address("totals").into();
        let args = ShardArgs { partials: totals, ..self.arguments(&all) };
        self.launch("recall", tokens.div_ceil(128), 128, &args)?;
        self.all.launch("finish", tokens.div_ceil(128), 128, &all)
    }

    fn backward(&self) -> Result<(), Error> {
        let Prepared { parts, spec, plan, .. } = self.steps.prepared;
        if self.own.spans.is_empty() {
            if let Some(part) = parts.part("dh").filter(|part| part.wanted) {
                let bytes = part.bytes * part.operand.len();
                self.steps.fill(self.steps.address("dh"), bytes, 0);
            }
            return Ok(());
        }
        self.finish()?;
        for tokens in self.all.tokens() {
            let h = self.all.rows(&tokens)?;
            self.all.scale(&self.all.chunk(&tokens, &(0..0)))?;
            for (number, span) in self.own.spans.iter().enumerate() {
                self.place(&tokens, span)?;
                let run = self.of(number, span);
                run.pull(&tokens, h)?;
                if self.own.part.is_some() && number > 0 {
                    self.add(&run.chunk(&tokens, &(0..0)))?;
                }
            }
        }
        if plan.apart && spec.gradients() {
            for (number, span) in self.own.spans.iter().enumerate() {
                self.place(&(0..self.problem().tokens), span)?;
                self.of(number, span).by_classes()?;
            }
        }
        Ok(())
    }

    /// Adds dh of a node to that of the nodes before it.
    fn add(&self, args: &CrossEntropyArgs) -> Result<(), Error> {
        let (sums, part) = (self.all.args.dh.0.into(), args.dh.0.into());
        let blocks = args.count as usize * (args.dim as usize).div_ceil(1024);
        self.launch("add", blocks, 256, &ShardArgs { sums, part, ..self.arguments(args) })
    }
}
