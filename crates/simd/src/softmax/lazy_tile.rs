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
//! p·f + c grows with p, rounded or not: so every e of a tile that is left out is 0, and what is left out
//! changes no bit of o. Tiles beyond those for which there is room compute p anew, with the
//! same bits.

mod measure;

pub use measure::{FULL, MeasureTile, SEEN};

use super::cut::Cut;
use super::forward_tile::RESCALE;
use super::packs::Keys;
use super::rule::ScoreRule;
use super::scores::{ACTIVE, Block, Factors, Strip, score_block};
use super::weights::{Rows, conceal, mark_active, smallest};
use crate::exp::exp_difference;
use crate::lanes::{Isa, Kernel, Lanes, Tile};
use crate::pack::Packed;
use crate::products::Sum;
use crate::tile::{MAX_KEYS, MAX_ROWS, STRIDE};
use crate::tiles::tiles;
use crate::workspace::Parts;
use etalon_problem::Cover;
use std::ops::Range;

/// Bytes of weights that a thread keeps, at most: beyond, to read them back from a far cache costs as
/// much as to compute them anew.
const KEPT: usize = 4 << 20;

/// A guard for each unit of lse and of an exponent: a few roundings.
const GUARD: f32 = 4.0 * f32::EPSILON;

/// The most lanes of a register, over all instruction sets.
const MAX_LANES: usize = 16;

/// The memory of one thread. Tiles of keys are numbered from the first of the sequence.
pub struct LazyScratch<'m> {
    cut: Cut,
    /// Queries, packed across.
    pub q: Packed<'m>,
    pub lse: &'m mut [f32],
    /// o of every row, rows `stride` apart.
    pub o: &'m mut [f32],
    pub stride: usize,
    /// Σ a P v of every row, as o; empty where it is not wanted.
    pub pv: &'m mut [f32],
    numbers: Numbers<'m>,
    /// Tiles of weights that stay; the tile behind them holds one of the others.
    kept: usize,
    /// p, then e, of a tile after the other, rows [`STRIDE`] apart.
    weights: &'m mut [f32],
    /// 1 for visible pairs, rows [`MAX_KEYS`] apart; later, in tiles that are not finite, with [`ACTIVE`] for
    /// active ones.
    visible: &'m mut [u8],
    /// P of the active pairs of a register block, where pv is wanted; otherwise empty.
    active: &'m mut [f32],
    /// The strip of each register block of each tile.
    strips: &'m mut [[u32; 4]],
}

/// Numbers of rows, of each as many as tiles have, up to a whole register.
struct Numbers<'m> {
    m: &'m mut [f32],
    /// l, spread over lanes.
    l: &'m mut [f32],
    n: &'m mut [f32],
    /// 1/l.
    inverse: &'m mut [f32],
    /// c.
    offset: &'m mut [f32],
    /// f of the tile of keys at hand.
    factor: &'m mut [f32],
    /// Of rows that see something lse, of the others +∞.
    base: &'m mut [f32],
    /// m_J and top_J of each tile of keys.
    m_of: &'m mut [f32],
    top_of: &'m mut [f32],
}

