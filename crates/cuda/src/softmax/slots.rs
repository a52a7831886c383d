//! The gradient of q in the pass by keys: `kernels/slots.cuh`.

use crate::room::{Layout, Room};
use crate::softmax::Job;
use crate::softmax::asked::Asked;
use cudarc::driver::{CudaFunction, DeviceRepr};
use etalon_problem::{Error, Mode, Pass};
use std::ops::Range;

/// How slots share the memory that they may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shares {
    /// The bytes of a slot.
    pub each: usize,
    /// The tiles of keys of the longest sequence, and those that have slots at a time.
    pub tiles: usize,
    pub held: usize,
}

impl Shares {
    /// What a pass holds whose kernels compute the gradient of q in the pass by keys, where that is its mode. `Auto` takes that
    /// mode where all is in one launch and the tiles of keys that fit the budget keep the device busy; a caller that insists
    /// gets two slots at least: one of a tile, one of the sums of the tiles before.
    pub fn new(asked: &Asked<'_>, mode: Mode, budget: usize) -> Option<Shares> {
        let e = &asked.scores.extents;
        // The second order has such kernels of narrow operands alone, and there the mode is a hint.
        let narrow = asked.columns() <= 64;
        let may = match mode {
            Mode::Auto => narrow,
            Mode::FusedPartials => narrow || asked.pass == Pass::Backward,
            Mode::Separate | Mode::ForwardGradient => false,
        };
        let insists = mode == Mode::FusedPartials;
        let rows = asked.scores.row_shape().iter().product::<usize>();
        let each = rows.checked_mul(4 * e.dim.next_multiple_of(64)).filter(|&each| each > 0)?;
        let tiles = asked.counts.longest;
        if !asked.both || !may || tiles == 0 {
            return None;
        }
        if tiles <= budget / each {
            return Some(Shares { each, tiles, held: tiles });
        }
        // One holds the sums of the tiles before.
        let held = (budget / each).saturating_sub(1);
        let shares = Shares { each, tiles, held };
        let busy = held > 0 && shares.working(asked) >= 2 * asked.target.multiprocessors;
        let held = if insists { held.clamp(1, tiles) } else { held };
        (insists || busy).then_some(Shares { each, tiles, held })
    }

    /// The blocks of a launch that have slots, about.
    pub fn working(self, asked: &Asked<'_>) -> usize {
        self.held * (asked.counts.by_keys / self.tiles) * asked.scores.extents.key_heads
    }

    /// How often the pass by keys is launched.
    pub fn turns(self) -> usize {
        self.tiles.div_ceil(self.held)
    }

    /// The bytes of sums of the tiles before that are read and written between turns.
    pub fn sums(self) -> usize {
        self.each.saturating_mul(2 * (self.turns() - 1))
    }

    /// The bytes of all slots, and of the sums of the tiles before.
    pub fn bytes(self) -> Option<[usize; 2]> {
        let sums = if self.held < self.tiles { self.each } else { 0 };
        Some([self.held.checked_mul(self.each)?, sums])
    }
}

/// What tiles of keys add to the gradient of q, in memory that holds some tiles at a time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slots {
    shares: Shares,
    room: Room,
    /// The sums of the tiles before.
    totals: Room,
    /// On tensor cores, for each sequence and key head, whether k holds a number that is not finite.
    odd: Room,
}

/// The kernels of a pass by keys that leaves slots, with their threads and the shared memory of the first.
pub(crate) struct By<'a> {
    pub fused: &'a CudaFunction,
    pub collect: &'a CudaFunction,
    pub threads: u32,
    pub shared: u32,
}

/// `Slots` of `slots.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Held {
    at: u64,
    totals: u64,
    odd: u64,
    first: i32,
    end: i32,
    last: i32,
}

/// What kernels are told: a call and the slots, as `Collected` of `slots.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct With<T> {
    call: T,
    slots: Held,
}

// SAFETY: the fields, their types and their order are those of `Collected` of `slots.cuh` and `FusedSecond` of
// `portable_second.cu`, and it holds no reference of the host.
unsafe impl<T: DeviceRepr> DeviceRepr for With<T> {}

impl Slots {
    /// Memory for slots; `tensor`: of tensor cores, which leave out what is not finite.
    pub fn new(
        shares: Shares,
        asked: &Asked<'_>,
        tensor: bool,
        layout: &mut Layout,
    ) -> Result<Slots, Error> {
        let [slots, sums] = shares.bytes().ok_or_else(|| crate::room::memory(usize::MAX))?;
        let heads = asked.counts.sequences * asked.scores.extents.key_heads;
        Ok(Slots {
            shares,
            room: layout.room(slots)?,
            totals: layout.room(sums)?,
            odd: layout.room(if tensor { 4 * heads } else { 0 })?,
        })
    }

    /// Launches `fused` with calls for the pass by keys, one for each part of the columns, and adds up what its blocks leave by
    /// `collected`, the call for the pass by queries with the place of that sum.
    pub fn run<T: DeviceRepr + Copy, C: DeviceRepr + Copy>(
        &self,
        job: &Job<'_>,
        by: &By<'_>,
        calls: &[T],
        collected: C,
    ) -> Result<(), Error> {
        let (e, counts) = (&job.scores().extents, &job.prepared.counts);
        let by_keys = (counts.by_keys * e.key_heads) as u64;
        let by_rows = 4 * (counts.by_queries * e.query_heads) as u64; // blocks of 16 rows
        let Shares { tiles, held, .. } = self.shares;
        job.queue.fill(job.at(self.odd), self.odd.bytes, 0)?;
        for first in (0..tiles).step_by(held) {
            let slots = self.held(job, first..tiles.min(first + held));
            for &call in calls {
                let with = With { call, slots };
                job.queue.launch(by.fused, by_keys, (by.threads, by.shared), &with)?;
            }
            let with = With { call: collected, slots };
            job.queue.launch(by.collect, by_rows, (by.threads, 0), &with)?;
        }
        Ok(())
    }

    /// Where numbers lie that tell of which key heads the tensor cores leave the gradient of q out; nowhere, if none.
    pub fn odd(&self, job: &Job<'_>) -> Option<u64> {
        (self.odd.bytes > 0).then(|| job.at(self.odd))
    }

    fn held(&self, job: &Job<'_>, tiles: Range<usize>) -> Held {
        Held {
            at: job.at(self.room),
            totals: job.at(self.totals),
            odd: job.at(self.odd),
            first: tiles.start as i32,
            end: tiles.end as i32,
            last: (tiles.end == self.shares.tiles).into(),
        }
    }
}
