//! The passes of a shard of classes, which go over one node of the tree after the other, each as if its classes were
//! all: `kernels/cross_entropy_shards.cu` beside the kernels of the pass.

use crate::cross_entropy::call::{Call, PerToken};
use crate::cross_entropy::plan::Walked;
use crate::cross_entropy::prepared::Prepared;
use crate::cross_entropy::run::{Run, clear};
use crate::gpu::Kernels;
use crate::job::Job;
use crate::options::{Level, Options};
use crate::parts::{Holds, Parts};
use crate::queue::Queue;
use crate::ready;
use crate::room::{Layout, Room, memory};
use crate::variant::Variant;
use crate::workspace::Held;
use cudarc::driver::DeviceRepr;
use etalon_problem::linear_cross_entropy::shard::{Partial, nodes};
use etalon_problem::{Dtype, Error, LinearCrossEntropy, Pass, Table, Views};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

/// What a pass of a shard computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// (C33) of its nodes: `partials`.
    Forward,
    /// The outputs, from the totals of all shards.
    Output,
    /// dw and dbias of its classes, and what these add to dh: one sum, or those of its nodes.
    Backward { summed: bool },
}

/// `Shards` of `cross_entropy_shards.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Told {
    call: Call,
    partials: u64,
    sums: u64,
    part: u64,
    first: i32,
    vocab: i32,
    nodes: i32,
    argmax: i32,
}

// SAFETY: the fields, their types and their order are those of `Shards` in `cross_entropy_shards.cu`, and it holds
// no reference of the host.
unsafe impl DeviceRepr for Told {}

/// Bytes of `Node` of `cross_entropy.cuh`.
pub(super) const NODE: usize = 28;

/// A pass of a shard that may be enqueued.
#[derive(Debug)]
pub(crate) struct ShardReady<'a> {
    prepared: Prepared<'a>,
    step: Step,
    classes: Range<usize>,
    /// The classes that are walked by themselves: the nodes of the shard, or all at once.
    spans: Vec<Range<usize>>,
    kernels: Arc<Kernels>,
    /// The totals of tokens that count, where `finish` finds them.
    totals: Room,
    /// dh of a node, before it is added to that of the nodes before it.
    part: Option<Room>,
}

impl<'a> ShardReady<'a> {
    /// As [`Prepared::new`], of a table whose tensors are those of a shard.
    pub fn new(
        held: Arc<Held>,
        (problem, classes): (&'a LinearCrossEntropy, Range<usize>),
        (step, storage): (Step, Dtype),
        table: &Table,
        holds: Holds<'_>,
        inputs: Option<&Views<'_>>,
        options: &Options,
    ) -> Result<ShardReady<'a>, Error> {
        let pass = if let Step::Backward { .. } = step { Pass::Backward } else { Pass::Forward };
        let level = if step == Step::Output { Level::Portable } else { options.level };
        let options = Options { level, ..*options };
        let own: Vec<_> = nodes(problem.vocab, classes.clone()).collect();
        let widest = own.iter().map(|node| node.len()).max().unwrap_or(0);
        let (call, all) = ((pass, storage), classes.len());
        let of = |widest, nodes| {
            let walked = Walked { classes: all, widest, nodes };
            let (held, of) = (held.clone(), (problem, Some(walked)));
            Prepared::new(held, of, call, table, holds, inputs, &options)
        };
        // Whether tensor cores compute it is known from now on.
        let mut prepared = of(widest, true)?;
        // Tensor cores sum dh over all classes of a shard as over a block, if they are no node; and dw does not know of nodes.
        let nodes_matter = match step {
            Step::Forward => true,
            Step::Output => false,
            Step::Backward { summed } => {
                prepared.asked.dh && !(summed && prepared.hopper.is_some())
            }
        };
        if !nodes_matter && widest < all {
            prepared = of(all, false)?;
        }
        let whole = std::iter::once(classes.clone()).filter(|x| !x.is_empty());
        let spans = if nodes_matter { own } else { whole.collect() };
        let mut layout = Layout::default();
        layout.room(prepared.scratch_bytes)?; // that of the pass comes first
        let recalls = if step == Step::Forward { 0 } else { NODE * problem.tokens };
        let totals = layout.room(recalls)?;
        let adds = step == Step::Backward { summed: true } && nodes_matter && spans.len() > 1;
        let all = problem.tokens.checked_mul(problem.dim).and_then(|x| x.checked_mul(4));
        let part = || layout.room(all.ok_or_else(|| memory(usize::MAX))?);
        let part = adds.then(part).transpose()?;
        prepared.scratch_bytes = layout.bytes();
        let device = prepared.parts.device();
        let variant = Variant::cross_entropy_shards(storage);
        let kernels = device.kernels(variant, &device.architecture())?;
        Ok(ShardReady { prepared, step, classes, spans, kernels, totals, part })
    }
}

