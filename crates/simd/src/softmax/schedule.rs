//! How the work of a pass is divided.

use super::cut::Cut;
use super::operands::Operands;
use super::ordered_sum::OrderedSum;
use super::packs::Packing;
use super::scratch::Scratch;
use super::stats::RowStats;
use super::tasks::Task;
use crate::mask::Sight as PreparedMask;
use crate::plan::{Buffer, Plan};
use crate::waves::Waves;
use crate::workspace::Parts;
use etalon_problem::Blocking;

/// The blocking that was measured to be best, or within 3 % of it, for the forward pass and for the
/// fused backward pass at D = 64 and 128 on AVX-512: a tile of keys and values stays in the
/// L2 cache while the register blocks of the queries pass over it.
pub const FIRST_ORDER: Blocking = Blocking { queries: 192, keys: 192 };

/// The blocking of the second order: four tiles of weights stay in the L2 cache.
pub const SECOND_ORDER: Blocking = Blocking { queries: 96, keys: 192 };

/// Shares of dq for which a thread may be ahead of their turns: as many as make it wait seldom for
/// threads that others delay.
pub const AHEAD: usize = 4;

/// How a pass of first or second order is cut, which memory it needs, and what it works on together.
#[derive(Debug, Clone, Copy)]
pub struct Schedule {
    pub cut: Cut,
    /// Whether the pass is of the second order.
    pub second: bool,
    /// Whether o is computed anew; of the second order.
    pub o_anew: bool,
    /// Whether dq is summed in the sweep of the keys; otherwise it has a sweep of its own.
    pub fused: bool,
    /// Whether the gradient of the bias has a sweep of its own; otherwise the sweep of the keys
    /// writes it, if it is wanted.
    pub bias: bool,
    pub waves: Waves,
}

impl Schedule {
    /// Waves of at most `most` slots, where each slot takes `bytes` beside its packed operands and the
    /// statistics of its rows. With `bias` heads and sequences are summed in one order: then all slots
    /// are packed at once.
    pub fn waves(
        packing: &Packing<'_>,
        (second, bias): (bool, bool),
        bytes: usize,
        most: usize,
    ) -> Waves {
        let slots = packing.slots();
        if bias {
            Waves::one(slots)
        } else {
            let each = packing.slot().saturating_add(RowStats::slot(packing, second));
            let bytes = each.saturating_mul(size_of::<f32>()).saturating_add(bytes);
            let threads = rayon::current_num_threads();
            Waves::new(slots, bytes, packing.tiles().1, threads).at_most(most)
        }
    }

    /// Shares of dq that a thread has memory for.
    pub fn shares(&self) -> usize {
        if self.fused && rayon::current_num_threads() > 1 { AHEAD } else { 1 }
    }

    /// What the pass keeps in memory.
    pub fn needs(&self, packing: &Packing<'_>, operands: &Operands<'_>) -> Needs {
        Needs {
            together: self.waves.size,
            workers: packing.workers(),
            slot: packing.slot(),
            scratch: Parts::count(|parts| Scratch::new(parts, self, operands)),
            thread: size_of::<Scratch<'_>>(),
            stats: RowStats::slot(packing, self.second),
            sums: if self.fused { OrderedSum::slot(packing) } else { 0 },
        }
    }
}

/// What a pass keeps in memory, in elements: for each of the slots that it works on together and for
/// each thread.
#[derive(Debug, Clone, Copy)]
pub struct Needs {
    pub together: usize,
    pub workers: usize,
    /// Of a slot: packed operands, statistics of rows and sums of dq.
    pub slot: usize,
    pub stats: usize,
    pub sums: usize,
    /// Of a thread.
    pub scratch: usize,
    /// Of a thread, in bytes of lists.
    pub thread: usize,
}

/// Bytes of the page that the lists end in.
const PAGE: usize = 4096;

impl Needs {
    /// Elements of everything.
    pub fn all(&self) -> usize {
        let stats = Parts::count(|parts| parts.room(self.together.saturating_mul(self.stats)));
        let slots = self.together.saturating_mul(self.slot.saturating_add(self.sums));
        let threads = self.workers.saturating_mul(self.scratch);
        slots.saturating_add(stats).saturating_add(threads)
    }

    /// Bytes of all lists.
    pub fn lists(&self, packing: &Packing<'_>) -> usize {
        let (queries, keys) = packing.tiles();
        let mut bytes = PreparedMask::bytes(&packing.scores.mask);
        for (count, each) in [
            (queries.saturating_add(keys), size_of::<Task<'_>>()),
            (packing.sums(self.together), size_of::<OrderedSum<'_, '_>>()),
            (self.together, packing.list()),
            (self.workers, self.thread),
            (packing.scores.extents.query_heads, size_of::<f64>()),
        ] {
            bytes = bytes.saturating_add(count.saturating_mul(each));
        }
        bytes
    }

    /// The plan of a pass, without its mode and its products.
    pub fn plan(&self, packing: &Packing<'_>) -> Plan {
        let Needs { together, workers, .. } = *self;
        let elements = |name, count, each: usize| {
            Buffer::parts(name, count, each.saturating_mul(size_of::<f32>()))
        };
        let mut buffers = vec![
            elements("packed operands", together, self.slot),
            elements("scratch of the threads", workers, self.scratch),
            Buffer::parts("lists", 1, self.lists(packing).saturating_add(PAGE)),
        ];
        if self.stats > 0 {
            buffers.push(elements("row statistics", together, self.stats));
        }
        if self.sums > 0 {
            buffers.push(elements("sums of dq", together, self.sums));
        }
        Plan {
            blocking: packing.cut.blocking(),
            mode: None,
            products: 0,
            interval: None,
            together,
            buffers,
        }
    }
}
