//! The kernels of the backward pass: one chunk of one key head.
//!
//! ```text
//! A_ij = P_ij (q_i·k_j),  B_ij = P_ij (dout_i·v_j)        (R23)
//! dq_i = σ (Σ_{j ≤ i} B_ij k_j + α_i dout_i Sᵀ)           (R24)
//! dk_j = σ Σ_{i ≥ j} B_ij q_i + ω_j v_j Dᵀ                (R25)
//! dv_j = σ Σ_{i ≥ j} A_ij dout_i + ω_j k_j D              (R26)
//! ```
//!
//! A and B are computed for one pair of micro-chunks at a time and forgotten. Every row of dq, dk and
//! dv has one writer. `flow` has dg, (R27).

use super::rows::{Panels, Rows};
use super::scratch::{Scratch, Wanted};
use super::state::{Shape, transpose_states};
use crate::lanes::{Isa, Kernel, Lanes};
use crate::level::compiled_here;
use crate::products::{Along, Sum};
use crate::tile::{STRIDE, Tile};
use std::ops::Range;

/// Dᵀ, and what the state after the chunk contributes to dk, dv and dg.
pub struct Behind<'a, 'm> {
    pub len: usize,
    pub shape: Shape,
    pub transposed: Shape,
    pub wanted: Wanted,
    pub scratch: &'a mut Scratch<'m>,
}

compiled_here!(Behind<'_, '_>);

impl Kernel for Behind<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Behind { len, shape, transposed, wanted, scratch } = self;
        let Scratch { decays, k: [k, _], v: [v, _], dk, dv, strides, flow, .. } = scratch;
        let Scratch { state_transposed, back, back_transposed, .. } = scratch;
        if wanted.k || wanted.g {
            transpose_states(isa, back, shape, back_transposed, transposed);
            from_state(isa, len, v, back_transposed, transposed, decays.omega, dk, strides[0]);
        }
        if wanted.v {
            from_state(isa, len, k, back, shape, decays.omega, dv, strides[1]);
        }
        if wanted.g {
            let z = match decays.whole {
                0.0 => 0.0,
                whole => whole * inner(isa, transposed, state_transposed, back_transposed),
            };
            for j in 0..len {
                flow.y[j] = match decays.omega[j] {
                    0.0 => 0.0,
                    _ => k.dot(isa, j, &dk[j * strides[0]..]),
                };
            }
            flow.begin(len, z);
        }
    }
}

/// to_i = weight_i · rows_i · state; where a weight is 0 the state is absent.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn from_state<I: Isa>(
    isa: I,
    len: usize,
    rows: &Rows<'_>,
    state: &[f32],
    shape: Shape,
    weights: &[f32],
    to: &mut [f32],
    stride: usize,
) {
    for first in (0..len).step_by(I::Tile::ROWS) {
        for (number, panel) in state.chunks_exact(shape.panel()).enumerate() {
            let mut tile = I::Tile::zero(isa);
            rows.add_rows(isa, &mut tile, first, panel);
            let tile = tile.scale_rows(isa, &weights[first..]);
            tile.store(&mut to[first * stride + number * I::Tile::COLS..], stride);
        }
    }
}

/// <G, H>, of what two states hold beside what only fills register blocks.
#[inline(always)]
pub fn inner<I: Isa>(isa: I, shape: Shape, g: &[f32], h: &[f32]) -> f32 {
    let cols = I::Tile::COLS;
    let mut sum = I::F32::splat(isa, 0.0);
    let mut rest = 0.0;
    for (number, (g, h)) in
        g.chunks_exact(shape.panel()).zip(h.chunks_exact(shape.panel())).enumerate()
    {
        let here = cols.min(shape.width - number * cols);
        let whole = here / I::F32::N * I::F32::N;
        for (g, h) in g.chunks_exact(cols).zip(h.chunks_exact(cols)).take(shape.dim) {
            let lists = g[..whole].chunks_exact(I::F32::N).zip(h[..whole].chunks_exact(I::F32::N));
            for (g, h) in lists {
                sum = I::F32::load(isa, g).mul_add(I::F32::load(isa, h), sum);
            }
            for (g, h) in g[whole..here].iter().zip(&h[whole..here]) {
                rest += g * h;
            }
        }
    }
    sum.reduce_add() + rest
}

/// What one query head contributes to the gradients of a chunk; dq / σ of it.
pub struct Chunk<'a, 'm> {
    pub len: usize,
    pub transposed: Shape,
    pub wanted: Wanted,
    /// Whether S is 0.
    pub blank: bool,
    pub scratch: &'a mut Scratch<'m>,
    /// Σ q_i · dq_i / σ is added to it.
    pub dscale: &'a mut f64,
}

