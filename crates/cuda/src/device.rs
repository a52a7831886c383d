//! Is there a driver, a device, a compiler? Asked in this order, without a panic.

use crate::absent::{Absent, text};
use crate::compiler::Compiler;
use cudarc::driver::{result, sys as driver};
use std::sync::OnceLock;

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
