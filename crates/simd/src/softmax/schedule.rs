//! Division of the work of a pass.

use super::cut::Cut;
use super::packs::Packing;
use super::stats::RowStats;
use crate::waves::Waves;
use etalon_problem::Blocking;

/// The blocking that was measured to be best, or within 3 % of it, for the forward pass and for the
/// fused backward pass at D = 64 and 128 on AVX-512: a tile of keys and values stays in the
/// L2 cache while the register blocks of the queries pass over it.
pub const FIRST_ORDER: Blocking = Blocking { queries: 192, keys: 192 };

/// The blocking of first order in bf16: the weights of a tile of queries and keys stay in the L2 cache, twice for the
/// backward pass.
pub const BF16: Blocking = Blocking { queries: 256, keys: 256 };

/// The blocking of the second order: four tiles of weights stay in the L2 cache.
pub const SECOND_ORDER: Blocking = Blocking { queries: 96, keys: 192 };

/// The same in bf16.
pub const SECOND_BF16: Blocking = Blocking { queries: 128, keys: 256 };

/// Shares of dq for which a thread may be ahead of their turns: as many as make it wait seldom for
/// threads that others delay.
pub const AHEAD: usize = 4;

/// The cut of a pass of first or second order, the memory that it needs, and the waves of slots that it works
/// on together.
#[derive(Debug, Clone, Copy)]
pub struct Schedule {
    pub cut: Cut,
    /// True if the pass is of the second order.
    pub second: bool,
    /// Numbers of a row that one sweep leaves for the next: see [`Stats`](super::stats::Stats).
    pub numbers: usize,
    /// Numbers that a tile of keys and a query head add to dbias and dτ of lazy attention, see
    /// [`Diagonals`](super::diagonals::Diagonals).
    pub diagonals: usize,
    /// True if o is computed anew; of the second order.
    pub o_anew: bool,
    /// True if dq is summed in the sweep of the keys; otherwise it has a sweep of its own.
    pub fused: bool,
    /// True if the gradient of the bias has a sweep of its own; otherwise the sweep of the keys writes it, if
    /// it is wanted.
    pub bias: bool,
    pub waves: Waves,
}

impl Schedule {
    /// Waves of at most `most` slots, where each slot takes `bytes` beside its packed operands and the
    /// statistics of its rows. With `bias` heads and sequences are summed in one order: then all slots
    /// are packed at once.
    pub fn waves(
        packing: &Packing<'_>,
        (numbers, bias): (usize, bool),
        bytes: usize,
        most: usize,
    ) -> Waves {
        let slots = packing.slots();
        if bias {
            Waves::one(slots)
        } else {
            let each = packing.slot().saturating_add(RowStats::slot(packing, numbers));
            let bytes = each.saturating_mul(size_of::<f32>()).saturating_add(bytes);
            let threads = rayon::current_num_threads();
            Waves::new(slots, bytes, packing.tiles().1, threads).at_most(most)
        }
    }

    /// Shares of dq that a thread has memory for.
    pub fn shares(&self) -> usize {
        if self.fused && rayon::current_num_threads() > 1 { AHEAD } else { 1 }
    }
}