/// A call of a pass of a shard.
struct Walk<'w, 'j, 'a> {
    own: &'w ShardReady<'a>,
    job: &'j Job<'j, Prepared<'a>>,
    /// The pass as that of all classes.
    all: Run<'j, 'a>,
}

impl Walk<'_, '_, '_> {
    fn problem(&self) -> &LinearCrossEntropy {
        &self.own.prepared.problem
    }

    fn told(&self, call: &Call) -> Told {
        let LinearCrossEntropy { vocab, outputs, .. } = *self.problem();
        Told {
            call: *call,
            partials: 0,
            sums: 0,
            part: 0,
            first: 0,
            vocab: vocab as i32,
            nodes: self.own.spans.len() as i32,
            argmax: i32::from(outputs.argmax),
        }
    }

    fn launch(&self, name: &str, blocks: usize, threads: u32, told: &Told) -> Result<(), Error> {
        self.job.queue.launch(self.own.kernels.get(name)?, blocks as u64, (threads, 0), told)
    }

    /// The pass over one span, as if its classes were all.
    fn of(&self, number: usize, span: &Range<usize>) -> Run<'_, '_> {
        let Prepared { parts, asked, .. } = &self.own.prepared;
        let (call, dim) = (self.all.call, self.problem().dim as u64);
        let before = (span.start - self.own.classes.start) as u64;
        let moved = |address: u64, bytes: usize, elements: u64| match address {
            0 => 0,
            address => address + bytes as u64 * elements,
        };
        let gradient = if asked.wide { 4 } else { parts.storage.bytes() };
        let outputs = self.problem().outputs;
        let forward = self.own.step == Step::Forward;
        let call = Call {
            vocab: span.len() as i32,
            w: moved(call.w, parts.storage.bytes(), before * dim),
            bias: moved(call.bias, parts.storage.bytes(), before),
            class_weights: moved(call.class_weights, 4, span.start as u64),
            dh: self.dh(number),
            dw: moved(call.dw, gradient, before * dim),
            dbias: moved(call.dbias, gradient, before),
            // Whoever combines partials asks for outputs; here no kernel writes any.
            entropy: if forward { i32::from(outputs.entropy) } else { call.entropy },
            argmax: if forward { u64::from(outputs.argmax) } else { 0 },
            outputs: PerToken::default(),
            ..call
        };
        let head_bias = self.all.head_bias + 4 * before;
        Run { job: self.job, call, wide_hidden: true, head_bias }
    }

    /// Where dh of a span goes.
    fn dh(&self, number: usize) -> u64 {
        let dh = self.all.call.dh;
        let LinearCrossEntropy { tokens, dim, .. } = *self.problem();
        match (self.own.step, self.own.part) {
            (_, Some(part)) if number > 0 => self.job.at(part),
            (Step::Backward { summed: false }, _) if dh != 0 => {
                dh + 4 * (number * tokens * dim) as u64
            }
            _ => dh,
        }
    }

    /// Makes the targets of some tokens classes of a span.
    fn place(&self, tokens: &Range<usize>, span: &Range<usize>) -> Result<(), Error> {
        let told = self.told(&self.all.chunk(tokens, &(0..0)));
        let told = Told { first: span.start as i32, ..told };
        self.launch("place", tokens.len().div_ceil(128), 128, &told)
    }

    fn forward(&self) -> Result<(), Error> {
        let out = self.job.address("partials");
        let (spans, tokens) = (&self.own.spans, self.problem().tokens);
        let told = Told { partials: out, ..self.told(&self.all.call) };
        let all = spans.len().checked_mul(tokens).ok_or_else(|| memory(usize::MAX))?;
        self.launch("identities", all.div_ceil(128), 128, &told)?;
        self.all.launch("tokens", 1, 1024, &self.all.call)?;
        for tokens in self.all.tokens() {
            let h = self.all.rows(&tokens)?;
            for (number, span) in spans.iter().enumerate() {
                self.place(&tokens, span)?;
                let run = self.of(number, span);
                run.totals(&tokens, h)?;
                let told = self.told(&run.chunk(&tokens, &(0..0)));
                let before = (Partial::BYTES * number * self.problem().tokens) as u64;
                let told = Told { partials: out + before, first: span.start as i32, ..told };
                self.launch("partials", tokens.len().div_ceil(128), 128, &told)?;
            }
        }
        Ok(())
    }

    /// Outputs of all tokens, and what they pull with, from the totals.
    fn finish(&self) -> Result<(), Error> {
        let LinearCrossEntropy { tokens, vocab, .. } = *self.problem();
        self.all.launch("tokens", 1, 1024, &self.all.call)?;
        // The totals are one node of the tree, and lie side by side.
        let call = Call {
            nodes: self.job.at(self.own.totals),
            leaf: vocab as i32,
            rows: tokens as i32,
            ..self.all.chunk(&(0..tokens), &(0..0))
        };
        let told = Told { partials: self.job.address("totals"), ..self.told(&call) };
        self.launch("recall", tokens.div_ceil(128), 128, &told)?;
        self.all.launch("finish", tokens.div_ceil(128), 128, &call)
    }

    fn backward(&self) -> Result<(), Error> {
        let Prepared { asked, plan, .. } = &self.own.prepared;
        if self.own.spans.is_empty() {
            let dh = self.own.prepared.parts.part("dh").filter(|part| part.wanted);
            return dh.map_or(Ok(()), |part| {
                let bytes = part.bytes * part.operand.len();
                self.job.queue.fill(self.job.address("dh"), bytes, 0)
            });
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
        if plan.apart && asked.gradients() {
            for (number, span) in self.own.spans.iter().enumerate() {
                self.place(&(0..self.problem().tokens), span)?;
                self.of(number, span).by_classes()?;
            }
        }
        Ok(())
    }

    /// Adds dh of a node to that of the nodes before it.
    fn add(&self, call: &Call) -> Result<(), Error> {
        let told = Told { sums: self.all.call.dh, part: call.dh, ..self.told(call) };
        let blocks = call.count as usize * (call.dim as usize).div_ceil(1024);
        self.launch("add", blocks, 256, &told)
    }
}

impl ready::Ready for ShardReady<'_> {
    fn parts(&self) -> &Parts {
        &self.prepared.parts
    }

    fn table_bytes(&self) -> usize {
        0
    }

    fn scratch_bytes(&self) -> usize {
        self.prepared.scratch_bytes
    }

    fn upload(&self, _: &Queue<'_>, _: u64) -> Result<(), Error> {
        Ok(())
    }

    fn compute(&self, job: &Job<'_, Parts>) -> Result<(), Error> {
        let job = &job.of(&self.prepared);
        clear(job)?;
        let walk = Walk { own: self, job, all: Run::new(job) };
        match self.step {
            Step::Forward => walk.forward(),
            Step::Output => {
                walk.finish()?;
                walk.all.launch("loss", 1, 256, &walk.all.call)
            }
            Step::Backward { .. } => walk.backward(),
        }
    }

    fn into_owned(self: Box<Self>) -> Box<dyn ready::Ready> {
        let problem = Cow::Owned(self.prepared.problem.into_owned());
        Box::new(ShardReady { prepared: Prepared { problem, ..self.prepared }, ..*self })
    }
}
