//! Times of a pass on a device.

use crate::call::PassCall;
use crate::device::check_clock;
use crate::device_pass::DevicePass;
use crate::device_tensor::{DeviceTensor, DeviceTensors};
use crate::host::Placed;
use crate::levels;
use crate::options::Options;
use crate::plan::draft;
use crate::queue::Queue;
use crate::workspace::Workspace;
use cudarc::driver::sys::{self, CUevent_flags::CU_EVENT_DEFAULT};
use cudarc::driver::{CudaSlice, DevicePtr};
use etalon_problem::{Dtype, Pass, Problem, Result, Role, Stored, Table, View, Views};
use std::time::{Duration, Instant};

/// The times of a pass on operands that lie on the device.
#[derive(Debug, Clone, Default)]
pub struct Timing {
    /// Of each round the time of a pass on the device, by its own clock, in ns: the mean of some in a row.
    pub device_ns: Vec<f64>,
    /// Of some rounds the host's time for a call of [`DevicePass::enqueue`], in ns, while the device was busy.
    pub enqueue_ns: Vec<f64>,
    /// The same for [`RecordedPass::enqueue`](crate::RecordedPass::enqueue).
    pub recorded_ns: Vec<f64>,
    /// The kernels that such a call launches.
    pub launches: usize,
    /// The fills that it enqueues beside them.
    pub fills: usize,
    /// The scratch memory of a call, in bytes.
    pub scratch_bytes: usize,
}

/// The fewest rounds, after those that warm the device up.
const ROUNDS: usize = 3;

/// The ns of passes in a row: the clock's steps and the gap between rounds are below a hundredth of that.
const ROUND: f64 = 2e6;

/// The most passes in a row: what a stream holds before the host must wait.
const ROW: usize = 256;

const MOST: usize = 1 << 16;

/// Times a pass that writes all its results, of inputs that are copied to the device once: in at least three rounds,
/// for at least `duration`. Fails as [`run_in`](crate::run_in) does.
pub fn time(
    workspace: &Workspace,
    problem: &Problem,
    pass: Pass,
    inputs: &Views<'_>,
    options: &Options,
    duration: Duration,
) -> Result<Timing> {
    let table = levels::table_of(problem, pass)?;
    let storage = check(&table, inputs, options.recompute)?;
    levels::check(options, problem.algorithm(), pass, storage)?;
    let draft = |call: &PassCall<'_, '_>| Ok((draft(problem, call)?, ()));
    let (placed, ()) = Placed::new(workspace, (pass, storage, &table), (inputs, None), options, draft)?;
    let mut timing = Timing { scratch_bytes: placed.pass.scratch_bytes, ..Timing::default() };
    // Neither compiling and loading counts nor the first round.
    let first = round(&placed, 1)?;
    let passes = ((ROUND / first.max(1.0)).ceil() as usize).clamp(1, ROW);
    round(&placed, passes)?;
    let begin = Instant::now();
    let more = |rounds| rounds < ROUNDS || rounds < MOST && begin.elapsed() < duration;
    while more(timing.device_ns.len()) {
        timing.device_ns.push(round(&placed, passes)?);
    }
    DeviceCall::new(workspace, problem, pass, &placed, options)?.time(first, &mut timing)?;
    placed.finish();
    Ok(timing)
}

/// A pass over placed operands, through the door for operands of a device.
struct DeviceCall<'a> {
    placed: &'a Placed,
    pass: DevicePass,
    inputs: DeviceTensors<'static>,
    outputs: DeviceTensors<'static>,
    scratch: u64,
    /// Its scratch memory, where it needs more than the other door.
    _own: Option<CudaSlice<u8>>,
}

/// The most rounds of calls, and the most ns of the device meanwhile.
const CALLS: usize = 64;
const BUSY: f64 = 100e6;

/// The most commands of a round: a stream holds more before the host must wait.
const COMMANDS: usize = 512;