compiled_here!(Chunk<'_, '_>);

impl Kernel for Chunk<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) {
        let (len, micro) = (self.len, self.scratch.micro);
        if self.wanted.dq || self.wanted.g {
            self.add_before(isa);
        }
        for keys in (0..len).step_by(micro).map(|j| j..len.min(j + micro)) {
            for queries in (keys.start..len).step_by(micro).map(|i| i..len.min(i + micro)) {
                self.pair(isa, queries, keys.clone());
            }
        }
        if self.wanted.g {
            self.scratch.flow.finish(len);
        }
        if self.wanted.dq {
            let Scratch { q: [q, _], dq: [dq, _], strides, .. } = &*self.scratch;
            for i in 0..len {
                *self.dscale += f64::from(q.dot(isa, i, &dq[i * strides[0]..]));
            }
        }
    }
}

impl Chunk<'_, '_> {
    /// dq and x from the state before the chunk.
    #[inline(always)]
    fn add_before<I: Isa>(&mut self, isa: I) {
        let scratch = &mut *self.scratch;
        let Scratch { decays, q: [q, _], dout: [dout, _], dq: [dq, _], strides, .. } = scratch;
        let Scratch { state_transposed: state, flow, scale, .. } = scratch;
        let x = &mut *flow.x;
        if self.blank {
            dq.fill(0.0);
            x.fill(0.0);
            return;
        }
        from_state(isa, self.len, dout, state, self.transposed, decays.alpha, dq, strides[0]);
        if self.wanted.g {
            for i in 0..self.len {
                x[i] = match decays.alpha[i] {
                    0.0 => 0.0,
                    _ => *scale * q.dot(isa, i, &dq[i * strides[0]..]),
                };
            }
        }
    }

    /// A pair of micro-chunks.
    #[inline(always)]
    fn pair<I: Isa>(&mut self, isa: I, queries: Range<usize>, keys: Range<usize>) {
        let Wanted { dq, k: dk, v: dv, g: dg, .. } = self.wanted;
        let diagonal = queries.start == keys.start;
        let (height, cols) = (I::Tile::ROWS, I::Tile::COLS);
        for first in queries.clone().step_by(height) {
            let at = (first - queries.start) * STRIDE;
            let last = if diagonal { keys.end.min(first + height) } else { keys.end };
            let seen = keys.start..last;
            let scratch = &mut *self.scratch;
            for column in (keys.start / cols * cols..last).step_by(cols) {
                if dv || dg {
                    let mut tile = I::Tile::zero(isa);
                    let keys = scratch.keys[0].from(column / cols);
                    scratch.q[0].add_rows(isa, &mut tile, first, keys);
                    tile.store(&mut scratch.a[0][at + column..], STRIDE);
                }
                if dq || dk || dg {
                    let mut tile = I::Tile::zero(isa);
                    let values = scratch.values[0].from(column / cols);
                    scratch.dout[0].add_rows(isa, &mut tile, first, values);
                    tile.store(&mut scratch.b[0][at + column..], STRIDE);
                }
            }
            if !scratch.decays.none {
                let begin = diagonal && first == queries.start;
                let p = &mut scratch.p[at..];
                scratch.decays.rows(isa, first, keys.clone(), begin, p);
            }
            self.weigh(isa, first, at, keys.clone());
            if dq {
                self.grow_dq(isa, first, queries.start, seen);
            }
        }
        // The keys of a diagonal pair are seen from themselves on.
        for first in keys.clone().step_by(height) {
            let from = if diagonal { first } else { queries.start };
            self.grow_keys(isa, first, from..queries.end, queries.start);
        }
        if dg {
            self.scratch.flow.pair(isa, queries, keys, diagonal);
        }
    }

    /// (R23) from products, and w; 0 where P is, or without decays where j > i.
    #[inline(always)]
    fn weigh<I: Isa>(&mut self, isa: I, first: usize, at: usize, keys: Range<usize>) {
        let Scratch { decays, a: [a, _], b: [b, _], p, flow, scale, .. } = &mut *self.scratch;
        let zero = I::F32::splat(isa, 0.0);
        let scale = I::F32::splat(isa, *scale);
        let width = keys.len().next_multiple_of(I::F32::N);
        for r in 0..I::Tile::ROWS {
            let here = at + r * STRIDE + keys.start;
            if decays.none {
                let after = (first + r + 1).saturating_sub(keys.start).min(keys.len());
                a[here + after..here + keys.len()].fill(0.0);
                b[here + after..here + keys.len()].fill(0.0);
                continue;
            }
            let a = a[here..here + width].chunks_exact_mut(I::F32::N);
            let b = b[here..here + width].chunks_exact_mut(I::F32::N);
            let p = p[here..here + width].chunks_exact(I::F32::N);
            let w = flow.w[here..here + width].chunks_exact_mut(I::F32::N);
            for (((a, b), p), w) in a.zip(b).zip(p).zip(w) {
                let p = I::F32::load(isa, p);
                let dov = I::F32::load(isa, b);
                let weight = I::F32::load(isa, a) * p;
                zero.select_less(p, scale * weight * dov, zero).store(w);
                zero.select_less(p, weight, zero).store(a);
                zero.select_less(p, dov * p, zero).store(b);
            }
        }
    }

