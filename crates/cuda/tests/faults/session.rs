//! A session of a program with the tier, from its first call to its last.

use crate::enqueue::{self, SCRATCH, Tensors};
use crate::fake::Fake;
use etalon_cuda::kernels::{Unit, launch_ns, peak_gflops};
use etalon_cuda::linear_cross_entropy::shard::{self, Dh, Shard};
use etalon_cuda::linear_cross_entropy::{Filter, filtered_backward};
use etalon_cuda::{
    DevicePass, DeviceTensor, DeviceTensors, Level, Options, Precision, Workspace, lazy_attention, run_in, time,
};
use etalon_problem::{
    Algorithm, Attention, Blocking, Dtype, Error, Extents, LazyAttention, LinearCrossEntropy, Operand, Pass, Problem,
    Role, Sequences, Stored, Views, ViewsMut,
};
use half::bf16;
use ndarray::{ArrayD, IxDyn};
use std::time::Duration;

pub fn problem() -> Problem {
    let extents = Extents { batch: 2, query_heads: 2, key_heads: 1, queries: 3, keys: 4, dim: 8 };
    let mut attention = Attention::new(extents);
    // Rows of no sequence: results are filled before kernels run.
    attention.scores.sequences = Sequences::Lengths { query: vec![3, 1], key: vec![4, 2] };
    attention.into()
}

