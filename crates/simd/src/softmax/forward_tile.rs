//! The kernel of the forward pass: a streaming softmax over tiles of keys.
//!
//! For a tile of queries, with m = −∞, l = 0, o = 0:
//!
//! ```text
//! for each tile of keys that holds a visible pair
//!     for each register block of queries
//!         S  = σ·Q Kᵀ, softcap, bias, mask                      (F1) (F2)
//!         m′ = max(m, rowmax S)
//!         l, o ← l·e^(m−m′), o·e^(m−m′)        only in rows where m grew by more than 5, see `RESCALE`
//!         P  = e^(S−m′)
//!         l  ← l + rowsum P,   o ← o + P V
//! lse = m + ln l,   o ← o / l                                    (F3) (F5)
//! ```
//!
//! The sums of l stay spread over the lanes of a register until the end. A sink joins l last.

use super::bf16::{PANELS, Weights, add_visible, multiply_rows, multiply_scores};
use super::cut::Cut;
use super::packs::Keys;
use super::rule::ScoreRule;
use super::scores::{Block, Factors, Row, Strip, VISIBLE, score_block, slope, strip};
use super::weights::Rows;
use crate::exp::exp_difference;
use crate::lanes::matrix::{BLOCK, F32, Matrix, MatrixKernel, Pairing, Pieces, SIDE, WORDS};
use crate::lanes::{Isa, Kernel, Lanes, Tile};
use crate::pack::{Form, Packed};
use crate::products::Sum;
use crate::tile::{MAX_KEYS, MAX_ROWS, STRIDE};
use crate::tiles::tiles;
use crate::workspace::Parts;
use etalon_problem::Cover;
use std::ops::Range;

/// The accumulators are rescaled when a maximum grows by more than this: e⁵ < 2⁸, so that no
/// weight exceeds 2⁸ and nothing can overflow, while on most tiles nothing has to be rescaled.
pub const RESCALE: f32 = 5.0;

/// The memory of one thread.
pub struct ForwardScratch<'m> {
    cut: Cut,
    /// Queries, packed across.
    pub q: Packed<'m>,
    /// m of every row; at the end lse.
    pub m: &'m mut [f32],
    /// l of every row, spread over lanes.
    l: &'m mut [f32],
    /// o of every row, rows `stride` apart.
    pub o: &'m mut [f32],
    pub stride: usize,
    /// One block of scores, then of weights.
    s: &'m mut [f32],
    tanh: &'m mut [f32],
    visible: &'m mut [u8],
    /// Of bf16 the weights of a block in tiles.
    p: &'m mut [f32],
}

/// The most lanes of a register, over all instruction sets.
const MAX_LANES: usize = 16;

impl<'m> ForwardScratch<'m> {
    /// For operands of D = `dim` and results with rows of `width` elements.
    pub fn new(parts: &mut Parts<'m>, cut: &Cut, dim: usize, width: usize) -> Self {
        let stride = cut.stride(width);
        ForwardScratch {
            cut: *cut,
            q: Packed::new(parts, dim.next_multiple_of(cut.depth()).saturating_mul(cut.queries)),
            m: parts.room(cut.queries),
            l: parts.room(cut.queries * MAX_LANES),
            o: parts.room(stride.saturating_mul(cut.queries)),
            stride,
            s: parts.room(cut.rows * STRIDE),
            tanh: parts.room(cut.rows * STRIDE),
            visible: parts.bytes(cut.rows * MAX_KEYS),
            p: parts.room(if cut.bf16 { cut.pieces * Form::len(cut.rows, MAX_KEYS) } else { 0 }),
        }
    }

    /// True if operands are multiplied in bf16.
    pub fn is_bf16(&self) -> bool {
        self.cut.bf16
    }

    /// Begins a tile of queries: nothing has been seen.
    fn begin(&mut self) {
        self.m.fill(f32::NEG_INFINITY);
        self.l.fill(0.0);
        self.o.fill(0.0);
    }

