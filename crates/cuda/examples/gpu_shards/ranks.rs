//! The passes of one device over all classes, and those of a rank over its shard.

use crate::exchange::{Exchange, Outcome, Plan};
use crate::memory::Memory;
use crate::results::Results;
use crate::tensors::Host;
use etalon_cuda::linear_cross_entropy::shard::{
    Dh, Partial, Shard, prepare_backward, prepare_combine, prepare_combine_dh, prepare_forward, prepare_output,
};
use etalon_cuda::{DevicePass, DeviceTensor, DeviceTensors, Options, Workspace};
use etalon_problem::{Dtype, LinearCrossEntropy, Pass, Stored};
use std::ops::Range;

/// A prepared pass with its operands.
struct Step {
    pass: DevicePass,
    inputs: DeviceTensors<'static>,
    outputs: DeviceTensors<'static>,
    scratch: u64,
}

impl Step {
    fn new(
        memory: &Memory,
        (inputs, outputs): (DeviceTensors<'static>, DeviceTensors<'static>),
        prepare: impl FnOnce(&DeviceTensors<'_>, &DeviceTensors<'_>) -> Result<DevicePass, etalon_problem::Error>,
    ) -> Outcome<Step> {
        let pass = prepare(&inputs, &outputs)?;
        let scratch = memory.room(pass.scratch_bytes())?;
        Ok(Step { pass, inputs, outputs, scratch })
    }

    fn enqueue(&self, memory: &Memory) -> Outcome<()> {
        let stream = memory.stream.cu_stream();
        // SAFETY: the stream is of the primary context; tensors and scratch memory are those of `memory`, which waits
        // for the stream before it gives them back, and no two of them overlap.
        Ok(unsafe { self.pass.enqueue(stream, &self.inputs, &self.outputs, self.scratch) }?)
    }
}

/// The repeated computation of a device.
pub trait Work {
    /// Enqueues the forward pass, and with `gradients` the backward pass. `apart`: with what the ranks have sent to
    /// each other before.
    fn enqueue(&self, gradients: bool, apart: bool) -> Outcome<()>;
    fn memory(&self) -> &Memory;
    /// Results of its last run: the loss, lse, dh and dw of its classes.
    fn results(&self) -> Outcome<Results>;
}

/// Tensors on a device that are read back.
type Places = Vec<(&'static str, u64, usize)>;

fn read(memory: &Memory, places: &Places) -> Outcome<Results> {
    places.iter().map(|&(name, at, bytes)| Ok((name, memory.read(at, bytes)?))).collect()
}

/// One device with all classes.
pub struct Alone {
    memory: Memory,
    forward: Step,
    both: Step,
    places: Places,
}

/// h, w of some classes, and targets on a device.
fn inputs(memory: &Memory, host: &Host, classes: &Range<usize>) -> Outcome<DeviceTensors<'static>> {
    let LinearCrossEntropy { tokens, dim, .. } = host.problem;
    Ok(DeviceTensors::new()
        .with("h", memory.copy(host.h(), &[tokens, dim], host.storage)?)
        .with("w", memory.copy(host.w(classes), &[classes.len(), dim], host.storage)?)
        .with("targets", memory.copy(&host.targets, &[tokens], Stored::Integer)?))
}

/// A place for a tensor, which is read back.
fn place(
    memory: &Memory,
    places: &mut Places,
    name: &'static str,
    shape: &[usize],
    stored: Dtype,
) -> Outcome<DeviceTensor> {
    let bytes = shape.iter().product::<usize>() * stored.bytes();
    let address = memory.room(bytes)?;
    places.push((name, address, bytes));
    Ok(DeviceTensor::dense(address, shape, stored))
}

