//! The number n of keys that each row of lazy attention sees, and from it τ/n and 1/n.

use super::engine::{BlockKernel, Engine, run};
use super::operands::blind;
use super::pair::Pair;
use super::scratch::{Scratch, TileMemory};
use super::tasks::Task;
use super::wave::{Wave, Work};
use crate::tile::MAX_KEYS;
use crate::tiles::tiles;
use etalon_problem::Cover;
use std::ops::Range;

/// Writes τ/n and 1/n of every row of a task, which are zeros at first. A row that sees no key keeps them.
pub fn write_counts(
    wave: Wave<'_>,
    task: &Task<'_>,
    pair: Pair<'_>,
    scratch: &mut Scratch<'_>,
    [offsets, counts]: [&mut [f32]; 2],
) {
    let Work { operands, level, .. } = *wave.work;
    let rows = task.place.rows.clone();
    let counts = &mut counts[..rows.len()];
    let in_tiles = scratch.cut.bf16;
    run(level, in_tiles, CountTile { pair, rows, scratch, counts: &mut *counts });
    let tau = operands.tau.map_or(0.0, |tau| tau[task.place.head]);
    for (r, (offset, count)) in offsets.iter_mut().zip(counts).enumerate() {
        let seen = *count > 0.0 && !blind(operands.lse, wave.row(&task.place, r));
        (*offset, *count) = if seen { (tau / *count, 1.0 / *count) } else { (0.0, 0.0) };
    }
}

/// Counts the keys that each row of a tile of queries sees: n.
struct CountTile<'a, 'm, 'p> {
    pair: Pair<'p>,
    /// The queries, within the sequence.
    rows: Range<usize>,
    scratch: &'a mut Scratch<'m>,
    /// 0 at first.
    counts: &'a mut [f32],
}

impl BlockKernel for CountTile<'_, '_, '_> {
    #[inline(always)]
    fn run<E: Engine>(self, by: E) {
        let CountTile { pair, rows, scratch, counts } = self;
        let Scratch { cut, tiles: memory, .. } = scratch;
        for cols in tiles(0..pair.rule.of.sequence.keys, cut.keys) {
            let by_score = pair.rule.hides() || pair.has_nonfinite(&rows, &cols);
            match pair.rule.cover(rows.clone(), cols.clone()) {
                Cover::None => {}
                _ if by_score => count_by_score(by, &pair, (&rows, &cols), memory, counts),
                Cover::All => counts.iter_mut().for_each(|count| *count += cols.len() as f32),
                Cover::Some => count_by_mask(&pair, &rows, &cols, counts),
            }
        }
    }
}

/// As [`count_by_mask`], where a score may be −∞.
#[inline(always)]
fn count_by_score<E: Engine>(
    by: E,
    pair: &Pair<'_>,
    (rows, cols): (&Range<usize>, &Range<usize>),
    memory: &mut TileMemory<'_>,
    counts: &mut [f32],
) {
    for block in pair.blocks(E::ROWS, rows, cols, None) {
        let Some(strip) = by.scores(pair, &block, memory) else { continue };
        let here = block.rows.start - rows.start..block.rows.end - rows.start;
        strip.count(memory.shares[0].visible, &mut counts[here]);
    }
}

/// Counts the keys that each row of a tile sees, by the mask alone: exact where no score is −∞.
fn count_by_mask(pair: &Pair<'_>, rows: &Range<usize>, cols: &Range<usize>, counts: &mut [f32]) {
    let mut row = [0; MAX_KEYS];
    let row = &mut row[..cols.len()];
    for (i, count) in rows.clone().zip(counts) {
        pair.rule.visible_row(i, cols.clone(), row);
        *count += row.iter().map(|&x| u32::from(x)).sum::<u32>() as f32;
    }
}
