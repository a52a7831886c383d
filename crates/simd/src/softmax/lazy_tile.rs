//! The kernel of lazy attention's forward pass: two sweeps over the tiles of keys, of which the second
//! finds the weights of the first in memory.
//!
//! For a tile of queries, with m = −∞, l = 0, n = 0, o = 0:
//!
//! ```text
//! for each tile of keys J that holds a visible pair
//!     for each register block of queries
//!         S   = σ·Q Kᵀ + bias, mask                              (E1) (E2)
//!         m′  = rowmax S where it exceeds m by more than 5, else m,   l ← l·e^(m−m′)
//!         p   = e^(S−m′),   l ← l + rowsum p,   n ← n + visible pairs
//!         m_J = m′,   top_J = e^(rowmax S − m′), a little raised  p stays, if there is room
//! lse = m + ln l,   c = τ/n                                      (E3)
//! for each tile J with a row in which top_J·f + c > 0, where f = e^(m_J−m) / l
//!     e = max(p·f + c, 0)                                        (E4) (E5)
//!     o ← o + e V, over the panels of keys with an active pair   (E6)
//! ```
//!
//! If Σ a P v is wanted too, S stays instead of p, and P is e^(S−lse), as in the backward pass: so both
//! passes hold the same pairs for active, with the same bits.
//!
//! A [`Unit`] multiplies: registers of f32, or tiles of bf16, which round e before (E6). All else is f32.
//!
//! p·f + c grows with p, rounded or not: so every e of a tile that is left out is 0, and what is left out
//! changes no bit of o. Tiles beyond those for which there is room compute p anew, with the
//! same bits.

mod measure;
mod scratch;
mod unit;

pub use measure::{FULL, MeasureTile, SEEN};
pub use scratch::LazyScratch;

use super::engine::{InTiles, Register, Registers};
use super::forward_tile::RESCALE;
use super::packs::Keys;
use super::rule::ScoreRule;
use super::scores::{ACTIVE, Block, Factors, Strip};
use super::scratch::Words;
use super::weights::{Rows, conceal, mark_active, smallest};
use crate::exp::exp_difference;
use crate::lanes::matrix::{BLOCK, Matrix, MatrixKernel};
use crate::lanes::{Isa, Kernel, Lanes};
use crate::products::Sum;
use crate::tile::{MAX_KEYS, STRIDE};
use crate::tiles::tiles;
use etalon_problem::Cover;
use scratch::Numbers;
use std::ops::Range;
use unit::Unit;

/// A guard for each unit of lse and of an exponent: a few roundings.
const GUARD: f32 = 4.0 * f32::EPSILON;

/// The most lanes of a register, over all instruction sets.
const MAX_LANES: usize = 16;

/// The kernel: one tile of queries against all its keys.
pub struct LazyTile<'t, 'a, 'm> {
    /// The visible pairs, and the scale, softcap and bias of their scores.
    pub rule: ScoreRule<'a>,
    /// The keys and values.
    pub keys: &'a Keys<'a>,
    /// True if a query of the tile is not finite.
    pub has_nonfinite: bool,
    /// The queries, within the sequence.
    pub rows: Range<usize>,
    /// D.
    pub dim: usize,
    /// τ.
    pub tau: f32,
    /// The thread's memory, with the queries packed.
    pub scratch: &'t mut LazyScratch<'m>,
}

/// A block of queries against a tile of keys.
struct At {
    /// Its first row in the tile of queries.
    first: usize,
    /// The number of the tile of keys.
    tile: usize,
    /// The keys.
    cols: Range<usize>,
    /// True if an operand is not finite.
    has_nonfinite: bool,
}

impl LazyScratch<'_> {
    /// The row of the memory of weights at which a block begins.
    #[inline(always)]
    fn row(&self, at: &At) -> usize {
        at.tile.min(self.kept) * self.cut.queries + at.first
    }
}

impl Kernel for LazyTile<'_, '_, '_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        self.forward(Registers(isa));
    }
}

impl MatrixKernel for LazyTile<'_, '_, '_> {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) {
        self.forward(InTiles(by));
    }
}

