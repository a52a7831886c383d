//! Tile sizes: a hint.

use crate::{Error, named};

/// Numbers of queries and keys of a tile. A hint: it may change speed and rounding, never the
/// result beyond rounding. A tier rounds it up to what its registers need and clamps it to the
/// lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Blocking {
    /// Queries in a tile.
    pub queries: usize,
    /// Keys in a tile.
    pub keys: usize,
}

impl Blocking {
    /// A tile of `queries` × `keys`.
    pub fn new(queries: usize, keys: usize) -> Self {
        Blocking { queries, keys }
    }

    /// A block size of 0 is an error.
    pub fn check(&self) -> Result<(), Error> {
        Error::expect_extents(&[("blocking.queries", self.queries), ("blocking.keys", self.keys)])
    }
}

named! {
    /// Organisation of a backward pass. A hint, as [`Blocking`] is; tiers without the choice ignore it.
    #[derive(Default)]
    Mode, "mode" {
        /// The planner chooses: [`Mode::FusedPartials`], if its sums fit the budget.
        #[default]
        Auto = "auto",
        /// dq in one sweep, dk and dv in another: P is computed twice, nothing is kept between.
        Separate = "separate",
        /// P is computed once; each tile of keys adds its part of dq to sums in memory, in the order of
        /// the tiles.
        FusedPartials = "fused",
        /// attention_lse only: the forward pass also returns ∂lse/∂q, and dq needs no sweep.
        ForwardGradient = "gradient",
    }
}
