//! The host's forward pass.

use super::{Job, Rows};
use crate::zoo::host::Softmax;
use crate::zoo::mutant::Mutant;
use etalon_problem::Sequence;
use std::ops::Range;

pub(super) struct Forward {
    pub o: Rows,
    pub lse: Rows,
}

/// What the first sweep finds of a row.
struct Swept {
    lse: f32,
    /// n.
    count: usize,
    /// The largest score of each tile.
    maxima: Vec<f32>,
}

impl Job<'_> {
    pub(super) fn forward(&self) -> Forward {
        let e = self.problem.scores.extents;
        let unwritten = if self.is(Mutant::PaddingUnwritten) { 1e30 } else { 0.0 };
        let mut o = Rows::filled(self.problem.o_shape(), unwritten);
        let mut lse = Rows::filled([e.batch, e.query_heads, e.queries, 1], f32::NEG_INFINITY);
        for sequence in self.problem.scores.sequences() {
            for h in 0..e.query_heads {
                for i in 0..sequence.queries {
                    let (b, row) = (sequence.batch, sequence.query_start + i);
                    let swept = self.sweep(&sequence, h, i);
                    lse.row_mut(b, h, row)[0] = swept.lse;
                    self.output(&sequence, (h, i), &swept, o.row_mut(b, h, row));
                }
            }
        }
        Forward { o, lse }
    }

    /// (E3): a streaming sum over the tiles.
    fn sweep(&self, sequence: &Sequence, h: usize, i: usize) -> Swept {
        let tiles = self.tiles(sequence);
        let (mut m, mut l, mut count) = (f32::NEG_INFINITY, 0f32, 0);
        let maxima: Vec<f32> =
            tiles.iter().map(|tile| self.maximum(sequence, (h, i), tile.clone())).collect();
        if self.style.softmax == Softmax::TwoPass {
            m = maxima.iter().fold(m, |m, &x| larger(m, x));
        }
        for (tile, &maximum) in tiles.into_iter().zip(&maxima) {
            let next = larger(m, maximum);
            let far = next > m + 5.0 || m == f32::NEG_INFINITY || next.is_nan();
            if next != m && (self.style.softmax != Softmax::Lazy || far) {
                l *= if m == f32::NEG_INFINITY { 0.0 } else { self.exp(m - next) };
                m = next;
            }
            for j in tile {
                let s = self.score(sequence, h, i, j);
                if self.visible(sequence, h, i, j) && s != f32::NEG_INFINITY {
                    l += self.exp(s - m);
                    count += 1;
                }
            }
        }
        Swept { lse: if count == 0 { f32::NEG_INFINITY } else { m + l.ln() }, count, maxima }
    }

    fn maximum(&self, sequence: &Sequence, (h, i): (usize, usize), tile: Range<usize>) -> f32 {
        let seen = tile.filter(|&j| self.visible(sequence, h, i, j));
        seen.fold(f32::NEG_INFINITY, |m, j| larger(m, self.score(sequence, h, i, j)))
    }

    /// (E4) to (E6), tile by tile; tiles that the maxima show to be inactive are left out.
    fn output(&self, sequence: &Sequence, (h, i): (usize, usize), swept: &Swept, o: &mut [f32]) {
        o.fill(0.0);
        let mut left = 0f32;
        for (tile, &maximum) in self.tiles(sequence).into_iter().zip(&swept.maxima) {
            if self.skips(h, swept, maximum) {
                continue;
            }
            for j in tile {
                let s = self.score(sequence, h, i, j);
                let seen = self.visible(sequence, h, i, j) && s != f32::NEG_INFINITY;
                if !seen && !self.is(Mutant::OffsetOfInvisible) {
                    continue;
                }
                let p = if seen { self.exp(s - swept.lse) } else { 0.0 };
                let (raised, active) =
                    self.raised(p, self.offset(h, i, j, swept.count, sequence.keys));
                if !active && !self.is(Mutant::IdleTimesZero) {
                    continue;
                }
                let e = if active { raised } else { 0.0 };
                left += e;
                let v = self.v.row(sequence.batch, h / self.group(), sequence.key_start + j);
                o.iter_mut().zip(v).for_each(|(o, v)| *o += e * v);
            }
        }
        if self.is(Mutant::Renormalised) && left > 0.0 {
            o.iter_mut().for_each(|o| *o /= left);
        }
    }

    /// (E18), with a guard of 2⁻¹⁰: far more than the roundings of scores of ordinary size.
    fn skips(&self, h: usize, swept: &Swept, maximum: f32) -> bool {
        let tau = self.tau[h];
        let count = if self.is(Mutant::SkipWithoutCount) { 1 } else { swept.count };
        if self.is(Mutant::OffsetOfInvisible) || tau >= 0.0 || count == 0 {
            return false;
        }
        let threshold = swept.lse + (-tau / count as f32).ln();
        let guard = 1e-3 * (1.0 + swept.lse.abs() + maximum.abs());
        maximum < threshold - guard
    }
}

/// The larger of two; NaN wins: `max` would drop it.
fn larger(x: f32, y: f32) -> f32 {
    if x.is_nan() || y.is_nan() { f32::NAN } else { x.max(y) }
}
