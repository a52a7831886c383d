//! The cuda tier in a build without the feature `cuda`: all of its levels are absent.

use super::CUDA_LEVELS;
use crate::report::Absent;
use crate::tier::Tier;

/// Why this build has no cuda tier, and how to get one.
pub const NO_CUDA: &str =
    "this build has no CUDA tier: build with the Cargo feature `cuda`, which is on by default";

/// No levels, and all of them with the reason.
pub(super) fn present() -> (Vec<Box<dyn Tier>>, Vec<Absent>) {
    let absent = |name| Absent { tier: format!("cuda/{name}"), reason: NO_CUDA.to_string() };
    (Vec::new(), CUDA_LEVELS.map(absent).into())
}
