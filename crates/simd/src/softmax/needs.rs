//! The memory of a pass.

use super::diagonals::Diagonals;
use super::operands::Operands;
use super::ordered_sum::OrderedSum;
use super::packs::Packing;
use super::rule::Prepared;
use super::schedule::Schedule;
use super::scratch::Scratch;
use super::stats::RowStats;
use super::tasks::Task;
use crate::plan::{Buffer, Plan};
use crate::workspace::Parts;
use etalon_problem::Blocking;

impl Schedule {
    /// The memory of the pass.
    pub fn needs(&self, packing: &Packing<'_>, operands: &Operands<'_>) -> Needs {
        Needs {
            together: self.waves.size,
            workers: packing.workers(),
            slot: packing.slot(),
            scratch: Parts::count(|parts| Scratch::new(parts, self, operands)),
            thread: size_of::<Scratch<'_>>(),
            stats: RowStats::slot(packing, self.numbers),
            sums: if self.fused { OrderedSum::slot(packing) } else { 0 },
            diagonals: Diagonals::slot(packing, self.diagonals),
            totals: packing.scores.extents.query_heads.saturating_mul(self.diagonals.max(1)),
            prepared: Prepared::bytes(operands),
        }
    }
}

/// The memory of a pass, in elements: for each of the slots that it works on together and for each thread.
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
    /// Partial sums of dbias and dτ of lazy attention, of a slot.
    pub diagonals: usize,
    /// Sums over all slots: of sinks, or of dbias and dτ.
    pub totals: usize,
    /// Of the mask and the bias by distance, in bytes of lists.
    pub prepared: usize,
}

/// Bytes of the page that the lists end in.
const PAGE: usize = 4096;

impl Needs {
    /// Elements of everything.
    pub fn all(&self) -> usize {
        let together =
            |each: usize| Parts::count(|parts| parts.room(self.together.saturating_mul(each)));
        let stats = together(self.stats).saturating_add(together(self.diagonals));
        let slots = self.together.saturating_mul(self.slot.saturating_add(self.sums));
        let threads = self.workers.saturating_mul(self.scratch);
        slots.saturating_add(stats).saturating_add(threads)
    }

    /// Bytes of all lists.
    pub fn lists(&self, packing: &Packing<'_>) -> usize {
        let (queries, keys) = packing.tiles();
        let mut bytes = self.prepared;
        for (count, each) in [
            (queries.saturating_add(keys), size_of::<Task<'_>>()),
            (packing.sums(self.together), size_of::<OrderedSum<'_, '_>>()),
            (self.together, packing.list()),
            (self.workers, self.thread),
            (self.totals, size_of::<f64>()),
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
        if self.diagonals > 0 {
            buffers.push(elements("sums of dbias and dtau", together, self.diagonals));
        }
        if self.sums > 0 {
            buffers.push(elements("sums of dq", together, self.sums));
        }
        Plan {
            blocking: Blocking { queries: packing.cut.queries, keys: packing.cut.keys },
            mode: None,
            products: 0,
            interval: None,
            strategy: None,
            together,
            buffers,
        }
    }
}
