//! The chunks of the backward pass in bf16: (R23) to (R28) of [`super::gradient`], 32 queries at a time. A, B, rows
//! ω_j v_j and σ α_i dout_i, S and D are rounded once each; the gradients of log-decays and of σ sum what was not.
//!
//! A and B are made in pairs of two queries, which two rows of products give at once. Their tiles, transposed, are
//! the left factors of dv and dk; pairs of keys are B's for dq. The sums that are read from D, `of_back`, are weighted
//! at the end, with the gradients of keys.

use super::bf16_forward::seen;
use super::bf16_scratch::TileScratch;
use super::decays::Decays;
use super::flow::Flow;
use super::scratch::{Scratch, Wanted};
use super::state::{Shape, inner};
use super::words::{multiply_state, scale_rows};
use crate::element::TensorMut;
use crate::lanes::Lanes;
use crate::lanes::matrix::{
    BLOCK, F32, Matrix, MatrixKernel, Pairing, Pieces, Product, SIDE, Tiles, WORDS,
};
use crate::tile::STRIDE;
use ndarray::{Ix2, s};

/// The part of the gradients by k, v and g that comes from D after the chunk, and of g from S before it.
pub struct Behind<'a, 'm> {
    pub len: usize,
    pub wanted: Wanted,
    pub states: [&'a [f32]; 2],
    pub shape: Shape,
    pub decays: &'a Decays<'m>,
    pub flow: &'a mut Flow<'m>,
    pub strides: [usize; 2],
    pub tiles: &'a mut TileScratch<'m>,
}

impl MatrixKernel for Behind<'_, '_> {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) {
        let Behind { len, wanted, states, shape, decays, flow, strides, tiles } = self;
        let TileScratch { k, v, back, of_back: [of_v, of_k], pieces, .. } = tiles;
        let [along, across] = back.each_ref().map(|words| Pieces::new(words, *pieces));
        for block in 0..len.div_ceil(BLOCK) {
            let [to_k, to_v] = strides.map(|stride| block * BLOCK * stride);
            if wanted.k || wanted.g {
                let to = (&mut of_v[to_k..], strides[0]);
                multiply_state(by, v.left(block), v.depth(), across, k.tiles(), to);
            }
            if wanted.v {
                let to = (&mut of_k[to_v..], strides[1]);
                multiply_state(by, k.left(block), k.depth(), along, v.tiles(), to);
            }
        }
        if !wanted.g {
            return;
        }
        for j in (0..len).step_by(2) {
            let dots = k.dots(by, j, two_rows(of_v, strides[0], j));
            for (j, dot) in (j..len).zip(dots) {
                let omega = decays.omega[j];
                flow.y[j] = if omega == 0.0 { 0.0 } else { omega * dot };
            }
        }
        let z = match decays.whole {
            0.0 => 0.0,
            whole => whole * inner(by.isa(), shape, states[0], states[1]),
        };
        flow.begin(len, z);
    }
}

/// The contribution of one query head to the gradients of a chunk; and dq of it.
pub struct Chunk<'a, 'm> {
    pub len: usize,
    pub wanted: Wanted,
    /// True if S is 0.
    pub blank: bool,
    pub scratch: &'a mut Scratch<'m>,
    /// Σ q_i · dq_i / σ is added to it.
    pub dscale: &'a mut f64,
    /// dq.
    pub to: Option<TensorMut<'a, Ix2>>,
}

impl MatrixKernel for Chunk<'_, '_> {
    #[inline(always)]
    fn run<M: Matrix>(mut self, by: M) {
        let len = self.len;
        for block in 0..len.div_ceil(BLOCK) {
            self.block(by, block);
            self.finish_queries(by, block);
        }
        self.grow_keys(by);
        if self.wanted.g {
            self.scratch.flow.pair(by.isa(), 0..len, 0..len);
            self.scratch.flow.finish(len);
        }
    }
}

impl Chunk<'_, '_> {
    /// True if A is wanted, and if B is.
    #[inline(always)]
    fn needs(&self) -> [bool; 2] {
        let Wanted { q, dq, k, v, g, .. } = self.wanted;
        [v || g, q || dq || k || g]
    }

