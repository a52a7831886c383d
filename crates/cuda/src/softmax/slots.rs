//! The gradient of q in the pass by keys: `kernels/fused.cuh`.

use crate::gpu::Kernels;
use crate::room::Layout;
use crate::softmax::Job;
use crate::softmax::portable::{Call, Tensor};
use crate::softmax::prepared::{Prepared, Slots};
use crate::variant::width;
use cudarc::driver::DeviceRepr;
use etalon_problem::Error;
use std::ops::Range;

/// The most memory that slots take, in bytes.
const BUDGET: usize = 256 << 20;

/// Columns of a slot.
const COLUMNS: usize = 64;

/// `Slots` of `fused.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Held {
    at: u64,
    totals: u64,
    first: i32,
    end: i32,
    last: i32,
}

/// What kernels are told: a call and the slots, as `Collected` of `fused.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct With<T> {
    call: T,
    slots: Held,
}

// SAFETY: the fields, their types and their order are those of `Collected` of `fused.cuh` and `FusedSecond` of
// `portable_second.cu`, and it holds no reference of the host.
unsafe impl<T: DeviceRepr> DeviceRepr for With<T> {}

impl Slots {
    /// Slots for a pass of the portable kernels, where these compute the gradient of q in the pass by keys: beside
    /// one of these others, in few columns, where the tiles of keys that fit the budget keep the device busy.
    pub fn new(
        prepared: &Prepared<'_>,
        others: [&str; 2],
        layout: &mut Layout,
    ) -> Result<Option<Slots>, Error> {
        let e = &prepared.scores.extents;
        let columns = e.dim.max(prepared.value_dim.unwrap_or(1));
        if width(columns) != COLUMNS || !others.into_iter().any(|name| prepared.has(name)) {
            return Ok(None);
        }
        let rows = prepared.scores.row_shape().iter().product::<usize>();
        let Some(each) = rows.checked_mul(4 * COLUMNS).filter(|&each| each > 0) else {
            return Ok(None);
        };
        let by_keys = &prepared.rows.by_keys;
        let tiles = by_keys.iter().map(|task| task[3] as usize + 1).max().unwrap_or(0);
        let all_fit = tiles <= BUDGET / each;
        // One holds the sums of the tiles before.
        let held = if all_fit { tiles } else { (BUDGET / each).saturating_sub(1) };
        let blocks = held * (by_keys.len() / tiles.max(1)) * e.key_heads;
        if held == 0 || !all_fit && blocks < 2 * prepared.device().multiprocessors {
            return Ok(None);
        }
        let totals = layout.room(if all_fit { 0 } else { each })?;
        Ok(Some(Slots { room: layout.room(held * each)?, totals, tiles, held }))
    }

    /// Launches `fused` with a call for the pass by keys, and adds up what its blocks leave: to `to`, by a call for
    /// the pass by queries.
    pub fn run<T: DeviceRepr + Copy>(
        &self,
        job: &Job<'_>,
        kernels: &Kernels,
        threads: u32,
        fused: T,
        (call, to): (Call, Tensor),
    ) -> Result<(), Error> {
        let (e, rows) = (&job.scores().extents, &job.prepared.rows);
        let by_keys = (rows.by_keys.len() * e.key_heads) as u64;
        let by_rows = 4 * (rows.by_queries.len() * e.query_heads) as u64; // blocks of 16 rows
        let block = (threads, 0);
        let collected = call.with_dq(to);
        for first in (0..self.tiles).step_by(self.held) {
            let slots = self.held(job, first..self.tiles.min(first + self.held));
            let with = With { call: fused, slots };
            job.queue.launch(kernels.get("fused")?, by_keys, block, &with)?;
            let with = With { call: collected, slots };
            job.queue.launch(kernels.get("collect")?, by_rows, block, &with)?;
        }
        Ok(())
    }

    fn held(&self, job: &Job<'_>, tiles: Range<usize>) -> Held {
        Held {
            at: job.at(self.room),
            totals: job.at(self.totals),
            first: tiles.start as i32,
            end: tiles.end as i32,
            last: (tiles.end == self.tiles).into(),
        }
    }
}
