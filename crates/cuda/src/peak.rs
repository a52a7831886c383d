//! Peak of the arithmetic of a device: `kernels/peak.cu`.

use crate::args::{Arguments, Declaration, Ptr, declarations, kernel_args};
use crate::device_id::DeviceId;
use crate::family::Unit;
use crate::options::{Level, Options, Precision};
use crate::queue::{Queue, device_memory};
use crate::timing::device_ns;
use crate::variant::Variant;
use crate::workspace::Workspace;
use cudarc::driver::{CudaFunction, DevicePtr};
use etalon_problem::{Dtype, Error, Result};
use std::time::Instant;

impl Unit {
    /// The fastest that passes with these options may use in a storage type. Fails where there is no such device.
    pub fn of(workspace: &Workspace, options: &Options, storage: Dtype) -> Result<Unit> {
        let state = workspace.device(options.device)?;
        let narrow = matches!(storage, Dtype::Bf16 | Dtype::F16);
        Ok(match (options.precision, options.level) {
            (Precision::Strict, _) | (_, Level::Portable) => Unit::Ffma,
            (precision, _) if !narrow && precision.narrows_f32() => Unit::Mma,
            (precision, _) if !narrow || precision != Precision::Flash => Unit::Ffma,
            (_, Level::Auto | Level::Sm90a | Level::Sm90aSegments) if state.device.target.is_hopper() => Unit::Wgmma,
            _ => Unit::Mma,
        })
    }
}

const THREADS: u32 = 256;

kernel_args! {
    struct PeakArgs as "Peak" {
        /// A number for each block: written where a sum is one that never occurs, so that sums are computed.
        sink: Ptr<f32>,
        rounds: i32,
    }
}

pub(crate) const ARGUMENTS: &[Declaration] = declarations![PeakArgs];

/// Times of which the shortest counts.
const TIMES: usize = 3;

/// The least ns of a time: launching is no part of it.
const ENOUGH: f64 = 2e6;

/// Rounds, of which the median counts, and launches without work in each.
const LAUNCHES: [usize; 2] = [33, 100];

/// Products of a unit on a device, and where they leave a number.
struct Products<'a> {
    kernel: CudaFunction,
    queue: Queue<'a>,
    blocks: usize,
    sink: u64,
}

impl Products<'_> {
    fn enqueue(&self, blocks: usize, rounds: i32) -> Result<()> {
        let arguments = Arguments::of(&[PeakArgs { sink: self.sink.into(), rounds }]);
        self.queue.launch(&self.kernel, blocks as u32, (THREADS, 0), &arguments.bytes)
    }

    /// The time of so many rounds, in ns.
    fn time(&self, rounds: i32) -> Result<f64> {
        device_ns(&self.queue, || self.enqueue(self.blocks, rounds))
    }

    /// Rounds that take [`ENOUGH`].
    fn enough(&self) -> Result<i32> {
        let mut rounds = 1 << 10;
        while self.time(rounds)? < ENOUGH && rounds < 1 << 24 {
            rounds *= 2;
        }
        Ok(rounds)
    }
}

/// Fails where the device does not have the unit.
fn with_products<T>(
    workspace: &Workspace,
    device: DeviceId,
    (unit, storage): (Unit, Dtype),
    body: impl FnOnce(&Products<'_>) -> Result<T>,
) -> Result<T> {
    let state = workspace.device(device)?;
    let device = &state.device;
    if unit == Unit::Wgmma && !device.target.is_hopper() {
        return Err(Error::unsupported("wgmma", "the device is not of compute capability 9.0"));
    }
    let kernel = device.function(&Variant::peak(unit, storage), "peak")?;
    let slot = state.slot()?;
    let blocks = unit.blocks() * device.target.multiprocessors;
    let memory = device_memory(device, &slot.stream, 4 * blocks)?;
    let sink = memory.device_ptr(&slot.stream).0;
    let queue = slot.queue(device)?;
    let result = body(&Products { kernel, queue, blocks, sink })?;
    drop(memory);
    state.give_back(slot);
    Ok(result)
}

/// GFLOP/s of a unit on numbers of a storage type, of tensor cores on bf16 where that is f32, measured anew in some
/// milliseconds; a device that is limited by its power does less over seconds. Fails where the device does not have
/// the unit.
pub fn peak_gflops(workspace: &Workspace, device: impl Into<DeviceId>, unit: Unit, storage: Dtype) -> Result<f64> {
    with_products(workspace, device.into(), (unit, storage), |products| {
        let rounds = products.enough()?;
        let best = (0..TIMES).try_fold(f64::INFINITY, |best, _| Ok::<f64, Error>(best.min(products.time(rounds)?)))?;
        let flops = unit.flops() * f64::from(THREADS) * products.blocks as f64 * f64::from(rounds);
        Ok(flops / best)
    })
}

/// The host's time to enqueue a kernel of one block that does nothing, while the device is busy, in ns; the crate's
/// own part of it is 0.1 to 0.4 µs. A pass of n kernels cannot be enqueued in less than n times that. Fails where the
/// device does not have the unit, whose kernel it is.
pub fn launch_ns(workspace: &Workspace, device: impl Into<DeviceId>, unit: Unit, storage: Dtype) -> Result<f64> {
    let [rounds, launches] = LAUNCHES;
    with_products(workspace, device.into(), (unit, storage), |products| {
        let busy = products.enough()?;
        let mut times = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            products.enqueue(products.blocks, busy)?;
            let start = Instant::now();
            (0..launches).try_for_each(|_| products.enqueue(1, 0))?;
            times.push(start.elapsed().as_nanos() as f64 / launches as f64);
            products.queue.finish()?;
        }
        times.sort_by(f64::total_cmp);
        Ok(times[rounds / 2])
    })
}