impl LazyTile<'_, '_, '_> {
    /// Both sweeps.
    #[inline(always)]
    fn forward<U: Unit>(mut self, unit: U) {
        self.begin(unit);
        self.sweep::<U>(
            #[inline(always)]
            |tile, at| tile.add(unit, at),
        );
        if self.sums_values::<U>() {
            self.join(unit.isa());
        }
    }

    /// The first sweep: lse, and the weights that stay.
    #[inline(always)]
    fn begin<U: Unit>(&mut self, unit: U) {
        let Numbers { m, l, n, .. } = &mut self.scratch.numbers;
        m.fill(f32::NEG_INFINITY);
        l.fill(0.0);
        n.fill(0.0);
        self.scratch.o.fill(0.0);
        self.scratch.pv.fill(0.0);
        self.sweep::<U>(
            #[inline(always)]
            |tile, at| tile.softmax_weights(unit, at),
        );
        for r in 0..self.scratch.numbers.m.len() {
            self.finish(unit.isa(), r);
        }
    }

    /// Visits the blocks of the tiles that hold a visible pair.
    #[inline(always)]
    fn sweep<U: Unit>(&mut self, visit: impl Fn(&mut Self, &At)) {
        let cut = self.scratch.cut;
        for (tile, cols) in tiles(0..self.rule.of.sequence.keys, cut.keys).enumerate() {
            if self.rule.cover(self.rows.clone(), cols.clone()) == Cover::None {
                continue;
            }
            let has_nonfinite = self.has_nonfinite || self.keys.non_finite.touches(cols.clone());
            for first in (0..self.rows.len()).step_by(U::ROWS) {
                visit(self, &At { first, tile, cols: cols.clone(), has_nonfinite });
            }
        }
    }

    /// The rows that are computed of a block.
    #[inline(always)]
    fn height<U: Unit>(&self, at: &At) -> usize {
        U::rows(self.rows.len() - at.first)
    }

    /// The place in which the strip of a block is kept.
    #[inline(always)]
    fn strip<U: Unit>(&mut self, at: &At) -> &mut [u32; 4] {
        let blocks = self.scratch.cut.queries / U::ROWS;
        &mut self.scratch.strips[at.tile * blocks + at.first / U::ROWS]
    }

    /// S of a block, and the maxima of its rows.
    #[inline(always)]
    fn scores<U: Unit>(
        &mut self,
        unit: U,
        at: &At,
        max: &mut [Register<U>; BLOCK],
    ) -> Option<Strip> {
        let start = self.rows.start + at.first;
        let (rule, row) = (self.rule, self.scratch.row(at));
        let LazyScratch { q, weights, visible, .. } = &mut *self.scratch;
        let factors = Factors {
            rule: &rule,
            rows: start..self.rows.end.min(start + U::ROWS),
            cols: at.cols.clone(),
            q: q.from(at.first / U::ROWS),
            k: self.keys.k.across.from(at.cols.start / U::COLS),
            dim: self.dim,
            note_visible: at.has_nonfinite || rule.hides(),
        };
        let mut block = Block {
            s: &mut weights[row * STRIDE..],
            tanh: &mut [],
            visible: &mut visible[row * MAX_KEYS..],
        };
        unit.score_rows(&factors, &mut block, max)
    }

    /// p of a block, and what its rows add to m, l and n.
    #[inline(always)]
    fn softmax_weights<U: Unit>(&mut self, unit: U, at: &At) {
        let (isa, rows) = (unit.isa(), self.height::<U>(at));
        let mut max = [Register::<U>::splat(isa, f32::NEG_INFINITY); BLOCK];
        let found = self.scores(unit, at, &mut max);
        *self.strip::<U>(at) = found.as_ref().map_or([0; 4], Strip::to_numbers);
        let Some(strip) = found else { return };
        let row = at.tile * self.scratch.numbers.m.len() + at.first;
        let place = self.scratch.row(at);
        let Numbers { m, l, n, m_of, top_of, .. } = &mut self.scratch.numbers;
        let mut largest = [f32::NEG_INFINITY; BLOCK];
        for (r, max) in max[..rows].iter().enumerate() {
            let (m, grown) = (&mut m[at.first + r], max.reduce_max());
            largest[r] = grown;
            // From m = −∞ every score is growth.
            if grown > *m + RESCALE {
                let factor = exp_difference(
                    isa,
                    Register::<U>::splat(isa, *m),
                    Register::<U>::splat(isa, grown),
                );
                let l = &mut l[(at.first + r) * MAX_LANES..][..Register::<U>::N];
                (Register::<U>::load(isa, l) * factor).store(l);
                *m = grown;
            }
            // A row that has seen nothing: any finite m gives the weight e^−∞ = 0.
            m_of[row + r] = if *m == f32::NEG_INFINITY { 0.0 } else { *m };
        }
        bound(isa, &mut largest, &m_of[row..][..rows]);
        top_of[row..][..rows].copy_from_slice(&largest[..rows]);
        let visible = &self.scratch.visible[place * MAX_KEYS..];
        strip.count(visible, &mut n[at.first..][..rows]);
        self.exponentials(isa, at, (&strip, rows), true);
    }

    /// p = e^(S−m_J) of a block, in place of S unless that is read again; with `first` also l of its rows.
    #[inline(always)]
    fn exponentials<I: Isa>(
        &mut self,
        isa: I,
        at: &At,
        (strip, rows): (&Strip, usize),
        first: bool,
    ) {
        let place = self.scratch.row(at);
        let LazyScratch { weights, numbers, active, .. } = &mut *self.scratch;
        let keep = !active.is_empty();
        let Numbers { m, l, m_of, .. } = numbers;
        let row = at.tile * m.len() + at.first;
        let weights = &mut weights[place * STRIDE..];
        for r in 0..rows {
            let m = I::F32::splat(isa, m_of[row + r]);
            let l = &mut l[(at.first + r) * MAX_LANES..][..I::F32::N];
            let mut sum = I::F32::splat(isa, 0.0);
            for s in weights[r * STRIDE..][strip.cols.clone()].chunks_exact_mut(I::F32::N) {
                let p = exp_difference(isa, I::F32::load(isa, s), m);
                sum = sum + p;
                if !keep {
                    p.store(s);
                }
            }
            if first {
                (I::F32::load(isa, l) + sum).store(l);
            }
        }
    }

    /// (E3) lse = m + ln l, and 1/l and c of row `r`. A row that sees nothing has no weight.
    #[inline(always)]
    fn finish<I: Isa>(&mut self, isa: I, r: usize) {
        let Numbers { m, l, n, inverse, offset, base, .. } = &mut self.scratch.numbers;
        let l = I::F32::load(isa, &l[r * MAX_LANES..]).reduce_add();
        let seen = r < self.rows.len() && n[r] > 0.0;
        inverse[r] = if seen { 1.0 / l } else { 0.0 };
        offset[r] = if seen { self.tau / n[r] } else { 0.0 };
        let lse = (f64::from(m[r]) + f64::from(l).ln()) as f32;
        base[r] = if seen { lse } else { f32::INFINITY };
        if let Some(to) = self.scratch.lse.get_mut(r) {
            *to = if seen { lse } else { f32::NEG_INFINITY };
        }
    }

    /// Adds e V of a block to o, if a pair of it is active.
    #[inline(always)]
    fn add<U: Unit>(&mut self, unit: U, at: &At) {
        let (isa, rows) = (unit.isa(), self.height::<U>(at));
        let strip = Strip::of_numbers(*self.strip::<U>(at));
        if strip.cols.is_empty() || !self.is_active(isa, at, rows) {
            return;
        }
        let again = at.tile >= self.scratch.kept && self.scores_again(unit, at);
        if !self.scratch.active.is_empty() {
            self.normalise(isa, at, (&strip, rows));
        } else if again {
            self.exponentials(isa, at, (&strip, rows), false);
        }
        let mut run = strip.cols.start..strip.cols.start;
        for column in strip.cols.clone().step_by(U::COLS) {
            let next = column + U::COLS;
            if self.shift::<U>(isa, at, rows, column) {
                run.end = next;
            } else {
                self.multiply(unit, at, &strip, &run);
                run = next..next;
            }
        }
        self.multiply(unit, at, &strip, &run);
    }

    /// S of a block whose weights did not stay; true if it has a visible pair.
    #[inline(always)]
    fn scores_again<U: Unit>(&mut self, unit: U, at: &At) -> bool {
        let mut max = [Register::<U>::splat(unit.isa(), f32::NEG_INFINITY); BLOCK];
        self.scores(unit, at, &mut max).is_some()
    }

    /// P = e^(S−lse) of a block, so that f = 1.
    #[inline(always)]
    fn normalise<I: Isa>(&mut self, isa: I, at: &At, (strip, rows): (&Strip, usize)) {
        let place = self.scratch.row(at);
        let LazyScratch { weights, numbers: Numbers { base, factor, .. }, .. } = &mut *self.scratch;
        for r in 0..rows {
            let lse = I::F32::splat(isa, base[at.first + r]);
            factor[at.first + r] = 1.0;
            let weights = &mut weights[(place + r) * STRIDE..][strip.cols.clone()];
            for s in weights.chunks_exact_mut(I::F32::N) {
                exp_difference(isa, I::F32::load(isa, s), lse).store(s);
            }
        }
    }

    /// f of the rows of a block, and whether the largest weight of one of them is active; where P is not
    /// p·f, with a guard of what they may differ by: the roundings of lse and of both exponents.
    #[inline(always)]
    fn is_active<I: Isa>(&mut self, isa: I, at: &At, rows: usize) -> bool {
        let guarded = !self.scratch.active.is_empty();
        let Numbers { m, inverse, offset, factor, base, m_of, top_of, .. } =
            &mut self.scratch.numbers;
        let row = at.tile * m.len();
        let mut raised = [0.0; BLOCK + MAX_LANES];
        let start = at.first / I::F32::N * I::F32::N;
        for r in (start..at.first + rows).step_by(I::F32::N) {
            let m_of = I::F32::load(isa, &m_of[row + r..]);
            let f = exp_difference(isa, m_of, I::F32::load(isa, &m[r..]));
            let f = f * I::F32::load(isa, &inverse[r..]);
            f.store(&mut factor[r..]);
            let mut top = I::F32::load(isa, &top_of[row + r..]);
            if guarded {
                let (base, zero) = (I::F32::load(isa, &base[r..]), I::F32::splat(isa, 0.0));
                let size = (zero - base).max(base);
                let most = I::F32::splat(isa, f32::MAX);
                let size = size.select_less(most, size, most);
                let guard = (size + I::F32::splat(isa, 32.0)) * I::F32::splat(isa, GUARD);
                top = top.mul_add(guard, top);
            }
            let c = I::F32::load(isa, &offset[r..]);
            top.mul_add(f, c).store(&mut raised[r - start..]);
        }
        raised[at.first - start..][..rows].iter().any(|raised| *raised > 0.0 || raised.is_nan())
    }

    /// True if Σ a v is summed beside o, from which Σ a P v follows: rounded weights P would err by more than e does
    /// where c is below 0, while a is 1.
    #[inline(always)]
    fn sums_values<U: Unit>(&self) -> bool {
        U::ROUNDS && !self.scratch.active.is_empty() && self.tau < 0.0
    }

    /// (E5) e = max(p·f + c, 0) of a panel of a block; whether one is above 0, or NaN. If it is wanted,
    /// also p·f of the active pairs, or 1.
    #[inline(always)]
    fn shift<U: Unit>(&mut self, isa: U::Isa, at: &At, rows: usize, column: usize) -> bool {
        let (place, sums_values) = (self.scratch.row(at), self.sums_values::<U>());
        let LazyScratch { weights, active, numbers: Numbers { factor, offset, .. }, .. } =
            &mut *self.scratch;
        let weights = &mut weights[place * STRIDE..];
        let factors = factor[at.first..].iter().zip(&offset[at.first..]);
        let (zero, one) = (Register::<U>::splat(isa, 0.0), Register::<U>::splat(isa, 1.0));
        let mut any = zero;
        for (r, (&f, &c)) in factors.take(rows).enumerate() {
            let (f, c) = (Register::<U>::splat(isa, f), Register::<U>::splat(isa, c));
            let here = r * STRIDE + column;
            let row = &mut weights[here..][..U::COLS];
            if !active.is_empty() {
                let active = &mut active[here..][..U::COLS];
                for (p, active) in row
                    .chunks_exact(Register::<U>::N)
                    .zip(active.chunks_exact_mut(Register::<U>::N))
                {
                    let p = Register::<U>::load(isa, p);
                    let e = p.mul_add(f, c);
                    let of_active = if sums_values { one } else { p * f };
                    zero.max(e).select_less(smallest(isa), zero, of_active).store(active);
                }
            }
            for p in row.chunks_exact_mut(Register::<U>::N) {
                // `max` returns its second operand where either is NaN: so a NaN shows.
                let e = zero.max(Register::<U>::load(isa, p).mul_add(f, c));
                any = any + e;
                e.store(p);
            }
        }
        any.reduce_add() != 0.0
    }

    /// o ← o + e V over some panels of a block, and pv if it is wanted.
    #[inline(always)]
    fn multiply<U: Unit>(&mut self, unit: U, at: &At, strip: &Strip, run: &Range<usize>) {
        if run.is_empty() {
            return;
        }
        let (rows, place) = (self.height::<U>(at), self.scratch.row(at));
        let exact = self.sums_values::<U>();
        let LazyScratch { o, pv, stride, weights, active, visible, words, .. } = &mut *self.scratch;
        let weights = &mut weights[place * STRIDE..];
        let visible = &mut visible[place * MAX_KEYS..];
        let strip = strip.within(run);
        conceal([&mut *weights], visible, &strip, rows);
        if !active.is_empty() {
            conceal([&mut **active], visible, &strip, rows);
        }
        if at.has_nonfinite {
            mark_active(weights, visible, run, rows);
        }
        let (stride, has_nonfinite, values) = (*stride, at.has_nonfinite, &self.keys.v.along);
        let of_pv = if exact { 1 } else { words.pieces };
        let terms: [(&mut [f32], &[f32], usize); 2] =
            [(&mut **o, weights, words.pieces), (&mut **pv, &**active, of_pv)];
        for (acc, weights, pieces) in terms {
            if !weights.is_empty() {
                let sum = Sum { acc: &mut acc[at.first * stride..], stride };
                let weights = Rows { weights, visible, pairs: ACTIVE, has_nonfinite };
                let words = &mut Words { memory: &mut *words.memory, pieces };
                unit.grow_rows(&weights, sum, values, [&at.cols, run], words); // (E6)
            }
        }
    }

    /// Σ a P v from Σ a v, in its place: with P = e − c it is o − c Σ a v, whose terms do not cancel.
    #[inline(always)]
    fn join<I: Isa>(&mut self, isa: I) {
        let LazyScratch { o, pv, stride, numbers: Numbers { offset, .. }, .. } = &mut *self.scratch;
        let rows = o.chunks_exact(*stride).zip(pv.chunks_exact_mut(*stride));
        for ((o, pv), &c) in rows.zip(offset.iter()).take(self.rows.len()) {
            // Under an infinite c nothing is active.
            let less = I::F32::splat(isa, if c == f32::NEG_INFINITY { 0.0 } else { -c });
            for (o, pv) in o.chunks_exact(I::F32::N).zip(pv.chunks_exact_mut(I::F32::N)) {
                I::F32::load(isa, pv).mul_add(less, I::F32::load(isa, o)).store(pv);
            }
        }
    }
}

/// The largest score of each row of a block becomes what no weight e^(S−m_J) of the row exceeds: its own
/// weight, and what two exponentials may err by.
#[inline(always)]
fn bound<I: Isa>(isa: I, largest: &mut [f32; BLOCK], m_of: &[f32]) {
    let mut m = [0.0; BLOCK];
    m[..m_of.len()].copy_from_slice(m_of);
    let guard = I::F32::splat(isa, 1.0 + GUARD);
    let largest = largest[..m_of.len().next_multiple_of(I::F32::N)].chunks_exact_mut(I::F32::N);
    for (s, m) in largest.zip(m.chunks_exact(I::F32::N)) {
        let top = exp_difference(isa, I::F32::load(isa, s), I::F32::load(isa, m));
        (top * guard).store(s);
    }
}