impl<'m> LazyScratch<'m> {
    /// For operands of D and E elements, sequences of at most so many keys, and pv or not.
    pub fn new(
        parts: &mut Parts<'m>,
        cut: &Cut,
        (dim, width): (usize, usize),
        keys: usize,
        pv: bool,
    ) -> Self {
        let (rows, tile) = (cut.queries.next_multiple_of(MAX_LANES), cut.queries * STRIDE);
        let all = keys.div_ceil(cut.keys);
        let kept = all.min((KEPT / (tile * size_of::<f32>())).max(1));
        let held = all.min(kept + 1);
        let stride = cut.stride(width);
        let numbers = Numbers {
            m: parts.room(rows),
            l: parts.room(rows * MAX_LANES),
            n: parts.room(rows),
            inverse: parts.room(rows),
            offset: parts.room(rows),
            factor: parts.room(rows),
            base: parts.room(rows),
            m_of: parts.room(rows.saturating_mul(all)),
            top_of: parts.room(rows.saturating_mul(all)),
        };
        let strips = parts.room((4 * (cut.queries / cut.rows)).saturating_mul(all));
        LazyScratch {
            cut: *cut,
            q: Packed::new(parts, dim.saturating_mul(cut.queries)),
            lse: parts.room(cut.queries),
            o: parts.room(stride.saturating_mul(cut.queries)),
            stride,
            pv: parts.room(if pv { stride.saturating_mul(cut.queries) } else { 0 }),
            numbers,
            kept,
            weights: parts.room(tile * held),
            visible: parts.bytes(cut.queries * MAX_KEYS * held),
            active: parts.room(if pv { cut.rows * STRIDE } else { 0 }),
            strips: bytemuck::cast_slice_mut(strips),
        }
    }
}

impl LazyScratch<'_> {
    /// The row of the memory of weights at which a block begins.
    #[inline(always)]
    fn row(&self, at: &At) -> usize {
        at.tile.min(self.kept) * self.cut.queries + at.first
    }
}

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

/// A register block of queries against a tile of keys.
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

impl Kernel for LazyTile<'_, '_, '_> {
    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) {
        self.begin(isa);
        self.sweep(
            isa,
            #[inline(always)]
            |tile, isa, at| tile.add(isa, at),
        );
    }
}

