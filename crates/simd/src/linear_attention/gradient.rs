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
//! dv has one writer. dg is the sum of what passes each gate, (R27), in which nothing cancels that
//! need not: within a pair of micro-chunks, sums of rows from the last and of columns from the first.

use super::operand::Rows;
use super::scratch::Scratch;
use super::state::Shape;
use crate::lanes::{Isa, Kernel, Lanes};
use crate::level::compiled_here;
use crate::pack::transpose;
use crate::products::{Along, Sum};
use crate::tile::{STRIDE, Tile};
use std::ops::Range;

/// Which gradients are computed.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    /// dq, and with it dσ.
    pub dq: bool,
    pub dk: bool,
    pub dv: bool,
    /// dg, of whatever decays.
    pub dg: bool,
}

/// Dᵀ, and what the state after the chunk contributes to dk, dv and dg.
pub struct Behind<'a> {
    pub len: usize,
    pub shape: Shape,
    pub transposed: Shape,
    pub wanted: Wanted,
    pub scratch: &'a mut Scratch,
}

compiled_here!(Behind<'_>);

impl Kernel for Behind<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Behind { len, shape, transposed, wanted, scratch } = self;
        let Scratch { decays, k, v, dk, dv, strides, dg, y, state, .. } = scratch;
        let Scratch { back, back_transposed, .. } = scratch;
        let cols = I::Tile::COLS;
        if wanted.dk || wanted.dg {
            for (e, panel) in back.chunks_exact(shape.panel()).enumerate() {
                for (d, to) in back_transposed.chunks_exact_mut(transposed.panel()).enumerate() {
                    let block = &panel[d * cols * cols..];
                    transpose(block, cols, cols, &mut to[e * cols * cols..], cols);
                }
            }
            from_state(isa, len, v, back_transposed, transposed, &decays.omega, dk, strides[0]);
        }
        if wanted.dv {
            from_state(isa, len, k, back, shape, &decays.omega, dv, strides[1]);
        }
        if wanted.dg {
            let z = match decays.whole {
                0.0 => 0.0,
                whole => whole * inner(isa, transposed, state, back_transposed),
            };
            dg.fill(z);
            let mut before = 0.0;
            for j in 0..len {
                dg[j] += before;
                y[j] = match decays.omega[j] {
                    0.0 => 0.0,
                    _ => k.dot(isa, j, &dk[j * strides[0]..]),
                };
                before += y[j];
            }
        }
    }
}

/// to_i = weight_i · rows_i · state; where a weight is 0 the state is absent.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn from_state<I: Isa>(
    isa: I,
    len: usize,
    rows: &Rows,
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

/// sums += x; the sum of the first `first` of them.
#[inline(always)]
fn grow<I: Isa>(isa: I, sums: &mut [f32], x: &[f32], first: usize) -> f32 {
    let whole = sums.len() / I::F32::N * I::F32::N;
    for (sums, x) in sums[..whole].chunks_exact_mut(I::F32::N).zip(x.chunks_exact(I::F32::N)) {
        (I::F32::load(isa, sums) + I::F32::load(isa, x)).store(sums);
    }
    for (sum, x) in sums[whole..].iter_mut().zip(&x[whole..]) {
        *sum += x;
    }
    total(isa, &sums[..first])
}

/// Σ x, of the lanes of a register side by side.
#[inline(always)]
fn total<I: Isa>(isa: I, x: &[f32]) -> f32 {
    let mut sum = I::F32::splat(isa, 0.0);
    let parts = x.chunks_exact(I::F32::N);
    let rest: f32 = parts.remainder().iter().sum();
    for part in parts {
        sum = sum + I::F32::load(isa, part);
    }
    sum.reduce_add() + rest
}

/// <G, H>, of what two states hold beside what only fills register blocks.
#[inline(always)]
fn inner<I: Isa>(isa: I, shape: Shape, g: &[f32], h: &[f32]) -> f32 {
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
pub struct Chunk<'a> {
    pub len: usize,
    pub transposed: Shape,
    pub wanted: Wanted,
    /// Whether S is 0.
    pub blank: bool,
    pub scratch: &'a mut Scratch,
    /// Σ q_i · dq_i / σ is added to it.
    pub dscale: &'a mut f64,
}

