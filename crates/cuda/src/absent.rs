//! Why the CUDA tier is absent.

use libloading::Library;

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
        /// The folders that were searched.
        searched: String,
    },
    /// The compiler is there, but cannot be used.
    #[error("an NVRTC library that cannot be used: {0} (package nvidia-cuda-nvrtc)")]
    Nvrtc(String),
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

/// A version as people write it.
pub(crate) fn text((major, minor): (i32, i32)) -> String {
    format!("{major}.{minor}")
}

/// Fails where a library lacks one of these functions: cudarc panics when it calls such a one.
pub(crate) fn check_functions(library: &Library, names: &str) -> Result<(), String> {
    // SAFETY: the addresses are looked up, and nothing is called.
    let lacks = |name: &&str| unsafe { library.get::<*const ()>(name.as_bytes()) }.is_err();
    names.split(' ').find(lacks).map_or(Ok(()), |name| Err(format!("it lacks the function {name}")))
}
