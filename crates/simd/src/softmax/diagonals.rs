//! dbias and dτ of lazy attention, (E13) and (E14): sums over diagonals, and over everything.
//!
//! Every tile of keys has partial sums of its own for each query head that shares its key head: dbias of
//! every distance in reverse, then dτ. When a wave is done they are added up, sequence by sequence and
//! tile by tile. So every sum has one order, for any number of threads.

use super::distances::Reach;
use super::operands::Operands;
use super::packs::Packing;
use super::pair::Pair;
use super::tasks::Task;
use crate::lanes::{Isa, Kernel};
use crate::tile::STRIDE;
use ndarray::{ArrayViewMut1, ArrayViewMut2};
use std::ops::Range;

/// The partial sums of a wave, in the order of its tasks: first the tiles with which slots begin, then
/// the tiles behind those.
pub struct Diagonals<'m> {
    memory: &'m mut [f32],
    /// Slots of a wave.
    slots: usize,
    /// Numbers of a query head.
    each: usize,
    /// Numbers of a task.
    part: usize,
    /// Keys of a tile.
    size: usize,
}

impl<'m> Diagonals<'m> {
    /// Numbers of a query head: one for each distance that dbias (or gbias) reaches, and dτ (or gτ).
    pub fn each(operands: &Operands<'_>, dbias: bool, dtau: bool) -> usize {
        let width = operands.distances.filter(|_| dbias);
        let width = width.map_or(0, |(bias, _)| Reach::width(operands, bias));
        if dbias || dtau { width + 1 } else { 0 }
    }

    /// Elements of those of a slot, with so many numbers of a query head.
    pub fn slot(packing: &Packing<'_>, each: usize) -> usize {
        let tiles = packing.longest().1.div_ceil(packing.cut.keys);
        tiles.saturating_mul(each).saturating_mul(packing.scores.group())
    }

    /// The sums of `slots`, in memory for as many.
    pub fn new(memory: &'m mut [f32], slots: usize, packing: &Packing<'_>, each: usize) -> Self {
        let part = each * packing.scores.group();
        Diagonals { memory, slots, each, part, size: packing.cut.keys }
    }

    /// The tasks of the wave from slot `first` on, with their partial sums.
    pub fn with_tasks<'t, 'o>(
        &'t mut self,
        tasks: &'t mut [Task<'o>],
        first: usize,
    ) -> impl Iterator<Item = (&'t mut Task<'o>, &'t mut [f32])> + Send {
        let Diagonals { slots, part, size, .. } = *self;
        let (mut rest, mut from) = (&mut *self.memory, 0);
        tasks.iter_mut().map(move |task| {
            let at = (task.place.rows.start / size * slots + task.slot - first) * part;
            let (_, behind) = std::mem::take(&mut rest).split_at_mut(at - from);
            let (here, behind) = behind.split_at_mut(part);
            (rest, from) = (behind, at + part);
            (task, here)
        })
    }

    /// Adds those of a wave of slots to the sums of the query heads.
    pub fn add_to(&self, totals: &mut [f64], packing: &Packing<'_>, wave: &Range<usize>) {
        let (e, group) = (&packing.scores.extents, packing.scores.group());
        for slot in wave.clone() {
            let keys = packing.sequences[slot / e.key_heads].keys;
            for tile in 0..keys.div_ceil(self.size) {
                let at = (tile * self.slots + slot - wave.start) * self.part;
                for member in 0..group {
                    let head = slot % e.key_heads * group + member;
                    let partial = &self.memory[at + member * self.each..][..self.each];
                    let totals = &mut totals[head * self.each..][..self.each];
                    totals.iter_mut().zip(partial).for_each(|(sum, x)| *sum += f64::from(*x));
                }
            }
        }
    }
}

/// Writes dbias and dτ, from `each` numbers of every query head.
pub fn write_totals(
    totals: &[f64],
    each: usize,
    dbias: Option<ArrayViewMut2<'_, f32>>,
    dtau: Option<ArrayViewMut1<'_, f32>>,
) {
    let heads = || totals.chunks(each.max(1)).filter_map(<[f64]>::split_last);
    if let Some(mut dbias) = dbias {
        dbias.fill(0.0); // distances that do not occur
        for (mut row, (_, sums)) in dbias.outer_iter_mut().zip(heads()) {
            row.iter_mut().zip(sums.iter().rev()).for_each(|(to, sum)| *to = *sum as f32);
        }
    }
    if let Some(mut dtau) = dtau {
        dtau.iter_mut().zip(heads()).for_each(|(to, (sum, _))| *to = *sum as f32);
    }
}

/// Adds dS of a tile, or X of the second order, to the sums of its diagonals.
pub struct DiagonalTile<'a, 'p> {
    /// The head.
    pub pair: Pair<'p>,
    /// The queries, within the sequence.
    pub rows: Range<usize>,
    /// The keys, within the sequence.
    pub cols: Range<usize>,
    /// dS or X, rows [`STRIDE`] apart.
    pub weights: &'a [f32],
    /// The columns of each block that were computed.
    pub strips: &'a [[u32; 2]],
    /// Rows of a block.
    pub height: usize,
    /// The sums, in reverse.
    pub sums: &'a mut [f32],
}

impl Kernel for DiagonalTile<'_, '_> {
    #[inline(always)]
    fn run<I: Isa>(self, _: I) {
        let DiagonalTile { pair, rows, cols, weights, strips, height, sums } = self;
        let reach = pair.rule.reach().filter(|reach| reach.touches(&rows, &cols));
        let Some(reach) = reach.filter(|_| !sums.is_empty()) else { return };
        for (r, i) in rows.enumerate() {
            let [start, end] = strips[r / height].map(|col| cols.start + col as usize);
            let (keys, place) = reach.span(i, &(start..end.min(cols.end)));
            let weights = &weights[r * STRIDE..][keys.start - cols.start..keys.end - cols.start];
            let sums = &mut sums[place..place + weights.len()];
            sums.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight);
        }
    }
}
