//! Is there a driver, a device, a compiler? Asked in this order, without a panic.

use crate::absent::{self, Absent, text};
use crate::compiler::Compiler;
use cudarc::driver::{DriverError, result, sys};
use etalon_problem::{Error, Result};
use std::sync::OnceLock;

/// The number of devices, at least 1, or why there is none to use: no driver, no device, or no NVRTC in the loader's
/// path. The first answer holds for the life of the process.
pub fn probe() -> Result<usize, Absent> {
    let driver = driver()?;
    Compiler::find(None)?.check_driver(driver.version)?;
    Ok(driver.devices)
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Driver {
    pub devices: usize,
    /// The CUDA version that it supports.
    pub version: (i32, i32),
}

/// As [`probe`], without asking for a compiler.
pub(crate) fn driver() -> Result<Driver, Absent> {
    static ANSWER: OnceLock<Result<Driver, Absent>> = OnceLock::new();
    ANSWER.get_or_init(ask).clone()
}

fn ask() -> Result<Driver, Absent> {
    // SAFETY: opens the library by name. cudarc panics on later calls if it is missing: this is asked first.
    if !unsafe { sys::is_culib_present() } {
        return Err(Absent::NoDriver);
    }
    check_functions(FIRST)?;
    let devices = match result::init().and_then(|()| result::device::get_count()) {
        Ok(count) if count > 0 => count as usize,
        Ok(_) | Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => return Err(Absent::NoDevice),
        // The bare code: its text would come from the driver that has just failed.
        Err(DriverError(code)) => return Err(Absent::Driver(format!("{code:?}"))),
    };
    let version = driver_version()?;
    if version.0 < 12 {
        return Err(Absent::OldDriver { found: text(version) });
    }
    check_functions(LATER)?;
    Ok(Driver { devices, version })
}

/// The UUID of a device below the number of devices.
pub(crate) fn uuid(ordinal: usize) -> Result<[u8; 16], DriverError> {
    let device = result::device::get(ordinal as i32)?;
    Ok(result::device::get_uuid(device)?.bytes.map(|byte| byte as u8))
}

/// The functions of the driver that are called to find out what there is.
const FIRST: &str = "cuInit cuDeviceGetCount cuDriverGetVersion";

/// All others that the tier calls; drivers for CUDA 12.0 have them.
const LATER: &str = "\
    cuCtxGetCurrent cuCtxSetCurrent cuDeviceGet cuDeviceGetAttribute cuDeviceGetName cuDeviceGetUuid_v2 \
    cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxRetain cuFuncSetAttribute cuGraphDestroy cuGraphExecDestroy \
    cuGraphInstantiateWithFlags cuGraphLaunch cuLaunchKernel cuMemAllocAsync cuMemAlloc_v2 cuMemFreeAsync \
    cuMemFree_v2 cuMemcpyDtoHAsync_v2 cuMemcpyHtoDAsync_v2 cuMemsetD32Async cuModuleGetFunction cuModuleLoadData \
    cuModuleUnload cuPointerGetAttribute cuStreamBeginCapture_v2 cuStreamCreate cuStreamDestroy_v2 \
    cuStreamEndCapture cuStreamSynchronize cuTensorMapEncodeTiled";

/// Functions that time a device; drivers for CUDA 12.8 have them.
const CLOCK: &str = "cuEventCreate cuEventDestroy_v2 cuEventElapsedTime_v2 cuEventRecord";

/// Fails where the driver, which is there, cannot time a device.
pub(crate) fn check_clock() -> Result<()> {
    check_functions(CLOCK).map_err(|absent| Error::unsupported("the device's clock", absent.to_string()))
}

fn check_functions(names: &str) -> Result<(), Absent> {
    // SAFETY: opens the library, which is there.
    absent::check_functions(unsafe { sys::culib() }, names).map_err(Absent::Driver)
}

fn driver_version() -> Result<(i32, i32), Absent> {
    let mut version = 0;
    // SAFETY: the library is there, and the call writes one number.
    let result = unsafe { sys::cuDriverGetVersion(&mut version) }.result();
    result.map_err(|DriverError(code)| Absent::Driver(format!("{code:?}")))?;
    Ok((version / 1000, version % 1000 / 10))
}
