//! A device, as far as it decides which kernels compute a pass; it may be hypothetical.

use etalon_problem::{Error, Result};

/// Facts that decide which kernels a device runs, and how many blocks at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Its compute capability.
    pub capability: (i32, i32),
    /// Its multiprocessors.
    pub multiprocessors: usize,
    /// The most shared memory that a block may ask for, in bytes.
    pub shared_memory: u32,
}

/// Compute capabilities with the multiprocessors and the shared memory of a device that has it: A100, RTX 3090, Jetson
/// Orin, RTX 4090, H100 or H200, B200, RTX 5090.
const KNOWN: [((i32, i32), usize, u32); 7] = [
    ((8, 0), 108, 166_912),
    ((8, 6), 82, 101_376),
    ((8, 7), 16, 166_912),
    ((8, 9), 128, 101_376),
    ((9, 0), 132, 232_448),
    ((10, 0), 148, 232_448),
    ((12, 0), 170, 101_376),
];

impl Target {
    /// A device of an architecture, such as `sm_90`: the largest that many have. Fails for an unknown one.
    pub fn of(architecture: &str) -> Result<Target> {
        let digits = architecture.strip_prefix("sm_").map(|name| name.trim_end_matches('a'));
        let number = digits.and_then(|digits| digits.parse::<i32>().ok());
        let known = KNOWN.into_iter().find(|((major, minor), ..)| number == Some(10 * major + minor));
        let (capability, multiprocessors, shared_memory) = known.ok_or_else(|| {
            let names = KNOWN.map(|((major, minor), ..)| format!("sm_{major}{minor}"));
            Error::value("architecture", format!("one of {}", names.join(", ")), architecture)
        })?;
        Ok(Target { capability, multiprocessors, shared_memory })
    }

    /// True if the tensor cores of compute capability 9.0 are there.
    pub(crate) fn is_hopper(self) -> bool {
        self.capability == (9, 0)
    }
}

impl Default for Target {
    /// An H100 or H200.
    fn default() -> Self {
        let (capability, multiprocessors, shared_memory) = KNOWN[4];
        Target { capability, multiprocessors, shared_memory }
    }
}

#[cfg(test)]
#[path = "../tests/units/target.rs"]
mod tests;
