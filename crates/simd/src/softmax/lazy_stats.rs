//! Statistics of the weights of lazy attention, (E37)–(E46), and which tiles hold an active pair.
//!
//! The forward pass, whose last sweep counts instead of adding e V: its result has a row of figures for
//! each query. They are added up in the order of the rows, in f64, whatever the number of threads.

use super::cut::Cut;
use super::lazy_forward::{LazyForward, cut};
use super::lazy_tile::{FULL, SEEN};
use super::lazy_tile::{LazyScratch, MeasureTile};
use super::operands::Operands;
use super::packs::{Operand, Packing};
use super::streamed::{Places, Streamed, Tile, sweep};
use super::tasks::Task;
use crate::known::Known;
use crate::memory::zeros;
use crate::named::Inputs;
use crate::workspace::Parts;
use crate::{Options, Workspace};
use etalon_problem::lazy_attention::{Figure, Stats};
use etalon_problem::{Blocking, Error, Scores, Views};
use ndarray::{Array3, Array4};

/// The figures of every row, `[B, Hq, N, figures and tiles]`.
pub fn figures(
    known: &Known,
    scores: &Scores,
    inputs: &Views<'_>,
    tile: Blocking,
    options: &Options,
) -> Result<Array4<f32>, Error> {
    tile.check()?;
    let (workspace, operands) = (Workspace::new(), Operands::of(known, scores, Inputs(inputs))?);
    let e = &scores.extents;
    let width = Figure::COUNT.saturating_add(e.keys.div_ceil(tile.keys));
    let mut figures = zeros((e.batch, e.query_heads, e.queries, width), "statistics")?;
    let mut lse: Array3<f32> = zeros(scores.row_shape(), "lse")?;
    let Some(tau) = operands.tau else { return Ok(figures) };
    let forward = LazyForward { operands: &operands, tau, pv: true, level: options.level };
    let places = Places { o: Some(figures.view_mut().into()), pv: None, lse: lse.view_mut() };
    sweep(&workspace, &Measure { forward, tile: tile.keys, width }, places, options)?;
    Ok(figures)
}

struct Measure<'a> {
    forward: LazyForward<'a>,
    /// Keys of a tile of the statistics.
    tile: usize,
    /// Numbers of a row.
    width: usize,
}

impl Streamed for Measure<'_> {
    type Scratch<'m> = LazyScratch<'m>;

    fn operands(&self) -> &Operands<'_> {
        self.forward.operands
    }

    fn packing(&self, options: &Options) -> Result<Packing<'_>, Error> {
        let Operands { scores, sequences, k, .. } = *self.forward.operands;
        let cut = cut(self.forward.operands, options)?;
        let keys = [Operand::across(Some(k)), Operand::NONE, Operand::NONE, Operand::NONE];
        Ok(Packing { scores, sequences, cut, keys, queries: [Operand::NONE; 4], lse: None })
    }

    fn products(&self) -> usize {
        1
    }

    fn scratch<'m>(&self, parts: &mut Parts<'m>, cut: &Cut, keys: usize) -> LazyScratch<'m> {
        let dims = (self.forward.operands.scores.extents.dim, self.width);
        LazyScratch::new(parts, cut, dims, keys, self.forward.pv)
    }

    fn tile(&self, task: &mut Task<'_>, tile: Tile<'_>, scratch: &mut LazyScratch<'_>) {
        let (bf16, level) = (scratch.is_bf16(), self.forward.level);
        let kernel =
            MeasureTile { tile: self.forward.kernel(task, tile, scratch), keys: self.tile };
        match bf16 {
            true => level.run_tiles(kernel).unwrap_or_default(),
            false => level.run(kernel),
        }
        task.write(0, scratch.o, scratch.stride, 1.0);
    }
}

/// The statistics in tiles of this size.
pub fn stats(scores: &Scores, figures: &Array4<f32>, tile: Blocking) -> Stats {
    let rows = figures.rows().into_iter().map(|row| std::array::from_fn(|figure| row[figure]));
    Stats::of_rows(rows, count_tiles(scores, figures, tile))
}

/// Tiles in which a pair is visible, and those in which one is active.
fn count_tiles(scores: &Scores, figures: &Array4<f32>, tile: Blocking) -> [usize; 2] {
    let mut count = [0; 2];
    each_tile(scores, figures, tile, |_, state| {
        count[0] += usize::from(state >= SEEN);
        count[1] += usize::from(state >= FULL);
    });
    count
}

/// Flags of the tiles that hold an active pair, `[B, Hq, ⌈N/queries⌉, ⌈M/keys⌉]`.
pub fn activity(
    scores: &Scores,
    figures: &Array4<f32>,
    tile: Blocking,
) -> Result<Array4<bool>, Error> {
    let e = &scores.extents;
    let (rows, cols) = (e.queries.div_ceil(tile.queries), e.keys.div_ceil(tile.keys));
    let flags: Array4<u8> = zeros((e.batch, e.query_heads, rows, cols), "activity")?;
    let mut flags = flags.mapv(|flag| flag != 0);
    each_tile(scores, figures, tile, |at, state| flags[at] = state >= FULL);
    Ok(flags)
}

/// Visits every tile with the most that a row of it says of it.
fn each_tile(
    scores: &Scores,
    figures: &Array4<f32>,
    tile: Blocking,
    mut visit: impl FnMut([usize; 4], f32),
) {
    let e = &scores.extents;
    for (batch, head) in (0..e.batch).flat_map(|b| (0..e.query_heads).map(move |h| (b, h))) {
        for first in (0..e.queries).step_by(tile.queries) {
            let rows = first..e.queries.min(first.saturating_add(tile.queries));
            for col in 0..e.keys.div_ceil(tile.keys) {
                let of_row = |i: usize| figures[[batch, head, i, Figure::COUNT + col]];
                let most = rows.clone().map(of_row).fold(0.0, f32::max);
                visit([batch, head, first / tile.queries, col], most);
            }
        }
    }
}
