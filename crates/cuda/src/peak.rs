//! What the arithmetic of a device can do at most: `kernels/peak.cu`.

use crate::device_id::DeviceId;
use crate::lane::device_memory;
use crate::options::{Level, Options, Precision};
use crate::timing::device_ns;
use crate::unit::Unit;
use crate::variant::Variant;
use crate::workspace::Workspace;
use cudarc::driver::{DevicePtr, DeviceRepr};
use etalon_problem::{Dtype, Error};

impl Unit {
    /// The fastest that passes with these options may use, for operands of a storage type. Fails where there is no
    /// such device.
    pub fn of(workspace: &Workspace, options: &Options, storage: Dtype) -> Result<Unit, Error> {
        let held = workspace.device(options.device)?;
        let narrow = matches!(storage, Dtype::Bf16 | Dtype::F16);
        Ok(match (options.precision, options.level) {
            (Precision::Strict, _) | (_, Level::Portable) => Unit::Ffma,
            (precision, _) if !narrow && precision.narrows_f32() => Unit::Mma,
            (precision, _) if !narrow || precision != Precision::Flash => Unit::Ffma,
            (_, Level::Auto | Level::Sm90a | Level::Sm90aSegments) if held.device.is_hopper() => {
                Unit::Wgmma
            }
            _ => Unit::Mma,
        })
    }
}

/// Threads of a block.
const THREADS: u32 = 256;

/// `Peak` of `peak.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Peak {
    sink: u64,
    rounds: i32,
}

// SAFETY: the fields, their types and their order are those of `Peak` in `peak.cu`, and it holds no reference of the
// host.
unsafe impl DeviceRepr for Peak {}

/// Times of which the shortest counts.
const TIMES: usize = 3;

/// A time is at least so many ns, so that launching is no part of it.
const ENOUGH: f64 = 2e6;

/// GFLOP/s of a unit on numbers of a storage type, of tensor cores on bf16 where that is f32. It is measured anew with every call, in some milliseconds; a device
/// that is limited by its power does less over seconds. Fails where the device does not have the unit.
pub fn peak_gflops(
    workspace: &Workspace,
    device: impl Into<DeviceId>,
    unit: Unit,
    storage: Dtype,
) -> Result<f64, Error> {
    let held = workspace.device(device.into())?;
    let device = &held.device;
    if unit == Unit::Wgmma && !device.is_hopper() {
        return Err(Error::Unsupported {
            what: "wgmma".to_string(),
            reason: "the device is not of compute capability 9.0".to_string(),
        });
    }
    let architecture = match unit {
        Unit::Wgmma => "sm_90a".to_string(),
        _ => device.architecture(),
    };
    let kernels = device.kernels(Variant::peak(unit, storage), &architecture)?;
    let lane = held.lane()?;
    let blocks = unit.blocks() * device.multiprocessors;
    let sink = device_memory(device, &lane.stream, 4 * blocks)?;
    let sink_at = sink.device_ptr(&lane.stream).0;
    let queue = lane.queue(device)?;
    let run = |rounds: i32| {
        let call = Peak { sink: sink_at, rounds };
        device_ns(&queue, || queue.launch(kernels.get("peak")?, blocks as u64, (THREADS, 0), &call))
    };
    let mut rounds = 1 << 10;
    while run(rounds)? < ENOUGH && rounds < 1 << 24 {
        rounds *= 2;
    }
    let best =
        (0..TIMES).try_fold(f64::INFINITY, |best, _| Ok::<f64, Error>(best.min(run(rounds)?)))?;
    drop(sink);
    held.give_back(lane);
    Ok(unit.flops() * f64::from(THREADS) * blocks as f64 * f64::from(rounds) / best)
}
