//! Is there a driver, a device, a compiler? Asked in this order, without a panic.

use crate::compiler::Compiler;
use cudarc::driver::{result, sys as driver};
use std::sync::OnceLock;

/// Why the CUDA tier is absent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Absent {
    /// The driver's library cannot be loaded.
    #[error("no CUDA driver (libcuda) on this machine")]
    NoDriver,
    /// The driver is there, but it sees no device.
    #[error("a CUDA driver, but no device")]
    NoDevice,
    /// The driver is there, but cannot be used.
    #[error("a CUDA driver that cannot be used: {0}")]
    Driver(String),
    /// The driver is older than the calls that the tier makes.
    #[error("the CUDA driver supports CUDA {found}; the kernels need 12.0 or later")]
    OldDriver {
        /// The CUDA version that it supports.
        found: String,
    },
    /// Kernels are compiled on the spot, and the library for that is missing.
    #[error(
        "no NVRTC library (libnvrtc.so of CUDA 12 or 13); the package nvidia-cuda-nvrtc has it. \
         Searched: {searched}"
    )]
    NoNvrtc {
        /// Where it was looked for.
        searched: String,
    },
    /// The compiler is older than the kernels' language.
    #[error("NVRTC {found} is too old; the kernels need 12.0 or later (package nvidia-cuda-nvrtc)")]
    OldNvrtc {
        /// Its version.
        found: String,
    },
    /// The compiler makes code that the driver cannot load.
    #[error(
        "NVRTC {nvrtc} makes code that a driver for CUDA {driver} cannot load; use an NVRTC of the \
         driver's version (package nvidia-cuda-nvrtc)"
    )]
    NewNvrtc {
        /// The compiler's version.
        nvrtc: String,
        /// The CUDA version that the driver supports.
        driver: String,
    },
}

/// The number of devices, at least 1, or why there is none to use: no driver, no device, or no NVRTC
/// where the loader looks for libraries. The answer of the first call holds for the life of the
/// process.
pub fn probe() -> Result<usize, Absent> {
    let devices = devices()?;
    Compiler::find(None)?.check_driver(driver_version()?)?;
    Ok(devices)
}

/// As [`probe`], without asking for a compiler.
pub(crate) fn devices() -> Result<usize, Absent> {
    static ANSWER: OnceLock<Result<usize, Absent>> = OnceLock::new();
    ANSWER.get_or_init(ask).clone()
}

fn ask() -> Result<usize, Absent> {
    // SAFETY: opens the library by name and closes over nothing; cudarc panics on any later call
    // if it is missing, which is why this is asked first.
    if !unsafe { driver::is_culib_present() } {
        return Err(Absent::NoDriver);
    }
    let devices = result::init().and_then(|()| result::device::get_count());
    let devices = match devices {
        Ok(count) if count > 0 => count as usize,
        Ok(_) | Err(result::DriverError(driver::CUresult::CUDA_ERROR_NO_DEVICE)) => {
            return Err(Absent::NoDevice);
        }
        // The bare code: its text would come from the driver that has just failed.
        Err(result::DriverError(code)) => return Err(Absent::Driver(format!("{code:?}"))),
    };
    let version = driver_version()?;
    if version.0 < 12 {
        return Err(Absent::OldDriver { found: text(version) });
    }
    Ok(devices)
}

/// The CUDA version that the driver supports.
pub(crate) fn driver_version() -> Result<(i32, i32), Absent> {
    let mut version = 0;
    // SAFETY: the library is there, and the call writes one number.
    let result = unsafe { driver::cuDriverGetVersion(&mut version) }.result();
    result.map_err(|result::DriverError(code)| Absent::Driver(format!("{code:?}")))?;
    Ok((version / 1000, version % 1000 / 10))
}

/// A version as people write it.
pub(crate) fn text((major, minor): (i32, i32)) -> String {
    format!("{major}.{minor}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asking_twice_gives_one_answer_and_no_panic() {
        let first = probe();
        assert_eq!(first, probe());
        if let Ok(devices) = first {
            assert!(devices > 0, "an empty machine is an absence, not a tier");
        }
    }
}
