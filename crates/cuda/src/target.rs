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

/// Architectures with the compute capability and the multiprocessors of a device that has it: A100, RTX 3090, Jetson
/// Orin, RTX 4090, H100 or H200, B200, RTX 5090.
const KNOWN: [(&str, (i32, i32), usize); 7] = [
    ("sm_80", (8, 0), 108),
    ("sm_86", (8, 6), 82),
    ("sm_87", (8, 7), 16),
    ("sm_89", (8, 9), 128),
    ("sm_90", (9, 0), 132),
    ("sm_100", (10, 0), 148),
    ("sm_120", (12, 0), 170),
];

/// The shared memory that a block may have on an architecture, in bytes.
pub(crate) fn shared_memory(architecture: &str) -> u32 {
    match architecture {
        "sm_80" | "sm_87" => 166_912,
        "sm_86" | "sm_89" | "sm_120" | "sm_121" => CONSUMER,
        _ => 232_448,
    }
}

/// The shared memory of devices of compute capability 8.6, 8.9 and 12.0.
pub(crate) const CONSUMER: u32 = 101_376;

impl Target {
    /// A device of an architecture, such as `sm_90`: the largest that many have. Fails for an unknown one.
    pub fn of(architecture: &str) -> Result<Target> {
        let name = architecture.trim_end_matches('a');
        let known = KNOWN.into_iter().find(|(own, ..)| *own == name);
        let (_, capability, multiprocessors) = known.ok_or_else(|| {
            let names = KNOWN.map(|(name, ..)| name);
            Error::value("architecture", format!("one of {}", names.join(", ")), architecture)
        })?;
        Ok(Target { capability, multiprocessors, shared_memory: shared_memory(name) })
    }

    /// True if the tensor cores of compute capability 9.0 are there.
    pub(crate) fn is_hopper(self) -> bool {
        self.capability == (9, 0)
    }
}

impl Default for Target {
    /// An H100 or H200.
    fn default() -> Self {
        let (name, capability, multiprocessors) = KNOWN[4];
        Target { capability, multiprocessors, shared_memory: shared_memory(name) }
    }
}
