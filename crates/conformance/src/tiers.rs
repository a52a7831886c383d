//! The tiers of etalon as [`crate::tier::Tier`]s, and the one door through which every tier is
//! asked: [`ask`].

mod ask;
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
pub use cuda::Cuda;
pub use door::{Run, saved};
pub use isolated::{Isolated, Server, serve};
pub(crate) use reference::decisions;
pub use reference::{Reference, ReferenceIn, oracle};
pub use simd::Simd;

use crate::report::Absent;
use crate::tier::Tier;

/// The tiers on this machine, and those that it lacks.
pub fn present() -> (Vec<Box<dyn Tier>>, Vec<Absent>) {
    let mut tiers: Vec<Box<dyn Tier>> = Vec::new();
    let (levels, mut absent) = Simd::levels();
    tiers.extend(levels.into_iter().map(|level| Box::new(level) as Box<dyn Tier>));
    tiers.push(Box::new(ReferenceIn::SINGLE));
    tiers.push(Box::new(ReferenceIn::DOUBLE_DOUBLE));
    let (levels, lacking) = Cuda::levels();
    tiers.extend(levels.into_iter().map(|level| Box::new(level) as Box<dyn Tier>));
    absent.extend(lacking);
    (tiers, absent)
}