impl Alone {
    pub fn new(workspace: &Workspace, memory: Memory, host: &Host, options: &Options) -> Outcome<Alone> {
        let LinearCrossEntropy { tokens, dim, vocab, .. } = host.problem;
        let (mut places, problem) = (Places::new(), host.problem.clone().into());
        let read = inputs(&memory, host, &(0..vocab))?;
        let loss = place(&memory, &mut places, "loss", &[], Dtype::F32)?;
        let lse = place(&memory, &mut places, "lse", &[tokens], Dtype::F32)?;
        let outputs = DeviceTensors::new().with("loss", loss).with("lse", lse);
        let forward = Step::new(&memory, (read.clone(), outputs.clone()), |x, y| {
            DevicePass::new(workspace, &problem, Pass::Forward, x, y, options)
        })?;
        let dh = place(&memory, &mut places, "dh", &[tokens, dim], host.storage)?;
        let dw = place(&memory, &mut places, "dw", &[vocab, dim], host.storage)?;
        let read = read.with("dloss", memory.copy(&[1f32], &[], Dtype::F32)?);
        let both = Step::new(&memory, (read, outputs.with("dh", dh).with("dw", dw)), |x, y| {
            DevicePass::new(workspace, &problem, Pass::ForwardBackward, x, y, options)
        })?;
        Ok(Alone { memory, forward, both, places })
    }
}

impl Work for Alone {
    fn enqueue(&self, gradients: bool, _: bool) -> Outcome<()> {
        (if gradients { &self.both } else { &self.forward }).enqueue(&self.memory)
    }

    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn results(&self) -> Outcome<Results> {
        read(&self.memory, &self.places)
    }
}

/// A device with a shard.
pub struct Rank {
    number: usize,
    exchange: Exchange,
    memory: Memory,
    forward: Step,
    combine: Step,
    output: Step,
    backward: Step,
    combine_dh: Step,
    /// Every rank gets all partials; of the parts of dh those of its tokens; and the rows of dh of all tokens.
    partials: Plan,
    parts: Plan,
    rows: Plan,
    places: Places,
}

/// The tokens whose dh a rank adds up.
fn tokens_of(tokens: usize, ranks: usize) -> Vec<Range<usize>> {
    let border = |rank: usize| tokens * rank / ranks;
    (0..ranks).map(|rank| border(rank)..border(rank + 1)).collect()
}