/// Operands of the host.
enum Host {
    Wide(&'static str, ArrayD<f32>),
    Narrow(&'static str, ArrayD<bf16>),
    Whole(&'static str, ArrayD<i64>),
}

fn host(operand: &Operand, storage: Dtype) -> Host {
    let shape = IxDyn(&operand.shape);
    match Stored::of(operand.precision, storage) {
        Stored::Float(Dtype::Bf16) => Host::Narrow(operand.name, ArrayD::zeros(shape)),
        Stored::Integer => Host::Whole(operand.name, ArrayD::zeros(shape)),
        _ => Host::Wide(operand.name, ArrayD::zeros(shape)),
    }
}

fn views(given: &[Host]) -> Views<'_> {
    given.iter().fold(Views::new(), |all, x| match x {
        Host::Wide(name, x) => all.with(name, x),
        Host::Narrow(name, x) => all.with(name, x),
        Host::Whole(name, x) => all.with(name, x),
    })
}

/// A pass of attention over operands of the host, all of them.
pub fn host_pass(workspace: &Workspace, pass: Pass, storage: Dtype, options: &Options) -> Result<(), Error> {
    of_host(&problem(), pass, storage, |inputs, outputs| run_in(workspace, &problem(), pass, inputs, outputs, options))
}

/// Every pass with operands of the host.
fn of_host(
    problem: &Problem,
    pass: Pass,
    storage: Dtype,
    run: impl FnOnce(&Views<'_>, &mut ViewsMut<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    let operands = problem.operands(pass);
    let is_result = |x: &&Operand| x.role == Role::Output;
    let operands = operands.iter().filter(|x| x.role != Role::OptionalOutput);
    let (results, given): (Vec<_>, Vec<_>) = operands.partition(is_result);
    let given: Vec<Host> = given.into_iter().map(|x| host(x, storage)).collect();
    let mut results: Vec<Host> = results.into_iter().map(|x| host(x, storage)).collect();
    let inputs = views(&given);
    let mut outputs = results.iter_mut().fold(ViewsMut::new(), |all, x| match x {
        Host::Wide(name, x) => all.with(name, x),
        Host::Narrow(name, x) => all.with(name, x),
        Host::Whole(name, x) => all.with(name, x),
    });
    run(&inputs, &mut outputs)
}

/// Functions of the portable level alone: a filtered backward pass, and statistics of lazy attention.
fn tools(workspace: &Workspace, options: &Options) -> Result<(), Error> {
    let entropy = LinearCrossEntropy::new(3, 8, 20);
    of_host(&entropy.clone().into(), Pass::Backward, Dtype::F32, |inputs, outputs| {
        let filter = Filter::Below { eps: 0.5 };
        filtered_backward(workspace, &entropy, inputs, outputs, filter, options).map(|_| ())
    })?;
    let extents = Extents { batch: 1, query_heads: 2, key_heads: 1, queries: 3, keys: 4, dim: 8 };
    let lazy = LazyAttention::new(extents);
    of_host(&lazy.clone().into(), Pass::Forward, Dtype::F32, |inputs, _| {
        lazy_attention::stats(workspace, &lazy, inputs, Blocking::new(2, 2), options).map(|_| ())
    })
}

/// Passes over operands of a device, of several algorithms.
pub struct OnDevice {
    calls: Vec<Tensors>,
    /// Operands of a shard's passes, and their scratch memory.
    shards: [u64; 2],
}

/// As much as the operands of a shard's passes.
const SHARDS: usize = 32 << 10;

impl OnDevice {
    /// On the first device; `elsewhere`: the operand that lies on another device.
    pub fn new(fake: &Fake, elsewhere: Option<&str>) -> OnDevice {
        let flash = Options { precision: Precision::Flash, ..Options::default() };
        let linear = enqueue::problem(Algorithm::LinearAttention, 3);
        let calls = [
            (problem(), Pass::Forward),
            // It has targets, which are integers.
            (LinearCrossEntropy::new(3, 8, 20).into(), Pass::Backward),
            (linear, Pass::Backward),
            (enqueue::problem(Algorithm::LazyAttention, 3), Pass::Backward),
        ];
        let tensors = |(problem, pass)| Tensors::new(fake, problem, (pass, Dtype::Bf16), flash, elsewhere);
        OnDevice {
            calls: calls.into_iter().map(tensors).collect(),
            shards: [SHARDS, SCRATCH].map(|bytes| fake.memory(0, bytes)),
        }
    }

    pub fn prepare(&self, workspace: &Workspace) -> Result<Vec<DevicePass>, Error> {
        self.calls.iter().map(|x| x.prepare(workspace)).collect()
    }

    pub fn enqueue(&self, passes: &[DevicePass]) -> Result<(), Error> {
        passes.iter().zip(&self.calls).try_for_each(|(pass, x)| x.enqueue(pass))?;
        self.calls[0].record(&passes[0])
    }
}

/// Measurements of a bench.
fn timed(workspace: &Workspace, options: &Options) -> Result<(), Error> {
    let problem = problem();
    let operands = problem.operands(Pass::Forward);
    let given = operands.iter().filter(|x| x.role == Role::Input).map(|x| host(x, Dtype::F32));
    let given: Vec<Host> = given.collect();
    let inputs = views(&given);
    let timing = time(workspace, &problem, Pass::Forward, &inputs, options, Duration::ZERO)?;
    assert_eq!(timing.device_ns.len(), 3);
    assert!(timing.enqueue_ns.len() >= 3 && timing.recorded_ns.len() >= 3);
    // The results of rows that belong to no sequence are filled beforehand.
    assert_eq!((timing.launches, timing.fills), (1, 2));
    let peak = peak_gflops(workspace, 0, Unit::Ffma, Dtype::F32)?;
    assert!(peak > 0.0);
    Ok(())
}

/// Times every pass there is, on every level, and a launch without work.
pub fn each_pass_is_timed() {
    let workspace = Workspace::new();
    assert!(launch_ns(&workspace, 0, Unit::Ffma, Dtype::F32).unwrap() > 0.0);
    enqueue::each_pass(|name, algorithm, (pass, storage), options| {
        let problem = enqueue::problem(algorithm, 100);
        let operands = problem.operands(pass);
        // A step finds its state in the place of the new one.
        let needed = |x: &&Operand| (x.role.is_given() || x.role == Role::Saved) && x.becomes.is_none();
        let given: Vec<Host> = operands.iter().filter(needed).map(|x| host(x, storage)).collect();
        let inputs = views(&given);
        let timing = time(&workspace, &problem, pass, &inputs, &options, Duration::ZERO);
        let timing = timing.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(timing.launches > 0 && timing.enqueue_ns.len() >= 3, "{name}");
    });
}

/// A shard's passes over operands of the device, which lie at an address that has room for them.
fn shards(workspace: &Workspace, [at, scratch]: [u64; 2], options: &Options) -> Result<(), Error> {
    let problem = LinearCrossEntropy::new(3, 4, 600);
    let (shard, all) = (Shard::new(&problem, 0..512)?, [0..512, 512..600]);
    let mut end = at;
    let mut tensor = |shape: &[usize], stored: Stored| {
        let begin = end;
        end += (8 * shape.iter().product::<usize>()).next_multiple_of(256) as u64;
        DeviceTensor::dense(begin, shape, stored)
    };
    let f32 = Stored::from(Dtype::F32);
    let inputs = DeviceTensors::new()
        .with("h", tensor(&[3, 4], f32))
        .with("w", tensor(&[512, 4], f32))
        .with("targets", tensor(&[3], Stored::Integer));
    let mut one = |name: &'static str, shape: &[usize]| DeviceTensors::new().with(name, tensor(shape, f32));
    let (partials, gathered) = (one("partials", &[1, 3, 10]), one("partials", &[2, 3, 10]));
    let (totals, loss) = (tensor(&[3, 10], f32), tensor(&[], f32));
    let (dh, parts, sum) = (tensor(&[1, 3, 4], f32), tensor(&[2, 3, 4], f32), tensor(&[3, 4], f32));
    let none = DeviceTensors::new;
    let (to_totals, to_loss) = (none().with("totals", totals.clone()), none().with("loss", loss.clone()));
    let (known, to_dh) = (inputs.clone().with("totals", totals), none().with("dh", dh));
    let given = known.clone().with("dloss", loss);
    let (from, to_sum) = (none().with("parts", parts), none().with("dh", sum));
    let kind = Dh::Sum;
    let passes = [
        (shard::prepare_forward(workspace, &shard, &inputs, &partials, options)?, &inputs, &partials),
        (shard::prepare_combine(workspace, &problem, &all, &gathered, &to_totals, options)?, &gathered, &to_totals),
        (shard::prepare_output(workspace, &shard, &known, &to_loss, options)?, &known, &to_loss),
        (shard::prepare_backward(workspace, &shard, &given, &to_dh, kind, options)?, &given, &to_dh),
        (shard::prepare_combine_dh(workspace, &problem, (&all, kind), &from, &to_sum, options)?, &from, &to_sum),
    ];
    passes.iter().try_for_each(|(pass, inputs, outputs)| {
        assert!(pass.scratch_bytes() <= SCRATCH);
        // SAFETY: the fake driver's default stream, and memory of it that stays.
        unsafe { pass.enqueue(std::ptr::null_mut(), inputs, outputs, scratch) }
    })
}

/// Every kind of call: what a device is, passes of every level over operands of the host, a pass over
/// operands of the device.
pub fn session(workspace: &Workspace, on_device: &OnDevice) -> Result<(), Error> {
    workspace.check(0)?;
    workspace.describe(0)?;
    let strict = Options { level: Level::Portable, ..Options::default() };
    let flash = Options { precision: Precision::Flash, ..strict };
    host_pass(workspace, Pass::Forward, Dtype::F32, &strict)?;
    host_pass(workspace, Pass::DoubleBackward, Dtype::Bf16, &strict)?;
    host_pass(workspace, Pass::Backward, Dtype::Bf16, &Options { level: Level::Sm80, ..flash })?;
    host_pass(workspace, Pass::Backward, Dtype::Bf16, &Options { level: Level::Sm90a, ..flash })?;
    let small = Options { memory_budget: 0, ..strict };
    shards(workspace, on_device.shards, &small)?;
    tools(workspace, &strict)?;
    timed(workspace, &strict)?;
    let pass = on_device.prepare(workspace)?;
    on_device.enqueue(&pass)
}