    /// m′ = max(m, rowmax S) of row `r`, and l and o rescaled, if m grew by more than [`RESCALE`].
    /// Each row decides for itself: its bits depend on no other row of the block.
    #[inline(always)]
    fn grow<I: Isa>(&mut self, isa: I, r: usize, max: I::F32) {
        let ForwardScratch { m, l, o, stride, .. } = self;
        let (m, grown) = (&mut m[r], max.reduce_max());
        // From m = −∞ every score is growth.
        if grown > *m + RESCALE {
            let factor = exp_difference(isa, I::F32::splat(isa, *m), I::F32::splat(isa, grown));
            let l = &mut l[r * MAX_LANES..][..I::F32::N];
            (I::F32::load(isa, l) * factor).store(l);
            for o in o[r * *stride..][..*stride].chunks_exact_mut(I::F32::N) {
                (I::F32::load(isa, o) * factor).store(o);
            }
            *m = grown;
        }
    }

    /// The number that is subtracted from the scores of row `r`: m. In a row that has seen nothing any finite m gives
    /// the weight e^−∞ = 0.
    #[inline(always)]
    fn subtrahend(&self, r: usize) -> f32 {
        if self.m[r] == f32::NEG_INFINITY { 0.0 } else { self.m[r] }
    }

    /// (F3) lse = m + ln l and (F5) o ← o / l of row `r`, with the sink as one more logit.
    #[inline(always)]
    fn finish<I: Isa>(&mut self, isa: I, r: usize, sink: f32, sigma: f32) {
        let ForwardScratch { m, l, o, stride, .. } = self;
        let o = &mut o[r * *stride..][..*stride];
        let l = I::F32::load(isa, &l[r * MAX_LANES..]).reduce_add();
        if l == 0.0 {
            o.fill(0.0);
            m[r] = sink;
            return;
        }
        let (max, mut weight, mut sum) = (m[r], 1.0, f64::from(l));
        let mut top = f64::from(max);
        if sink != f32::NEG_INFINITY {
            top = f64::from(max.max(sink));
            weight = (f64::from(max) - top).exp();
            sum = sum * weight + (f64::from(sink) - top).exp();
        }
        m[r] = (top + sum.ln()) as f32;
        let factor = I::F32::splat(isa, sigma * weight as f32);
        let sum = I::F32::splat(isa, sum as f32);
        for o in o.chunks_exact_mut(I::F32::N) {
            (I::F32::load(isa, o) * factor / sum).store(o);
        }
    }
}

/// The kernel: one tile of queries against all its keys.
pub struct ForwardTile<'a, 'm> {
    /// The visible pairs, and the scale, softcap and bias of their scores.
    pub rule: ScoreRule<'a>,
    /// The keys and values.
    pub keys: &'a Keys<'a>,
    /// True if the weights are P ⊙ S′ and multiply k, which gives ∂lse/∂q; otherwise P and v.
    pub derivative: bool,
    /// True if a query of the tile is not finite.
    pub has_nonfinite: bool,
    /// The queries, within the sequence.
    pub rows: Range<usize>,
    /// D.
    pub dim: usize,
    /// Elements of a row of the result.
    pub width: usize,
    /// The sink of the head.
    pub sink: Option<f32>,
    /// The thread's memory, with the queries packed.
    pub scratch: &'a mut ForwardScratch<'m>,
}

impl Kernel for ForwardTile<'_, '_> {
    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) {
        self.sweep(
            isa,
            I::Tile::ROWS,
            #[inline(always)]
            |tile, first, cols, has_nonfinite| tile.block(isa, first, cols, has_nonfinite),
        );
    }
}

impl MatrixKernel for ForwardTile<'_, '_> {
    #[inline(always)]
    fn run<M: Matrix>(mut self, by: M) {
        self.sweep(
            by.isa(),
            BLOCK,
            #[inline(always)]
            |tile, first, cols, has_nonfinite| tile.bf16_block(by, first, cols, has_nonfinite),
        );
    }
}