    /// A and B of 32 queries, and dq of them.
    #[inline(always)]
    fn block<M: Matrix>(&mut self, by: M, block: usize) {
        let (first, cols, needs) = (block * BLOCK, (block + 1) * BLOCK, self.needs());
        let TileScratch { q, k, v, dout, products: [s, dov], .. } = &mut self.scratch.tiles;
        for (needed, left, right, to) in [(needs[0], q, &*k, s), (needs[1], dout, &*v, dov)] {
            if needed {
                let (a, b, depth) = (left.left(block), right.right(), left.depth());
                let (rows, cols) = (2, cols / SIDE);
                by.multiply(Product {
                    c: to,
                    stride: STRIDE,
                    fresh: true,
                    a,
                    b,
                    rows,
                    cols,
                    depth,
                });
            }
        }
        if needs[1] {
            self.read_state(by, block);
        }
        for r in (0..BLOCK).step_by(2) {
            self.two_rows(by, first, r, cols);
        }
        let Scratch { tiles, dq: [dq, _], strides, .. } = &mut *self.scratch;
        let TileScratch { k, pairs, of_keys, turned, pieces, .. } = tiles;
        let all = 2 * self.len.div_ceil(BLOCK);
        for ((pairs, turned), _) in
            pairs.iter().zip(turned).zip(needs).filter(|(_, needed)| *needed)
        {
            let apart = turned.len() / *pieces;
            for (pairs, turned) in
                Pieces::new(pairs, *pieces).each().zip(turned.chunks_exact_mut(apart))
            {
                let tiles = turned[block * all * WORDS..].chunks_exact_mut(WORDS);
                for (tile, to) in tiles.enumerate().take(cols / SIDE) {
                    by.turn(&pairs[tile * WORDS..], to);
                }
            }
        }
        if self.wanted.dq && k.finite {
            let (b, stride, cols, depth) = (k.summed(0), strides[0], k.tiles(), cols / BLOCK);
            for words in Pieces::new(of_keys, *pieces).each() {
                let (c, a) = (&mut **dq, Tiles { words, steps: [depth, 1] });
                by.multiply(Product { c, stride, fresh: false, a, b, rows: 2, cols, depth });
            }
        }
    }

    /// dq of 32 queries, and what they give to dσ.
    #[inline(always)]
    fn finish_queries<M: Matrix>(&mut self, by: M, block: usize) {
        let Scratch { tiles, dq: [dq, _], strides, scale, .. } = &*self.scratch;
        let rows = block * BLOCK..self.len.min((block + 1) * BLOCK);
        if self.wanted.scale {
            for i in rows.clone().step_by(2) {
                let dots = tiles.q.dots(by, i, two_rows(dq, strides[0], i - rows.start));
                dots.iter().take(self.len - i).for_each(|&dot| *self.dscale += f64::from(dot));
            }
        }
        if let Some(to) = &mut self.to {
            to.view_mut().slice(s![rows, ..]).write_rows(dq, strides[0], *scale);
        }
    }

    /// dq / σ of 32 queries and x, from the state before the chunk.
    #[inline(always)]
    fn read_state<M: Matrix>(&mut self, by: M, block: usize) {
        let Scratch { decays, tiles, dq: [dq, _], strides, flow, scale, .. } = &mut *self.scratch;
        let (TileScratch { q, dout, front, pieces, .. }, stride) = (tiles, strides[0]);
        let rows = block * BLOCK..self.len.min((block + 1) * BLOCK);
        let dq = &mut dq[..BLOCK * stride];
        if self.blank {
            dq.fill(0.0);
            flow.x[rows].fill(0.0);
            return;
        }
        let front = Pieces::new(front, *pieces);
        multiply_state(by, dout.left(block), dout.depth(), front, q.tiles(), (dq, stride));
        if !decays.none {
            scale_rows(
                by.isa(),
                &mut dq[..rows.len() * stride],
                stride,
                &decays.alpha[rows.start..],
            );
        }
        if self.wanted.g {
            for i in rows.clone().step_by(2) {
                let dots = q.dots(by, i, two_rows(dq, stride, i - rows.start));
                for (i, dot) in (i..rows.end).zip(dots) {
                    flow.x[i] = if decays.alpha[i] == 0.0 { 0.0 } else { *scale * dot };
                }
            }
        }
    }