impl<'a> DeviceCall<'a> {
    fn new(
        workspace: &Workspace,
        problem: &Problem,
        pass: Pass,
        placed: &'a Placed,
        options: &Options,
    ) -> Result<Self> {
        let (mut inputs, mut outputs) = (DeviceTensors::new(), DeviceTensors::new());
        for (part, address) in placed.parts() {
            let stored = Stored::of(part.operand.precision, placed.pass.parts.storage);
            let tensor = DeviceTensor::dense(address, &part.operand.shape, stored);
            let name = part.operand.name;
            // A step's state lies in the place of the new one.
            if part.given && part.operand.role != Role::Output {
                inputs = inputs.with(name, tensor.clone());
            }
            if part.wanted {
                outputs = outputs.with(name, tensor);
            }
        }
        let pass = DevicePass::new(workspace, problem, pass, &inputs, &outputs, options)?;
        let (scratch, bytes) = (placed.scratch, placed.pass.scratch_bytes);
        let own = (pass.scratch_bytes() > bytes).then(|| placed.memory(pass.scratch_bytes())).transpose()?;
        let stream = placed.queue()?.stream;
        let scratch = own.as_ref().map_or(scratch, |own| own.device_ptr(stream).0);
        Ok(DeviceCall { placed, pass, inputs, outputs, scratch, _own: own })
    }

    fn enqueue(&self, queue: &Queue<'_>) -> Result<()> {
        let stream = queue.stream.cu_stream();
        // SAFETY: the stream and the memory are those of the slot, of the context of the device, and stay until
        // the stream has been waited for.
        unsafe { self.pass.enqueue(stream, &self.inputs, &self.outputs, self.scratch) }
    }

    fn time(&self, pass_ns: f64, timing: &mut Timing) -> Result<()> {
        let queue = self.placed.queue()?;
        self.enqueue(&queue)?;
        queue.finish()?;
        [timing.launches, timing.fills] = self.pass.pass.counts();
        let commands = timing.launches + timing.fills;
        timing.enqueue_ns = calls_ns(&queue, (pass_ns, commands), || self.enqueue(&queue))?;
        // SAFETY: as above.
        let mut recorded = unsafe { self.pass.record(&self.inputs, &self.outputs, self.scratch) }?;
        let stream = queue.stream.cu_stream();
        // SAFETY: as above.
        timing.recorded_ns = calls_ns(&queue, (pass_ns, commands), || unsafe { recorded.enqueue(stream) })?;
        Ok(())
    }
}

/// The host's time for a call, in ns, in some rounds; a call enqueues a pass of about so many ns and so many commands.
fn calls_ns(
    queue: &Queue<'_>,
    (pass_ns, commands): (f64, usize),
    mut call: impl FnMut() -> Result<()>,
) -> Result<Vec<f64>> {
    let calls = (COMMANDS / commands.max(1)).clamp(2, 16) - 1;
    let rounds = BUSY / (pass_ns.max(1.0) * (calls + 1) as f64);
    let mut round = || {
        call()?; // the device is busy
        let start = Instant::now();
        (0..calls).try_for_each(|_| call())?;
        let ns = start.elapsed().as_nanos() as f64 / calls as f64;
        queue.finish()?;
        Ok(ns)
    };
    (0..(rounds as usize).clamp(ROUNDS, CALLS)).map(|_| round()).collect()
}

/// As [`Table::check_call`], with places for all results.
fn check(table: &Table, inputs: &Views<'_>, recompute: bool) -> Result<Dtype> {
    let given = inputs.iter().map(|(name, x)| (name, x.shape(), x.stored()));
    let storage = match table.operands.first().and_then(|x| inputs.get(x.name)).map(View::stored) {
        Some(Stored::Float(dtype)) => dtype,
        _ => Dtype::F32,
    };
    let results = table.operands.iter().filter(|x| x.role == Role::Output);
    let places = results.map(|x| (x.name, &x.shape[..], Stored::of(x.precision, storage)));
    table.check_tensors(given, places, recompute)
}

/// The device's time for a pass, in ns, of some in a row.
fn round(placed: &Placed, passes: usize) -> Result<f64> {
    let enqueue = || (0..passes).try_for_each(|_| placed.enqueue());
    Ok(device_ns(&placed.queue()?, enqueue)? / passes as f64)
}

/// The device's time for what is enqueued, in ns. Waits for it.
pub(crate) fn device_ns(queue: &Queue<'_>, enqueue: impl FnOnce() -> Result<()>) -> Result<f64> {
    check_clock()?;
    const WHAT: &str = "the device's clock";
    let event = || queue.device.check(WHAT, queue.stream.record_event(Some(CU_EVENT_DEFAULT)));
    let begin = event()?;
    enqueue()?;
    let end = event()?;
    queue.finish()?;
    let mut milliseconds = 0.0;
    // SAFETY: both events have been recorded, and the call writes one number. The driver has the function.
    let elapsed = unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, begin.cu_event(), end.cu_event()).result() };
    queue.device.check(WHAT, elapsed)?;
    Ok(f64::from(milliseconds) * 1e6)
}
