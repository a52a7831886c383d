//! The kernel of the statistics of lazy attention, with the first sweep of the forward pass.

use super::unit::Unit;
use super::{At, LazyScratch, LazyTile};
use crate::lanes::matrix::{Matrix, MatrixKernel};
use crate::lanes::{Isa, Kernel};
use crate::softmax::engine::{InTiles, Registers};
use crate::softmax::scores::Strip;
use crate::tile::{MAX_KEYS, STRIDE};
use etalon_problem::lazy_attention::Figure;

/// States of a tile of keys, behind the figures of a row: the row sees a pair in it, and a pair is active.
pub const SEEN: f32 = 1.0;
pub const FULL: f32 = 2.0;

/// The kernel of the statistics: in place of o it leaves figures of each row.
pub struct MeasureTile<'t, 'a, 'm> {
    pub tile: LazyTile<'t, 'a, 'm>,
    /// Keys of a tile of the statistics, of which the first begins with the arrays.
    pub keys: usize,
}

impl Kernel for MeasureTile<'_, '_, '_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        self.measure(Registers(isa));
    }
}

impl MatrixKernel for MeasureTile<'_, '_, '_> {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) {
        self.measure(InTiles(by));
    }
}

impl MeasureTile<'_, '_, '_> {
    #[inline(always)]
    fn measure<U: Unit>(self, unit: U) {
        let MeasureTile { mut tile, keys } = self;
        tile.begin(unit);
        tile.sweep::<U>(
            #[inline(always)]
            |tile, at| {
                let strip = Strip::of_numbers(*tile.strip::<U>(at));
                if at.tile >= tile.scratch.kept {
                    tile.scores_again(unit, at);
                }
                tile.normalise(unit.isa(), at, (&strip, tile.height::<U>(at)));
                for r in at.first..tile.rows.len().min(at.first + U::ROWS) {
                    tile.measure(at, &strip, r, keys);
                }
            },
        );
    }
}

impl LazyTile<'_, '_, '_> {
    /// Adds the pairs of row `r` of a block to its figures.
    fn measure(&mut self, at: &At, strip: &Strip, r: usize, keys: usize) {
        let (row, key_start) =
            (self.scratch.row(at) + r - at.first, self.rule.of.sequence.key_start);
        let LazyScratch { o, stride, weights, visible, numbers, .. } = &mut *self.scratch;
        let figures = &mut o[r * *stride..][..*stride];
        for col in strip.cols.start..strip.cols.end.min(at.cols.len()) {
            let is_edge = strip.edges().iter().any(|edge| edge.contains(&col));
            if is_edge && visible[row * MAX_KEYS + col] == 0 {
                continue;
            }
            let p = weights[row * STRIDE + col];
            let raised = p + numbers.offset[r];
            let active = raised > 0.0 || raised.is_nan();
            let key = at.cols.start + col;
            figures[Figure::Visible as usize] += 1.0;
            figures[if active { Figure::Active } else { Figure::Inactive } as usize] +=
                if active { 1.0 } else { p };
            if active {
                figures[Figure::Surviving as usize] += raised;
            }
            if key == 0 {
                figures[Figure::FirstWeight as usize] = p;
                figures[Figure::FirstKept as usize] = if active { raised } else { 0.0 };
            }
            let state = &mut figures[Figure::COUNT + (key_start + key) / keys];
            *state = state.max(if active { FULL } else { SEEN });
        }
    }
}