impl Rank {
    pub fn new(
        workspace: &Workspace,
        memory: Memory,
        host: &Host,
        (number, shards, kind): (usize, &[Range<usize>], Dh),
        exchange: Exchange,
        options: &Options,
    ) -> Outcome<Rank> {
        let (problem, none) = (&host.problem, DeviceTensors::new);
        let LinearCrossEntropy { tokens, dim, .. } = *problem;
        let mut places = Places::new();
        let shard = Shard::new(problem, shards[number].clone())?;
        let counts: Vec<usize> = shards
            .iter()
            .map(|classes| Ok(Shard::new(problem, classes.clone())?.nodes().count()))
            .collect::<Outcome<_>>()?;
        let read = inputs(&memory, host, &shard.classes())?;
        // The partials of all ranks, one behind the other, of which this rank writes its own.
        let node = Partial::BYTES * tokens;
        let blocks = behind(counts.iter().map(|count| count * node));
        let at = memory.room(node * counts.iter().sum::<usize>())?;
        let of =
            |address: u64, count: usize| DeviceTensor::dense(address, &[count, tokens, Partial::BYTES / 4], Dtype::F32);
        let own = of(at + blocks[number].start as u64, counts[number]);
        let forward = Step::new(&memory, (read.clone(), none().with("partials", own)), |x, y| {
            prepare_forward(workspace, &shard, x, y, options)
        })?;
        let sends = vec![vec![blocks[number].clone()]; shards.len()];
        let receives = blocks.into_iter().map(|block| vec![block]).collect();
        let partials = Plan { from: at, sends, to: at, receives };
        let totals = memory.tensor(&[tokens, Partial::BYTES / 4], Dtype::F32)?;
        let all = none().with("partials", of(at, counts.iter().sum()));
        let call = (all, none().with("totals", totals.clone()));
        let combine = Step::new(&memory, call, |x, y| prepare_combine(workspace, problem, shards, x, y, options))?;
        let loss = place(&memory, &mut places, "loss", &[], Dtype::F32)?;
        let lse = place(&memory, &mut places, "lse", &[tokens], Dtype::F32)?;
        let read = read.with("totals", totals);
        let call = (read.clone(), none().with("loss", loss).with("lse", lse));
        let output = Step::new(&memory, call, |x, y| prepare_output(workspace, &shard, x, y, options))?;
        // Contributions of this rank's classes to dh of all tokens, and of all ranks' classes to dh of its tokens.
        let matrices = if kind == Dh::Sum { vec![1; shards.len()] } else { counts };
        let (row, owners) = (4 * dim, tokens_of(tokens, shards.len()));
        let from = memory.room(matrices[number] * tokens * row)?;
        let own = DeviceTensor::dense(from, &[matrices[number], tokens, dim], Dtype::F32);
        let dw = place(&memory, &mut places, "dw", &[shard.classes().len(), dim], host.storage)?;
        let read = read.with("dloss", memory.copy(&[1f32], &[], Dtype::F32)?);
        let call = (read, none().with("dh", own).with("dw", dw));
        let backward = Step::new(&memory, call, |x, y| prepare_backward(workspace, &shard, x, y, kind, options))?;
        let rows =
            |matrix: usize, of: &Range<usize>| (matrix * tokens + of.start) * row..(matrix * tokens + of.end) * row;
        let sends = owners.iter().map(|of| (0..matrices[number]).map(|x| rows(x, of)).collect());
        let own = owners[number].clone();
        let mine = behind(vec![own.len() * row; matrices.iter().sum()].into_iter());
        let firsts = behind(matrices.iter().copied());
        let receives = firsts.iter().map(|of| mine[of.clone()].to_vec()).collect();
        let to = memory.room(mine.len() * own.len() * row)?;
        let parts = Plan { from, sends: sends.collect(), to, receives };
        // Each rank adds its tokens up and rounds them, and sends them to all.
        let row = dim * host.storage.bytes();
        let dh = memory.room(tokens * row)?;
        places.push(("dh", dh, tokens * row));
        let block = |of: &Range<usize>| of.start * row..of.end * row;
        let sum = DeviceTensor::dense(dh + block(&own).start as u64, &[own.len(), dim], host.storage);
        let all = DeviceTensor::dense(to, &[mine.len(), own.len(), dim], Dtype::F32);
        let call = (none().with("parts", all), none().with("dh", sum));
        let combine_dh =
            Step::new(&memory, call, |x, y| prepare_combine_dh(workspace, problem, (shards, kind), x, y, options))?;
        let sends = vec![vec![block(&own)]; shards.len()];
        let receives = owners.iter().map(|of| vec![block(of)]).collect();
        let rows = Plan { from: dh, sends, to: dh, receives };
        Ok(Rank {
            number,
            exchange,
            memory,
            forward,
            combine,
            output,
            backward,
            combine_dh,
            partials,
            parts,
            rows,
            places,
        })
    }

    fn swap(&self, plan: &Plan) -> Outcome<()> {
        self.exchange.swap(self.number, &self.memory.stream, plan)
    }
}

/// Ranges of these lengths, one behind the other.
fn behind(lengths: impl Iterator<Item = usize>) -> Vec<Range<usize>> {
    let mut end = 0;
    let next = |length| {
        let begin = end;
        end += length;
        begin..end
    };
    lengths.map(next).collect()
}

impl Work for Rank {
    fn enqueue(&self, gradients: bool, apart: bool) -> Outcome<()> {
        let swap = |plan| if apart { Ok(()) } else { self.swap(plan) };
        self.forward.enqueue(&self.memory)?;
        swap(&self.partials)?;
        self.combine.enqueue(&self.memory)?;
        self.output.enqueue(&self.memory)?;
        if gradients {
            self.backward.enqueue(&self.memory)?;
            swap(&self.parts)?;
            self.combine_dh.enqueue(&self.memory)?;
            swap(&self.rows)?;
        }
        Ok(())
    }

    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn results(&self) -> Outcome<Results> {
        read(&self.memory, &self.places)
    }
}