compiled_here!(Chunk<'_>);

impl Kernel for Chunk<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) {
        let (len, micro) = (self.len, self.scratch.micro);
        if self.wanted.dq || self.wanted.dg {
            self.add_before(isa);
        }
        for keys in (0..len).step_by(micro).map(|j| j..len.min(j + micro)) {
            for queries in (keys.start..len).step_by(micro).map(|i| i..len.min(i + micro)) {
                self.pair(isa, queries, keys.clone());
            }
        }
        if self.wanted.dg {
            self.finish_gates();
        }
        if self.wanted.dq {
            let Scratch { q, dq, strides, .. } = &*self.scratch;
            for i in 0..len {
                *self.dscale += f64::from(q.dot(isa, i, &dq[i * strides[0]..]));
            }
        }
    }
}

impl Chunk<'_> {
    /// dq and x from the state before the chunk.
    #[inline(always)]
    fn add_before<I: Isa>(&mut self, isa: I) {
        let Scratch { decays, q, dout, dq, strides, state, x, scale, .. } = &mut *self.scratch;
        if self.blank {
            dq.fill(0.0);
            x.fill(0.0);
            return;
        }
        from_state(isa, self.len, dout, state, self.transposed, &decays.alpha, dq, strides[0]);
        if self.wanted.dg {
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
        let Wanted { dq, dk, dv, dg } = self.wanted;
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
                    scratch.q.add_rows(isa, &mut tile, first, scratch.keys.from(column / cols));
                    tile.store(&mut scratch.a[at + column..], STRIDE);
                }
                if dq || dk || dg {
                    let mut tile = I::Tile::zero(isa);
                    scratch.dout.add_rows(
                        isa,
                        &mut tile,
                        first,
                        scratch.values.from(column / cols),
                    );
                    tile.store(&mut scratch.b[at + column..], STRIDE);
                }
            }
            if !scratch.decays.none {
                let begin = diagonal && first == queries.start;
                let p = &mut scratch.p[at..];
                scratch.decays.rows(isa, first, keys.clone(), begin, p);
            }
            self.weigh(isa, first, at, keys.clone());
            if dq {
                self.grow_dq(isa, first, at, seen);
            }
        }
        // The keys of a diagonal pair are seen from themselves on.
        for first in keys.clone().step_by(height) {
            let from = if diagonal { first } else { queries.start };
            if dk {
                self.grow_keys(isa, first, from..queries.end, queries.start, false);
            }
            if dv {
                self.grow_keys(isa, first, from..queries.end, queries.start, true);
            }
        }
        if dg {
            self.gates(isa, queries, keys, diagonal);
        }
    }

    /// (R23) from products, and w; 0 where P is, or without decays where j > i.
    #[inline(always)]
    fn weigh<I: Isa>(&mut self, isa: I, first: usize, at: usize, keys: Range<usize>) {
        let Scratch { decays, a, b, p, w, scale, .. } = &mut *self.scratch;
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
            let w = w[here..here + width].chunks_exact_mut(I::F32::N);
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

    /// Whether pair (i, j) counts, where operands are not finite.
    #[inline(always)]
    fn sees(&self, i: usize, j: usize, top: usize) -> bool {
        let Scratch { decays, p, .. } = &*self.scratch;
        j <= i && (decays.none || p[(i - top) * STRIDE + j] > 0.0)
    }

    /// dq += B K, of a register block of queries.
    #[inline(always)]
    fn grow_dq<I: Isa>(&mut self, isa: I, first: usize, at: usize, keys: Range<usize>) {
        let stride = self.scratch.strides[0];
        let mut dq = std::mem::take(&mut self.scratch.dq);
        let Scratch { b, keys_along, finite, .. } = &*self.scratch;
        let sum = Sum { acc: &mut dq[first * stride..], stride };
        let along = Along { packed: keys_along, start: keys.start, depth: keys.len() };
        if finite[0] {
            sum.add_rows(isa, &b[at + keys.start..], along);
        } else {
            let top = first - at / STRIDE;
            sum.add_visible(
                isa,
                I::Tile::ROWS,
                along,
                #[inline(always)]
                |r, j| {
                    let j = keys.start + j;
                    self.sees(first + r, j, top).then(|| b[at + r * STRIDE + j])
                },
            );
        }
        self.scratch.dq = dq;
    }

    /// dk += σ Bᵀ Q, or dv += σ Aᵀ dO, of a register block of keys.
    #[inline(always)]
    fn grow_keys<I: Isa>(
        &mut self,
        isa: I,
        first: usize,
        queries: Range<usize>,
        top: usize,
        values: bool,
    ) {
        if queries.is_empty() {
            return;
        }
        let scratch = &mut *self.scratch;
        let place = if values { &mut scratch.dv } else { &mut scratch.dk };
        let mut place = std::mem::take(place);
        let scratch = &*self.scratch;
        let stride = scratch.strides[usize::from(values)];
        let (weights, packed, finite) = match values {
            true => (&scratch.a, &scratch.douts, scratch.finite[2]),
            false => (&scratch.b, &scratch.queries, scratch.finite[1]),
        };
        let sum = Sum { acc: &mut place[first * stride..], stride };
        let along = Along { packed, start: queries.start, depth: queries.len() };
        if finite {
            sum.add_columns(isa, &weights[(queries.start - top) * STRIDE + first..], along);
        } else {
            let keys = I::Tile::ROWS.min(self.len - first);
            sum.add_visible(
                isa,
                keys,
                along,
                #[inline(always)]
                |r, i| {
                    let i = queries.start + i;
                    let j = first + r;
                    self.sees(i, j, top).then(|| weights[(i - top) * STRIDE + j])
                },
            );
        }
        let scratch = &mut *self.scratch;
        *(if values { &mut scratch.dv } else { &mut scratch.dk }) = place;
    }

    /// (R27): what passes the gates of this pair of micro-chunks, of those between, and within one.
    #[inline(always)]
    fn gates<I: Isa>(&mut self, isa: I, queries: Range<usize>, keys: Range<usize>, diagonal: bool) {
        let Scratch { w, dg, row_sums, col_sums, across, micro, .. } = &mut *self.scratch;
        let rows = w[keys.start..].chunks(STRIDE).zip(queries.clone());
        let rows = rows.map(
            #[inline(always)]
            |(row, i)| (i, &row[..keys.len()]),
        );
        if diagonal {
            // Sums of columns over the rows from the last one on; w is 0 where j > i.
            let mut sums = [0.0f32; crate::tile::MAX_KEYS];
            for (t, weights) in rows.rev() {
                let here = t - keys.start;
                dg[t] += grow(isa, &mut sums[..keys.len()], weights, here);
            }
            return;
        }
        let mut all = 0.0;
        for (i, weights) in rows {
            grow(isa, &mut col_sums[keys.clone()], weights, 0);
            let sum = total(isa, weights);
            row_sums[i] += sum;
            all += sum;
        }
        for between in (keys.start / *micro + 1)..(queries.start / *micro) {
            across[between] += all;
        }
    }

    /// dg from x and from the sums over pairs of micro-chunks, which are 0 again for the next head.
    #[inline(always)]
    fn finish_gates(&mut self) {
        let Scratch { dg, row_sums, col_sums, across, x, micro, .. } = &mut *self.scratch;
        let mut of_state = 0.0;
        for t in (0..self.len).rev() {
            of_state += x[t];
            dg[t] += of_state;
        }
        for (number, tokens) in
            (0..self.len).step_by(*micro).map(|t| t..self.len.min(t + *micro)).enumerate()
        {
            let mut from = 0.0;
            for t in tokens.clone().rev() {
                from += row_sums[t];
                dg[t] += from + across[number];
            }
            let mut before = 0.0;
            for t in tokens {
                dg[t] += before;
                before += col_sums[t];
            }
        }
        row_sums.fill(0.0);
        col_sums.fill(0.0);
        across.fill(0.0);
    }
}
