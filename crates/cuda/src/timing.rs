//! How long a pass takes on a device, and what the device could do at most.

use crate::device::check_clock;
use crate::host::Placed;
use crate::options::Options;
use crate::queue::Queue;
use crate::run::{has_kernels, offers};
use crate::workspace::Workspace;
use cudarc::driver::sys;
use cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use etalon_problem::{Dtype, Error, Operand, Pass, Problem, Role, Stored, Table, View, Views};
use std::time::{Duration, Instant};

/// The times of a pass on operands that lie on the device.
#[derive(Debug, Clone, Default)]
pub struct Timing {
    /// Of each round the time of a pass on the device, by its own clock, in ns: that of some passes in a row,
    /// divided by their number.
    pub device_ns: Vec<f64>,
    /// Of each round the time that the host took to enqueue a pass, in ns.
    pub enqueue_ns: Vec<f64>,
    /// The scratch memory of a call, in bytes.
    pub scratch_bytes: usize,
}

/// Rounds that tell something; the first, after those that warm the device up, counts.
const ROUNDS: usize = 3;

/// Passes are enqueued in a row until they take so many ns: the clock's steps and the gap between rounds are below
/// a hundredth of that.
const ROUND: f64 = 2e6;

/// The most passes in a row: what a stream holds before the host must wait.
const ROW: usize = 256;

/// The most rounds that are kept.
const MOST: usize = 1 << 16;

/// Times a pass that writes all its results, with inputs that are copied to the device once: in rounds for at least
/// `duration`, three at least. Fails as [`run_in`](crate::run_in) does.
pub fn time(
    workspace: &Workspace,
    problem: &Problem,
    pass: Pass,
    inputs: &Views<'_>,
    options: &Options,
    duration: Duration,
) -> Result<Timing, Error> {
    has_kernels(problem.algorithm(), pass)?;
    let table = problem.checked_table(pass)?;
    let storage = check(&table, inputs, options.recompute)?;
    storage.refuse_f64()?;
    offers(options, problem.algorithm(), pass, storage)?;
    let held = workspace.device(options.device)?;
    let call = (pass, storage);
    let placed = Placed::new(&held, problem, call, &table, inputs, None, options)?;
    let mut timing = Timing { scratch_bytes: placed.scratch_bytes(), ..Timing::default() };
    // What is compiled and loaded on the way counts nothing, nor does the first round.
    let (first, _) = round(&placed, 1)?;
    let passes = ((ROUND / first.max(1.0)).ceil() as usize).clamp(1, ROW);
    round(&placed, passes)?;
    let begin = Instant::now();
    let more = |rounds| rounds < ROUNDS || rounds < MOST && begin.elapsed() < duration;
    while more(timing.device_ns.len()) {
        let (device, host) = round(&placed, passes)?;
        timing.device_ns.push(device);
        timing.enqueue_ns.push(host);
    }
    placed.finish();
    Ok(timing)
}

/// What the pass writes.
fn results(table: &Table) -> impl Iterator<Item = &Operand> + Clone {
    table.operands.iter().filter(|x| x.role == Role::Output)
}

/// As [`Table::check_call`], with places for all results.
fn check(table: &Table, inputs: &Views<'_>, recompute: bool) -> Result<Dtype, Error> {
    let given = inputs.iter().map(|(name, x)| (name, x.shape(), x.stored()));
    let first = table.operands.first().and_then(|x| inputs.get(x.name)).map(View::stored);
    let storage = match first {
        Some(Stored::Float(dtype)) => dtype,
        _ => Dtype::F32,
    };
    let places = results(table).map(|x| (x.name, &x.shape[..], Stored::of(x.precision, storage)));
    table.check_tensors(given, places, recompute)
}

/// The time of a pass on the device and that of the host to enqueue it, in ns, of some in a row.
fn round(placed: &Placed<'_>, passes: usize) -> Result<(f64, f64), Error> {
    let mut host = 0.0;
    let device = device_ns(&placed.queue(), || {
        let start = Instant::now();
        (0..passes).try_for_each(|_| placed.enqueue())?;
        host = start.elapsed().as_nanos() as f64;
        Ok(())
    })?;
    Ok((device / passes as f64, host / passes as f64))
}

/// The time that the device takes for what is enqueued, in ns. Waits for it.
pub(crate) fn device_ns(
    queue: &Queue<'_>,
    enqueue: impl FnOnce() -> Result<(), Error>,
) -> Result<f64, Error> {
    check_clock()?;
    let failed = |error| queue.device.failed("the device's clock", error);
    let event = || queue.stream.record_event(Some(CU_EVENT_DEFAULT)).map_err(failed);
    let begin = event()?;
    enqueue()?;
    let end = event()?;
    queue.finish()?;
    let mut milliseconds = 0.0;
    // SAFETY: both events have been recorded, and the call writes one number. The driver has the function.
    let elapsed = unsafe {
        sys::cuEventElapsedTime_v2(&mut milliseconds, begin.cu_event(), end.cu_event()).result()
    };
    elapsed.map_err(failed)?;
    Ok(f64::from(milliseconds) * 1e6)
}