impl ForwardTile<'_, '_> {
    /// Every block of `height` rows against each tile of keys that holds a visible pair.
    #[inline(always)]
    fn sweep<I: Isa>(
        &mut self,
        isa: I,
        height: usize,
        block: impl Fn(&mut Self, usize, Range<usize>, bool),
    ) {
        self.scratch.begin();
        let keys = self.rule.of.sequence.keys;
        for cols in tiles(0..keys, self.scratch.cut.keys) {
            if self.rule.cover(self.rows.clone(), cols.clone()) == Cover::None {
                continue;
            }
            let has_nonfinite = self.has_nonfinite || self.keys.non_finite.touches(cols.clone());
            for first in (0..self.rows.len()).step_by(height) {
                block(self, first, cols.clone(), has_nonfinite);
            }
        }
        let sigma = if self.derivative { self.rule.scale } else { 1.0 };
        let sink = self.sink.unwrap_or(f32::NEG_INFINITY);
        for r in 0..self.rows.len() {
            self.scratch.finish(isa, r, sink, sigma);
        }
    }

    /// One register block of queries, from row `first` of the tile, against a tile of keys.
    #[inline(always)]
    fn block<I: Isa>(&mut self, isa: I, first: usize, cols: Range<usize>, has_nonfinite: bool) {
        let start = self.rows.start + first;
        let scratch = &mut *self.scratch;
        let factors = Factors {
            rule: &self.rule,
            rows: start..self.rows.end.min(start + I::Tile::ROWS),
            cols: cols.clone(),
            q: &scratch.q.panels[first * self.dim..],
            k: self.keys.k.across.from(cols.start / I::Tile::COLS),
            dim: self.dim,
            note_visible: has_nonfinite,
        };
        let mut block = Block { s: scratch.s, tanh: scratch.tanh, visible: scratch.visible };
        let mut max = [I::F32::splat(isa, f32::NEG_INFINITY); MAX_ROWS];
        let Some(strip) = score_block(isa, &factors, &mut block, &mut max) else { return };
        for (r, max) in max[..I::Tile::ROWS].iter().enumerate() {
            self.scratch.grow(isa, first + r, *max);
        }
        self.softmax_weights(isa, first, &strip);
        if self.width > 0 {
            let ForwardScratch { o, stride, s, visible, .. } = &mut *self.scratch;
            let sum = Sum { acc: &mut o[first * *stride..], stride: *stride };
            let values = if self.derivative { &self.keys.k.along } else { &self.keys.v.along };
            let weights = Rows { weights: s, visible, pairs: VISIBLE, has_nonfinite };
            weights.grow(isa, sum, values, &cols, &strip.cols); // o ← o + P V
        }
    }

    /// P = e^(S−m), and l grown by its row sums; then, if asked for, P ⊙ S′.
    #[inline(always)]
    fn softmax_weights<I: Isa>(&mut self, isa: I, first: usize, strip: &Strip) {
        let derive = self.derivative && self.rule.softcap.is_some();
        for r in 0..I::Tile::ROWS {
            let m = I::F32::splat(isa, self.scratch.subtrahend(first + r));
            let ForwardScratch { l, s, tanh, .. } = &mut *self.scratch;
            let l = &mut l[(first + r) * MAX_LANES..][..I::F32::N];
            let mut sum = I::F32::load(isa, l);
            for s in s[r * STRIDE..][strip.cols.clone()].chunks_exact_mut(I::F32::N) {
                let p = exp_difference(isa, I::F32::load(isa, s), m);
                sum = sum + p;
                p.store(s);
            }
            sum.store(l);
            if derive {
                let p = s[r * STRIDE..][strip.cols.clone()].chunks_exact_mut(I::F32::N);
                let t = tanh[r * STRIDE..][strip.cols.clone()].chunks_exact(I::F32::N);
                p.zip(t).for_each(
                    #[inline(always)]
                    |(p, t)| (I::F32::load(isa, p) * slope(isa, I::F32::load(isa, t))).store(p),
                );
            }
        }
    }