    /// A and B of rows `r` and `r + 1` of 32 queries, and w.
    #[inline(always)]
    fn two_rows<M: Matrix>(&mut self, by: M, first: usize, r: usize, cols: usize) {
        let (needs, end) = (self.needs(), self.len.next_multiple_of(BLOCK));
        let Scratch { decays, tiles, flow, scale, .. } = &mut *self.scratch;
        let TileScratch { q, k, dout, products: [s, dov], p, .. } = tiles;
        let (pieces, [of_a, of_b], of_keys) = (tiles.pieces, &mut tiles.pairs, &mut tiles.of_keys);
        let (isa, lanes, zero) = (by.isa(), F32::<M>::N, F32::<M>::splat(by.isa(), 0.0));
        let (none, gates, scale) = (decays.none, self.wanted.g, F32::<M>::splat(isa, *scale));
        for h in 0..2 {
            let (i, p) = (first + r + h, &mut p[h * STRIDE..]);
            if none {
                p[..=i].fill(1.0);
                p[i + 1..cols].fill(0.0);
            } else {
                decays.row(isa, i, 0..cols, p);
            }
            if gates {
                flow.w[i * STRIDE..][cols..end].fill(0.0);
            }
        }
        let keep = !(q.finite && k.finite && dout.finite);
        for col in (0..cols).step_by(2 * lanes) {
            let [mut a, mut b] = [[[zero; 2]; 2]; 2];
            for h in 0..2 {
                for part in 0..2 {
                    let col = col + part * lanes;
                    let at = (r + h) * STRIDE + col;
                    let weight = F32::<M>::load(isa, &p[h * STRIDE + col..]);
                    let mut of_v = zero;
                    if needs[0] {
                        let x = F32::<M>::load(isa, &s[at..]) * weight;
                        a[h][part] = zero.select_less(weight, x, zero);
                    }
                    if needs[1] {
                        of_v = F32::<M>::load(isa, &dov[at..]);
                        b[h][part] = zero.select_less(weight, of_v * weight, zero);
                    }
                    if gates {
                        let w = zero.select_less(weight, scale * a[h][part] * of_v, zero);
                        w.store(&mut flow.w[(first + r + h) * STRIDE + col..]);
                    }
                    if keep {
                        a[h][part].store(&mut s[at..]);
                        b[h][part].store(&mut dov[at..]);
                    }
                }
            }
            for part in 0..2 {
                let col = col + part * lanes;
                let to = col / SIDE * WORDS + r / 2 * SIDE + col % SIDE;
                for (x, words) in [(&a, &mut *of_a), (&b, &mut *of_b)] {
                    Pairing::Stacked.store(by, [x[0][part], x[1][part]], (words, to), pieces);
                }
            }
            for (h, pair) in b.into_iter().enumerate() {
                let tile = (r + h) / SIDE * (cols / BLOCK) + col / BLOCK;
                let to = tile * WORDS + (r + h) % SIDE * SIDE + col % BLOCK / 2;
                Pairing::Neighbours.store(by, pair, (of_keys, to), pieces);
            }
        }
        if keep {
            for r in r..(r + 2).min(self.len.saturating_sub(first)) {
                self.add_seen(first, r);
            }
        }
    }

    /// Products of row `r` of 32 queries with the keys that it sees, where the other factor is not finite: 0 · NaN
    /// would be NaN.
    fn add_seen(&mut self, first: usize, r: usize) {
        let (wanted, i) = (self.wanted, first + r);
        let Scratch { decays, tiles, dq: [dq, _], dk, dv, strides: [dim, width], .. } =
            &mut *self.scratch;
        let TileScratch { q, k, dout, products: [a, b], p, .. } = tiles;
        let [a, b] = [a, b].map(|x| &x[r * STRIDE..]);
        for j in seen(decays.none, &p[r % 2 * STRIDE..], i) {
            if wanted.dq && !k.finite {
                k.add(b[j], j, &mut dq[r * *dim..]);
            }
            if wanted.k && !q.finite {
                q.add(b[j], i, &mut dk[j * *dim..]);
            }
            if wanted.v && !dout.finite {
                dout.add(a[j], i, &mut dv[j * *width..]);
            }
        }
    }

