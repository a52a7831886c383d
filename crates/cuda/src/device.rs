//! Is there a driver, a device, a compiler? Asked in this order, without a panic.

use cudarc::driver::{result, sys as driver};
use cudarc::nvrtc::sys as nvrtc;
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
    /// Kernels are compiled on the spot, and the library for that is missing.
    #[error("no NVRTC library (the package nvidia-cuda-nvrtc has it)")]
    NoNvrtc,
}

/// The number of devices, at least 1, or why there is none to use. The answer of the first call
/// holds for the life of the process.
pub fn probe() -> Result<usize, Absent> {
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
    // SAFETY: as above, for the compiler's library.
    if !unsafe { nvrtc::is_culib_present() } {
        return Err(Absent::NoNvrtc);
    }
    Ok(devices)
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