    /// dq / σ += B K, of a register block of queries.
    #[inline(always)]
    fn grow_dq<I: Isa>(&mut self, isa: I, first: usize, top: usize, keys: Range<usize>) {
        let Scratch { decays, p, b, keys_along, dq, strides, finite, .. } = &mut *self.scratch;
        let (none, rows, finite) = (decays.none, I::Tile::ROWS, finite[0]);
        let block = Block { first, rows, range: keys, top, none, p, finite };
        block.grow_rows(isa, dq[0], strides[0], &[(b[0], &keys_along[0])]);
    }

    /// dk += σ Bᵀ Q and dv += σ Aᵀ dO, of a register block of keys.
    #[inline(always)]
    fn grow_keys<I: Isa>(&mut self, isa: I, first: usize, queries: Range<usize>, top: usize) {
        if queries.is_empty() {
            return;
        }
        let Wanted { k: keys, v: values, .. } = self.wanted;
        let rows = I::Tile::ROWS.min(self.len - first);
        let Scratch { decays, p, a, b, queries: q, douts, dk, dv, strides, finite, .. } =
            &mut *self.scratch;
        let none = decays.none;
        let mut block = Block { first, rows, range: queries, top, none, p, finite: finite[2] };
        if keys {
            block.grow_columns(isa, dk, strides[0], &[(b[0], &q[0])]);
        }
        block.finite = finite[3];
        if values {
            block.grow_columns(isa, dv, strides[1], &[(a[0], &douts[0])]);
        }
    }
}

/// A register block of results: the queries or keys from `first` on, with the keys or queries of
/// `range` that they see or are seen by.
pub struct Block<'a> {
    pub first: usize,
    /// Of the register block, those that are rows of a chunk.
    pub rows: usize,
    pub range: Range<usize>,
    /// The query in row 0 of the weights.
    pub top: usize,
    /// Whether nothing decays; else P says what is seen.
    pub none: bool,
    pub p: &'a [f32],
    /// Whether what the weights are multiplied with holds no NaN and no infinity.
    pub finite: bool,
}

impl Block<'_> {
    /// += Σ W X of queries.
    #[inline(always)]
    pub fn grow_rows<I: Isa>(
        &self,
        isa: I,
        acc: &mut [f32],
        stride: usize,
        terms: &[(&[f32], &Panels<'_>)],
    ) {
        let Block { first, range, top, .. } = self;
        for &(weights, packed) in terms {
            if packed.panels.is_empty() {
                continue;
            }
            let sum = Sum { acc: &mut acc[first * stride..], stride };
            let along = Along { packed, start: range.start, depth: range.len() };
            if self.finite {
                sum.add_rows(isa, &weights[(first - top) * STRIDE + range.start..], along);
            } else {
                sum.add_visible(
                    isa,
                    self.rows,
                    along,
                    #[inline(always)]
                    |r, n| self.weight(weights, first + r, range.start + n),
                );
            }
        }
    }

    /// += Σ Wᵀ X of keys.
    #[inline(always)]
    pub fn grow_columns<I: Isa>(
        &self,
        isa: I,
        acc: &mut [f32],
        stride: usize,
        terms: &[(&[f32], &Panels<'_>)],
    ) {
        let Block { first, range, top, .. } = self;
        for &(weights, packed) in terms {
            if packed.panels.is_empty() {
                continue;
            }
            let sum = Sum { acc: &mut acc[first * stride..], stride };
            let along = Along { packed, start: range.start, depth: range.len() };
            if self.finite {
                sum.add_columns(isa, &weights[(range.start - top) * STRIDE + first..], along);
            } else {
                sum.add_visible(
                    isa,
                    self.rows,
                    along,
                    #[inline(always)]
                    |r, n| self.weight(weights, range.start + n, first + r),
                );
            }
        }
    }

    /// The weight of pair (i, j) if it counts.
    #[inline(always)]
    fn weight(&self, weights: &[f32], i: usize, j: usize) -> Option<f32> {
        let at = (i - self.top) * STRIDE + j;
        (j <= i && (self.none || self.p[at] > 0.0)).then(|| weights[at])
    }
}