impl LazyTile<'_, '_, '_> {
    /// The first sweep: lse, and the weights that stay.
    #[inline(always)]
    fn begin<I: Isa>(&mut self, isa: I) {
        let Numbers { m, l, n, .. } = &mut self.scratch.numbers;
        m.fill(f32::NEG_INFINITY);
        l.fill(0.0);
        n.fill(0.0);
        self.scratch.o.fill(0.0);
        self.scratch.pv.fill(0.0);
        self.sweep(
            isa,
            #[inline(always)]
            |tile, isa, at| tile.softmax_weights(isa, at),
        );
        for r in 0..self.scratch.numbers.m.len() {
            self.finish(isa, r);
        }
    }

    /// Visits the register blocks of the tiles that hold a visible pair.
    #[inline(always)]
    fn sweep<I: Isa>(&mut self, isa: I, visit: impl Fn(&mut Self, I, &At)) {
        let cut = self.scratch.cut;
        for (tile, cols) in tiles(0..self.rule.of.sequence.keys, cut.keys).enumerate() {
            if self.rule.cover(self.rows.clone(), cols.clone()) == Cover::None {
                continue;
            }
            let has_nonfinite = self.has_nonfinite || self.keys.non_finite.touches(cols.clone());
            for first in (0..self.rows.len()).step_by(I::Tile::ROWS) {
                visit(self, isa, &At { first, tile, cols: cols.clone(), has_nonfinite });
            }
        }
    }

    /// The place in which the strip of a block is kept.
    #[inline(always)]
    fn strip<I: Isa>(&mut self, at: &At) -> &mut [u32; 4] {
        let blocks = self.scratch.cut.queries / I::Tile::ROWS;
        &mut self.scratch.strips[at.tile * blocks + at.first / I::Tile::ROWS]
    }

    /// S of a block, and the maxima of its rows.
    #[inline(always)]
    fn scores<I: Isa>(&mut self, isa: I, at: &At) -> Option<(Strip, [I::F32; MAX_ROWS])> {
        let start = self.rows.start + at.first;
        let (rule, row) = (self.rule, self.scratch.row(at));
        let LazyScratch { q, weights, visible, .. } = &mut *self.scratch;
        let factors = Factors {
            rule: &rule,
            rows: start..self.rows.end.min(start + I::Tile::ROWS),
            cols: at.cols.clone(),
            q: &q.panels[at.first * self.dim..],
            k: self.keys.k.across.from(at.cols.start / I::Tile::COLS),
            dim: self.dim,
            note_visible: at.has_nonfinite || rule.hides(),
        };
        let mut block = Block {
            s: &mut weights[row * STRIDE..],
            tanh: &mut [],
            visible: &mut visible[row * MAX_KEYS..],
        };
        let mut max = [I::F32::splat(isa, f32::NEG_INFINITY); MAX_ROWS];
        let strip = score_block(isa, &factors, &mut block, &mut max)?;
        Some((strip, max))
    }

    /// p of a block, and what its rows add to m, l and n.
    #[inline(always)]
    fn softmax_weights<I: Isa>(&mut self, isa: I, at: &At) {
        let found = self.scores(isa, at);
        *self.strip::<I>(at) = found.as_ref().map_or([0; 4], |(strip, _)| strip.to_numbers());
        let Some((strip, max)) = found else { return };
        let row = at.tile * self.scratch.numbers.m.len() + at.first;
        let place = self.scratch.row(at);
        let Numbers { m, l, n, m_of, top_of, .. } = &mut self.scratch.numbers;
        let mut largest = [f32::NEG_INFINITY; MAX_ROWS];
        for (r, max) in max[..I::Tile::ROWS].iter().enumerate() {
            let (m, grown) = (&mut m[at.first + r], max.reduce_max());
            largest[r] = grown;
            // From m = −∞ every score is growth.
            if grown > *m + RESCALE {
                let factor = exp_difference(isa, I::F32::splat(isa, *m), I::F32::splat(isa, grown));
                let l = &mut l[(at.first + r) * MAX_LANES..][..I::F32::N];
                (I::F32::load(isa, l) * factor).store(l);
                *m = grown;
            }
            // A row that has seen nothing: any finite m gives the weight e^−∞ = 0.
            m_of[row + r] = if *m == f32::NEG_INFINITY { 0.0 } else { *m };
        }
        bound(isa, &mut largest, &m_of[row..][..I::Tile::ROWS]);
        top_of[row..][..I::Tile::ROWS].copy_from_slice(&largest[..I::Tile::ROWS]);
        let visible = &self.scratch.visible[place * MAX_KEYS..];
        strip.count(visible, &mut n[at.first..][..I::Tile::ROWS]);
        self.exponentials(isa, at, &strip, true);
    }

    /// p = e^(S−m_J) of a block, in place of S unless that is read again; with `first` also l of its rows.
    #[inline(always)]
    fn exponentials<I: Isa>(&mut self, isa: I, at: &At, strip: &Strip, first: bool) {
        let place = self.scratch.row(at);
        let LazyScratch { weights, numbers, active, .. } = &mut *self.scratch;
        let keep = !active.is_empty();
        let Numbers { m, l, m_of, .. } = numbers;
        let row = at.tile * m.len() + at.first;
        let weights = &mut weights[place * STRIDE..];
        for r in 0..I::Tile::ROWS {
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
    fn add<I: Isa>(&mut self, isa: I, at: &At) {
        let strip = Strip::of_numbers(*self.strip::<I>(at));
        if strip.cols.is_empty() || !self.is_active(isa, at, I::Tile::ROWS) {
            return;
        }
        let again = at.tile >= self.scratch.kept && self.scores(isa, at).is_some();
        if !self.scratch.active.is_empty() {
            self.normalise(isa, at, &strip);
        } else if again {
            self.exponentials(isa, at, &strip, false);
        }
        let mut run = strip.cols.start..strip.cols.start;
        for column in strip.cols.clone().step_by(I::Tile::COLS) {
            let next = column + I::Tile::COLS;
            if self.shift(isa, at, column) {
                run.end = next;
            } else {
                self.multiply(isa, at, &strip, &run);
                run = next..next;
            }
        }
        self.multiply(isa, at, &strip, &run);
    }

    /// P = e^(S−lse) of a block, so that f = 1.
    #[inline(always)]
    fn normalise<I: Isa>(&mut self, isa: I, at: &At, strip: &Strip) {
        let place = self.scratch.row(at);
        let LazyScratch { weights, numbers: Numbers { base, factor, .. }, .. } = &mut *self.scratch;
        for r in 0..I::Tile::ROWS {
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
        let mut raised = [0.0; MAX_ROWS + MAX_LANES];
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

    /// (E5) e = max(p·f + c, 0) of a panel of a block; whether one is above 0, or NaN. If it is wanted,
    /// also p·f of the active pairs.
    #[inline(always)]
    fn shift<I: Isa>(&mut self, isa: I, at: &At, column: usize) -> bool {
        let place = self.scratch.row(at);
        let LazyScratch { weights, active, numbers: Numbers { factor, offset, .. }, .. } =
            &mut *self.scratch;
        let weights = &mut weights[place * STRIDE..];
        let factors = factor[at.first..].iter().zip(&offset[at.first..]);
        let zero = I::F32::splat(isa, 0.0);
        let mut any = zero;
        for (r, (&f, &c)) in factors.take(I::Tile::ROWS).enumerate() {
            let (f, c) = (I::F32::splat(isa, f), I::F32::splat(isa, c));
            let here = r * STRIDE + column;
            let row = &mut weights[here..][..I::Tile::COLS];
            if !active.is_empty() {
                let active = &mut active[here..][..I::Tile::COLS];
                for (p, active) in
                    row.chunks_exact(I::F32::N).zip(active.chunks_exact_mut(I::F32::N))
                {
                    let p = I::F32::load(isa, p);
                    let e = p.mul_add(f, c);
                    zero.max(e).select_less(smallest(isa), zero, p * f).store(active);
                }
            }
            for p in row.chunks_exact_mut(I::F32::N) {
                // `max` returns its second operand where either is NaN: so a NaN shows.
                let e = zero.max(I::F32::load(isa, p).mul_add(f, c));
                any = any + e;
                e.store(p);
            }
        }
        any.reduce_add() != 0.0
    }

    /// o ← o + e V over some panels of a block, and pv if it is wanted.
    #[inline(always)]
    fn multiply<I: Isa>(&mut self, isa: I, at: &At, strip: &Strip, run: &Range<usize>) {
        if run.is_empty() {
            return;
        }
        let (values, place) = (&self.keys.v.along, self.scratch.row(at));
        let LazyScratch { o, pv, stride, weights, active, visible, .. } = &mut *self.scratch;
        let weights = &mut weights[place * STRIDE..];
        let visible = &mut visible[place * MAX_KEYS..];
        let strip = strip.within(run);
        conceal([&mut *weights], visible, &strip, I::Tile::ROWS);
        if !active.is_empty() {
            conceal([&mut **active], visible, &strip, I::Tile::ROWS);
        }
        if at.has_nonfinite {
            mark_active(weights, visible, run, I::Tile::ROWS);
        }
        let (stride, has_nonfinite) = (*stride, at.has_nonfinite);
        let terms: [(&mut [f32], &[f32]); 2] = [(&mut **o, weights), (&mut **pv, &**active)];
        for (acc, weights) in terms {
            if !weights.is_empty() {
                let sum = Sum { acc: &mut acc[at.first * stride..], stride };
                let rows = Rows { weights, visible, pairs: ACTIVE, has_nonfinite };
                rows.grow(isa, sum, values, &at.cols, run); // (E6)
            }
        }
    }
}

/// The largest score of each row of a block becomes what no weight e^(S−m_J) of the row exceeds: its own
/// weight, and what two exponentials may err by.
#[inline(always)]
fn bound<I: Isa>(isa: I, largest: &mut [f32; MAX_ROWS], m_of: &[f32]) {
    let mut m = [0.0; MAX_ROWS];
    m[..m_of.len()].copy_from_slice(m_of);
    let guard = I::F32::splat(isa, 1.0 + GUARD);
    for (s, m) in largest.chunks_exact_mut(I::F32::N).zip(m.chunks_exact(I::F32::N)) {
        let top = exp_difference(isa, I::F32::load(isa, s), I::F32::load(isa, m));
        (top * guard).store(s);
    }
}
