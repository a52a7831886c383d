//! The tiers of etalon as [`crate::tier::Tier`]s, and the one door through which every tier is
//! asked: [`ask`].

mod ask;
// This file alone asks whether this build has the tier.
#[cfg_attr(not(feature = "cuda"), path = "tiers/no_cuda.rs")]
mod cuda;
mod door;
mod filters;
mod isolated;
mod memory;
mod reference;
mod shards;
mod simd;
mod typed;

pub use crate::tier::Refusal;
pub use ask::{ask, ask_filtered, ask_in_turn, check_outputs, check_results, no_output};
#[cfg(feature = "cuda")]
pub use cuda::Cuda;
#[cfg(not(feature = "cuda"))]
pub use cuda::NO_CUDA;
pub use door::{Run, saved};
pub use isolated::{Isolated, Server, serve};
pub(crate) use reference::decisions;
pub use reference::{Reference, ReferenceIn, oracle};
pub use simd::Simd;

use crate::report::Absent;
use crate::tier::Tier;

/// The levels of the cuda tier, and its precisions of f32: also where a build has none of them.
pub const CUDA_LEVELS: [&str; 7] =
    ["sm90a", "sm90a-segments", "sm80", "sm80-99k", "tf32", "bf16x3", "portable"];

/// The tiers on this machine, and those that it lacks.
pub fn present() -> (Vec<Box<dyn Tier>>, Vec<Absent>) {
    let mut tiers: Vec<Box<dyn Tier>> = Vec::new();
    let (levels, mut absent) = Simd::levels();
    // A tier's name alone stands for its last level: that is one of f32.
    let (pairs, lacking) = Simd::of_pairs();
    absent.extend(lacking);
    let levels = pairs.into_iter().chain(levels);
    tiers.extend(levels.map(|level| Box::new(level) as Box<dyn Tier>));
    tiers.push(Box::new(ReferenceIn::SINGLE));
    tiers.push(Box::new(ReferenceIn::DOUBLE_DOUBLE));
    let (levels, lacking) = cuda::present();
    tiers.extend(levels);
    absent.extend(lacking);
    (tiers, absent)
}