    /// A block of 32 queries in bf16, from row `first` of the tile, against a tile of keys: row by row, of which the
    /// scores are in the L1 cache from their product to their weights.
    #[inline(always)]
    fn bf16_block<M: Matrix>(
        &mut self,
        by: M,
        first: usize,
        cols: Range<usize>,
        has_nonfinite: bool,
    ) {
        let (isa, start) = (by.isa(), self.rows.start + first);
        let rows = start..self.rows.end.min(start + BLOCK);
        let bias = self.rule.bias(&rows, &cols);
        let factors = Factors {
            rule: &self.rule,
            rows: rows.clone(),
            cols: cols.clone(),
            q: &[],
            k: &[],
            dim: self.dim,
            note_visible: has_nonfinite,
        };
        let Some(strip) = strip(&factors, BLOCK) else { return };
        let scratch = &mut *self.scratch;
        let k = self.keys.k.across.from(cols.start / BLOCK);
        let (words, depth) = ([scratch.q.from(first / BLOCK), k], self.dim.div_ceil(BLOCK));
        multiply_scores(by, words, depth, &strip, true, scratch.s);
        for r in 0..rows.len() {
            let ForwardScratch { s, tanh, visible, .. } = &mut *scratch;
            let (s, tanh) = (&mut s[r * STRIDE..][..STRIDE], &mut tanh[r * STRIDE..][..STRIDE]);
            let visible = &mut visible[r * MAX_KEYS..][..MAX_KEYS];
            let max = Row { r, s, tanh, visible }.score(isa, &factors, &bias, &strip);
            scratch.grow(isa, first + r, max);
            let derive = self.derivative && self.rule.softcap.is_some();
            scratch.bf16_weights(by, (first, r), &strip.cols, derive);
        }
        if self.width == 0 {
            return;
        }
        let values = if self.derivative { &self.keys.k.along } else { &self.keys.v.along };
        let ForwardScratch { cut, o, stride, p, visible, .. } = scratch;
        let from = (cols.start + strip.cols.start) / BLOCK;
        let (c, words) = (&mut o[first * *stride..], values.from(from));
        let p = Pieces::new(p, cut.pieces);
        if has_nonfinite {
            let weights = Weights { p, visible, start: strip.cols.start };
            add_visible(c, *stride, words, &weights, (rows.len(), strip.cols.len()));
            return;
        }
        let p = p.from(strip.cols.start / BLOCK * WORDS);
        multiply_rows(by, (c, *stride), p, words, strip.cols.len() / BLOCK); // o ← o + P V
    }
}

impl ForwardScratch<'_> {
    /// P = e^(S−m) of row `r` of a block of bf16, which become words, and l grown by their sum before they are
    /// rounded; P ⊙ S′ with `derive`.
    #[inline(always)]
    fn bf16_weights<M: Matrix>(
        &mut self,
        by: M,
        (first, r): (usize, usize),
        cols: &Range<usize>,
        derive: bool,
    ) {
        let (isa, lanes) = (by.isa(), F32::<M>::N);
        let m = F32::<M>::splat(isa, self.subtrahend(first + r));
        let ForwardScratch { cut, l, s, tanh, p, .. } = self;
        let (s, tanh) = (&s[r * STRIDE..][..STRIDE], &tanh[r * STRIDE..][..STRIDE]);
        let line = r / SIDE * PANELS * WORDS + r % SIDE * SIDE;
        let l = &mut l[(first + r) * MAX_LANES..][..lanes];
        let mut sums = [F32::<M>::load(isa, l), F32::<M>::splat(isa, 0.0)];
        for col in cols.clone().step_by(2 * lanes) {
            let mut pair = [F32::<M>::load(isa, &s[col..]), F32::<M>::load(isa, &s[col + lanes..])];
            for (weight, sum) in pair.iter_mut().zip(&mut sums) {
                *weight = exp_difference(isa, *weight, m);
                *sum = *sum + *weight;
            }
            if derive {
                for (weight, at) in pair.iter_mut().zip([col, col + lanes]) {
                    *weight = *weight * slope(isa, F32::<M>::load(isa, &tanh[at..]));
                }
            }
            let to = line + col / BLOCK * WORDS + col % BLOCK / 2;
            Pairing::Neighbours.store(by, pair, (p, to), cut.pieces);
        }
        (sums[0] + sums[1]).store(l);
    }
}