    /// Σ_i B_ij q_i and Σ_i A_ij dout_i.
    #[inline(always)]
    fn grow_keys<M: Matrix>(&mut self, by: M) {
        let Scratch { tiles, dk, dv, strides, .. } = &mut *self.scratch;
        let TileScratch { q, dout, turned: [a, b], pieces, .. } = tiles;
        let blocks = self.len.div_ceil(BLOCK);
        let terms =
            [(self.wanted.k, q, b, dk, strides[0]), (self.wanted.v, dout, a, dv, strides[1])];
        for (wanted, rows, weights, sum, stride) in terms {
            if !wanted || !rows.finite {
                continue;
            }
            for block in 0..blocks {
                let at = (block * 2 * blocks + 2 * block) * WORDS;
                for words in Pieces::new(weights, *pieces).from(at).each() {
                    by.multiply(Product {
                        c: &mut sum[block * BLOCK * stride..],
                        stride,
                        fresh: false,
                        a: Tiles { words, steps: [1, 2 * blocks] },
                        b: rows.summed(block),
                        rows: 2,
                        cols: rows.tiles(),
                        depth: blocks - block,
                    });
                }
            }
        }
    }
}

/// Row `first` of a sum, and the next one.
#[inline(always)]
fn two_rows(sum: &[f32], stride: usize, first: usize) -> [&[f32]; 2] {
    let (row, next) = sum[first * stride..][..2 * stride].split_at(stride);
    [row, next]
}

/// dk and dv from sums over queries, σ, and what was read from D, times ω.
pub struct Finish<'a, 'm> {
    pub len: usize,
    pub scratch: &'a mut Scratch<'m>,
    /// dk and dv.
    pub to: [Option<TensorMut<'a, Ix2>>; 2],
}

impl MatrixKernel for Finish<'_, '_> {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) {
        let Finish { len, scratch, to } = self;
        let Scratch { decays, tiles, dk, dv, strides, scale, .. } = scratch;
        let terms = to.into_iter().zip([dk, dv]).zip(&tiles.of_back).zip(*strides);
        for (((to, sum), of_back), stride) in terms {
            let Some(mut to) = to else { continue };
            for first in (0..len).step_by(BLOCK) {
                let rows = first..len.min(first + BLOCK);
                let here = first * stride..(first + BLOCK) * stride;
                let (sum, of_back) = (&mut sum[here.clone()], &of_back[here]);
                add_weighted(by, *scale, sum, of_back, (stride, &decays.omega[rows.clone()]));
                to.view_mut().slice(s![rows, ..]).write_rows(sum, stride, 1.0);
            }
        }
    }
}

/// sum ← σ sum + ω of_back, row by row; where ω is 0, what it would multiply is absent.
#[inline(always)]
fn add_weighted<M: Matrix>(
    by: M,
    scale: f32,
    sum: &mut [f32],
    of_back: &[f32],
    (stride, weights): (usize, &[f32]),
) {
    let (isa, scale) = (by.isa(), F32::<M>::splat(by.isa(), scale));
    let rows = sum.chunks_exact_mut(stride).zip(of_back.chunks_exact(stride));
    for ((sum, of_back), &omega) in rows.zip(weights) {
        let weight = F32::<M>::splat(isa, omega);
        let lanes = sum.chunks_exact_mut(F32::<M>::N).zip(of_back.chunks_exact(F32::<M>::N));
        for (sum, of_back) in lanes {
            let mut whole = scale * F32::<M>::load(isa, sum);
            if omega != 0.0 {
                whole = weight.mul_add(F32::<M>::load(isa, of_back), whole);
            }
            whole.store(sum);
        }
    }
}
