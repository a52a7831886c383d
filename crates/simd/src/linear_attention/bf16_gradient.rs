//! The chunks of the backward and the double backward pass in bf16: (R23) to (R28), and (R29) to (R35), of
//! [`super::gradient`], 32 queries at a time. A, B, rows that are summed into a state, S and D are rounded once each;
//! in the second order so are their tangents. The gradients of log-decays and of σ sum what was not.
//!
//! The operands of products are exact, and so neither σ nor ddσ multiplies one: with s = q·k, t = dout·v and
//! ṡ = ddq·k + q·ddk, ṫ = cot_o·v + dout·ddv
//!
//! ```text
//! A_ij = σ P_ij s_ij        Ȧ_ij = P_ij (σ (β_ij s_ij + ṡ_ij) + ddσ s_ij)        B, Ḃ likewise of t, ṫ
//! gq_i = Σ_j (Ḃ_ij k_j + B_ij ddk_j) + …        gdout_i = Σ_j (Ȧ_ij v_j + A_ij ddv_j) + …
//! gk_j = Σ_i (Ḃ_ij q_i + B_ij ddq_i) + …        gv_j = Σ_i (Ȧ_ij dout_i + A_ij cot_o_i) + …
//! gσ   = Σ_ij P_ij ((β_ij s_ij + ṡ_ij) t_ij + s_ij ṫ_ij) + …
//! ```
//!
//! with the part of states that [`End`](super::bf16_state::End) weighs. In the first order dq is Σ_j B_ij k_j + … and
//! dσ Σ_ij P_ij s_ij t_ij + …: what has a dot is absent, and B stands in place of Ḃ.
//!
//! A and B are made in pairs of two queries, which two rows of products give at once. Their tiles, transposed, are
//! the left factors of sums of keys; pairs of keys are those of sums of queries.

use super::bf16_forward::seen;
use super::bf16_scratch::TileScratch;
use super::bf16_state::Reading;
use super::bf16_weights::{Made, store_keys, store_queries};
use super::decays::{Decays, LogTangents};
use super::flow::Flow;
use super::scratch::{Scratch, Wanted};
use super::state::{Shape, passed};
use crate::element::TensorMut;
use crate::lanes::Lanes;
use crate::lanes::matrix::{BLOCK, F32, Matrix, MatrixKernel, Pieces, Product, SIDE, Tiles, WORDS};
use crate::tile::STRIDE;
use ndarray::{Ix2, s};

/// The part of the gradients by k, v and g that comes from D after the chunk, and of g from S before it.
pub struct Behind<'a, 'm> {
    pub len: usize,
    pub wanted: Wanted,
    /// S and D, each with its tangent behind it.
    pub states: [&'a [f32]; 2],
    pub shape: Shape,
    pub decays: &'a Decays<'m>,
    pub log_tangents: &'a LogTangents<'m>,
    pub flow: &'a mut Flow<'m>,
    pub strides: [usize; 2],
    pub tiles: &'a mut TileScratch<'m>,
    /// dk and dv, or gk and gv.
    pub sums: [&'a mut [f32]; 2],
}

impl MatrixKernel for Behind<'_, '_> {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) {
        let Behind { len, wanted, states, shape, decays, log_tangents, flow, strides, .. } = self;
        let TileScratch { k, v, back: [d, of_d], value, end, second, .. } = self.tiles;
        let ([along, across], [of_along, of_across]) = (d.factors(), of_d.factors());
        let [dk, dv] = self.sums;
        for first in (0..len).step_by(BLOCK) {
            let (tokens, end, second) = (first..len.min(first + BLOCK), &*end, *second);
            if wanted.k || wanted.g {
                let (wide, stride) = (k[0].tiles(), strides[0]);
                let (rows, tokens, states) = (&*v, tokens.clone(), [across, of_across]);
                let reading = Reading { end, rows, tokens, states, wide, second, stride };
                let sum = &mut dk[first * stride..][..BLOCK * stride];
                let with = if wanted.g { Some(&*k) } else { None };
                reading.read(
                    by,
                    [sum, value],
                    with,
                    #[inline(always)]
                    |j, dots| flow.y[j] = end.passed(j, dots),
                );
            }
            if wanted.v {
                let (wide, stride) = (v[0].tiles(), strides[1]);
                let (rows, states) = (&*k, [along, of_along]);
                let reading = Reading { end, rows, tokens, states, wide, second, stride };
                let sum = &mut dv[first * stride..][..BLOCK * stride];
                reading.read(by, [sum, value], None, |_, _| ());
            }
        }
        if wanted.g {
            let log_tangent = if log_tangents.zero { None } else { Some(log_tangents.whole) };
            flow.begin(len, passed(by.isa(), shape, decays.whole, log_tangent, states));
        }
    }
}

/// The contribution of one query head to the gradients of a chunk; and dq of it, or gq and gdout.
pub struct Chunk<'a, 'm> {
    pub len: usize,
    pub wanted: Wanted,
    /// True if S, and its tangent, are 0.
    pub blank: bool,
    pub ddscale: f32,
    pub scratch: &'a mut Scratch<'m>,
    /// Receives the part of the head in dσ or gσ.
    pub dscale: &'a mut f64,
    /// dq or gq, and gdout.
    pub to: [Option<TensorMut<'a, Ix2>>; 2],
}

impl MatrixKernel for Chunk<'_, '_> {
    #[inline(always)]
    fn run<M: Matrix>(mut self, by: M) {
        let len = self.len;
        for block in 0..len.div_ceil(BLOCK) {
            self.block(by, block);
            let Scratch { dq: [dq, _], gdout, strides, .. } = &*self.scratch;
            let rows = block * BLOCK..len.min((block + 1) * BLOCK);
            for ((to, sum), stride) in self.to.iter_mut().zip([dq, gdout]).zip(*strides) {
                if let Some(to) = to {
                    to.view_mut().slice(s![rows.clone(), ..]).write_rows(sum, stride, 1.0);
                }
            }
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
        let Wanted { q, k, v, g, dout, scale, .. } = self.wanted;
        [v || dout || g || scale, q || k || g || scale]
    }

    /// Of weights and of rows, value or tangent: the terms of each sum. In the first order the second term has no
    /// rows.
    #[inline(always)]
    fn terms(&self) -> [[usize; 2]; 2] {
        [[usize::from(self.scratch.second), 0], [0, 1]]
    }

    /// A and B of 32 queries, and the sums of these.
    #[inline(always)]
    fn block<M: Matrix>(&mut self, by: M, block: usize) {
        let (first, cols) = (block * BLOCK, (block + 1) * BLOCK);
        self.multiply(by, block, cols);
        self.read_state(by, block);
        for r in (0..BLOCK).step_by(2) {
            self.look_back(by, first + r, cols);
            match self.scratch.second {
                true => self.two_rows::<M, true>(by, first, r, cols),
                false => self.two_rows::<M, false>(by, first, r, cols),
            }
        }
        self.turn(by, block, cols);
        self.grow_queries(by, cols);
    }

    /// q·k and dout·v of 32 queries, and their tangents.
    #[inline(always)]
    fn multiply<M: Matrix>(&mut self, by: M, block: usize, cols: usize) {
        let (needs, Scratch { tiles, second, .. }) = (self.needs(), &mut *self.scratch);
        let TileScratch { q, k, v, dout, products, .. } = tiles;
        let factors = [(&*q, &*k), (&*dout, &*v)];
        for ((needed, [value, tangent]), (left, right)) in
            needs.into_iter().zip(products).zip(factors)
        {
            if !needed {
                continue;
            }
            left[0].scores(by, block, &right[0], (value, cols), true);
            if !*second {
                continue;
            }
            let mut fresh = true;
            for (left, right) in [(&left[1], &right[0]), (&left[0], &right[1])] {
                if !left.is_absent() && !right.is_absent() {
                    left.scores(by, block, right, (tangent, cols), fresh);
                    fresh = false;
                }
            }
            if fresh {
                tangent.fill(0.0);
            }
        }
    }

    /// The part of 32 queries that comes from the state before the chunk, and x.
    #[inline(always)]
    fn read_state<M: Matrix>(&mut self, by: M, block: usize) {
        let tokens = block * BLOCK..self.len.min((block + 1) * BLOCK);
        let Wanted { q: gq, g, dout: gdout, scale, .. } = self.wanted;
        let Scratch { tiles, dq: [dq, _], gdout: outputs, strides, flow, .. } = &mut *self.scratch;
        if self.blank {
            dq.fill(0.0);
            outputs.fill(0.0);
            return flow.x[tokens].fill(0.0);
        }
        let TileScratch { q, v, dout, front: [s, of_s], value, begin: end, second, .. } = tiles;
        let ([along, across], [of_along, of_across]) = (s.factors(), of_s.factors());
        let (end, second) = (&*end, *second);
        if gq || g || scale {
            let (wide, stride) = (q[0].tiles(), strides[0]);
            let (rows, tokens, states) = (&*dout, tokens.clone(), [across, of_across]);
            let reading = Reading { end, rows, tokens, states, wide, second, stride };
            let with = if g || scale { Some(&*q) } else { None };
            reading.read(
                by,
                [dq, value],
                with,
                #[inline(always)]
                |i, dots| {
                    flow.x[i] = end.passed(i, dots);
                    if scale {
                        *self.dscale += f64::from(end.by_factor(i, dots));
                    }
                },
            );
        }
        if gdout {
            let (rows, states, wide, stride) = (&*q, [along, of_along], v[0].tiles(), strides[1]);
            let reading = Reading { end, rows, tokens, states, wide, second, stride };
            reading.read(by, [outputs, value], None, |_, _| ());
        }
    }

    /// P of queries `i` and `i + 1`, the tangents of its logarithm, and w where nothing is seen.
    #[inline(always)]
    fn look_back<M: Matrix>(&mut self, by: M, i: usize, cols: usize) {
        let (gates, end) = (self.wanted.g, self.len.next_multiple_of(BLOCK));
        let Scratch { decays, log_tangents, tiles, flow, second, .. } = &mut *self.scratch;
        let [p, beta] = &mut tiles.p;
        for h in 0..2 {
            let (i, at) = (i + h, h * STRIDE);
            if decays.none {
                p[at..=at + i].fill(1.0);
                p[at + i + 1..at + cols].fill(0.0);
            } else {
                decays.row(by.isa(), i, 0..cols, &mut p[at..]);
            }
            if *second && !log_tangents.zero {
                log_tangents.row(by.isa(), i, &(0..cols), &mut beta[at..]);
            }
            if gates {
                flow.w[i * STRIDE..][cols..end].fill(0.0);
            }
        }
    }

    /// A and B of rows `r` and `r + 1` of 32 queries, w, and what they give to dσ.
    #[inline(always)]
    fn two_rows<M: Matrix, const SECOND: bool>(
        &mut self,
        by: M,
        first: usize,
        r: usize,
        cols: usize,
    ) {
        let (needs, made, len) =
            (self.needs(), Made::of(by, self.wanted, self.scratch, self.ddscale), self.len);
        let Wanted { q: gq, k: gk, v: gv, g, dout: gdout, scale, .. } = self.wanted;
        let Scratch { tiles, flow, .. } = &mut *self.scratch;
        let keep = [&tiles.q, &tiles.k, &tiles.v, &tiles.dout];
        let keep = keep.into_iter().flatten().any(|x| !x.finite);
        let TileScratch { products, p: [p, beta], pairs, of_keys, pieces, .. } = tiles;
        let (isa, lanes, zero) = (by.isa(), F32::<M>::N, F32::<M>::splat(by.isa(), 0.0));
        let (orders, mut sums) = (1 + usize::from(SECOND), [zero; 2]);
        for col in (0..cols).step_by(2 * lanes) {
            // A and B, values and tangents, of two rows and two registers of each.
            let mut all = [[[[zero; 2]; 2]; 2]; 2];
            for h in 0..2 {
                for part in 0..2 {
                    let col = col + part * lanes;
                    let at = (r + h) * STRIDE + col;
                    let decay = F32::<M>::load(isa, &p[h * STRIDE + col..]);
                    let mut bent = zero;
                    if SECOND && made.bends {
                        bent = F32::<M>::load(isa, &beta[h * STRIDE + col..]);
                    }
                    let mut loaded = [[zero; 2]; 2];
                    for n in 0..2 {
                        for order in 0..orders {
                            if needs[n] {
                                loaded[n][order] = F32::<M>::load(isa, &products[n][order][at..]);
                            }
                        }
                    }
                    let (weights, [by_scale, w]) = made.weigh::<SECOND>(by, [decay, bent], loaded);
                    if g {
                        w.store(&mut flow.w[(first + r + h) * STRIDE + col..]);
                    }
                    if scale {
                        sums[h] = sums[h] + by_scale;
                    }
                    for n in 0..2 {
                        for order in 0..orders {
                            all[n][order][h][part] = weights[n][order];
                            if keep && needs[n] {
                                weights[n][order].store(&mut products[n][order][at..]);
                            }
                        }
                    }
                }
            }
            for n in 0..2 {
                let (of_queries, of_rows) = [(gv, gdout), (gk, gq)][n];
                for order in 0..orders {
                    let x = all[n][order];
                    if of_queries {
                        store_queries(by, x, (pairs[n][order], *pieces), r, col);
                    }
                    if of_rows {
                        store_keys(by, x, (of_keys[n][order], *pieces), r, (col, cols));
                    }
                }
            }
        }
        for h in (0..2).filter(|h| scale && first + r + h < len) {
            *self.dscale += f64::from(sums[h].reduce_add());
        }
        if keep {
            for r in r..(r + 2).min(len.saturating_sub(first)) {
                self.add_seen(first, r);
            }
        }
    }

    /// Products of row `r` of 32 queries with the keys that it sees, where the other factor is not finite: 0 · NaN
    /// would be NaN.
    fn add_seen(&mut self, first: usize, r: usize) {
        let (wanted, terms, i) = (self.wanted, self.terms(), first + r);
        let Scratch { decays, tiles, dq: [dq, _], gdout, dk, dv, strides, .. } = &mut *self.scratch;
        let (TileScratch { q, k, v, dout, products, p, .. }, [dim, width]) = (tiles, *strides);
        for [of_weights, of_rows] in terms {
            let [a, b] = products.each_ref().map(|x| &x[of_weights][r * STRIDE..]);
            for j in seen(decays.none, &p[0][r % 2 * STRIDE..], i) {
                let sums = [
                    (wanted.q, &k[of_rows], b[j], j, (&mut **dq, r * dim)),
                    (wanted.dout, &v[of_rows], a[j], j, (&mut **gdout, r * width)),
                    (wanted.k, &q[of_rows], b[j], i, (&mut **dk, j * dim)),
                    (wanted.v, &dout[of_rows], a[j], i, (&mut **dv, j * width)),
                ];
                for (wanted, rows, weight, row, (sum, at)) in sums {
                    if wanted && !rows.finite {
                        rows.add(weight, row, &mut sum[at..]);
                    }
                }
            }
        }
    }

    /// A and B of 32 queries, transposed.
    #[inline(always)]
    fn turn<M: Matrix>(&mut self, by: M, block: usize, cols: usize) {
        let (Wanted { k, v, .. }, all) = (self.wanted, 2 * self.len.div_ceil(BLOCK));
        let TileScratch { pairs, turned, pieces, .. } = &mut self.scratch.tiles;
        for (wanted, (pairs, turned)) in [v, k].into_iter().zip(pairs.iter().zip(turned)) {
            let lists = pairs.iter().zip(turned).filter(|(pairs, _)| wanted && !pairs.is_empty());
            for (pairs, turned) in lists {
                let apart = [pairs.len(), turned.len()].map(|len| len / *pieces);
                for piece in 0..*pieces {
                    let from = &pairs[piece * apart[0]..];
                    let to = &mut turned[piece * apart[1] + block * all * WORDS..];
                    for at in (0..cols / SIDE * WORDS).step_by(WORDS) {
                        by.turn(&from[at..], &mut to[at..][..WORDS]);
                    }
                }
            }
        }
    }

    /// Σ_j B_ij k_j, and Σ_j A_ij v_j, of 32 queries.
    #[inline(always)]
    fn grow_queries<M: Matrix>(&mut self, by: M, cols: usize) {
        let (Wanted { q, dout, .. }, terms) = (self.wanted, self.terms());
        let Scratch { tiles, dq: [dq, _], gdout, strides, .. } = &mut *self.scratch;
        let TileScratch { k, v, of_keys: [a, b], pieces, .. } = tiles;
        let depth = cols / BLOCK;
        let sums = [(q, k, b, dq, strides[0]), (dout, v, a, gdout, strides[1])];
        for (_, rows, weights, sum, stride) in sums.into_iter().filter(|x| x.0) {
            for [of_weights, of_rows] in terms {
                let rows = &rows[of_rows];
                if rows.is_absent() || !rows.finite {
                    continue;
                }
                let (b, cols) = (rows.summed(0), rows.tiles());
                for words in Pieces::new(weights[of_weights], *pieces).each() {
                    let (c, a) = (&mut **sum, Tiles { words, steps: [depth, 1] });
                    by.multiply(Product { c, stride, fresh: false, a, b, rows: 2, cols, depth });
                }
            }
        }
    }

    /// Σ_i B_ij q_i and Σ_i A_ij dout_i.
    #[inline(always)]
    fn grow_keys<M: Matrix>(&mut self, by: M) {
        let (Wanted { k, v, .. }, terms) = (self.wanted, self.terms());
        let Scratch { tiles, dk, dv, strides, .. } = &mut *self.scratch;
        let TileScratch { q, dout, turned: [a, b], pieces, .. } = tiles;
        let blocks = self.len.div_ceil(BLOCK);
        let sums = [(k, q, b, dk, strides[0]), (v, dout, a, dv, strides[1])];
        for (_, rows, weights, sum, stride) in sums.into_iter().filter(|x| x.0) {
            for ([of_weights, of_rows], block) in
                terms.into_iter().flat_map(|term| (0..blocks).map(move |block| (term, block)))
            {
                let rows = &rows[of_rows];
                if rows.is_absent() || !rows.finite {
                    continue;
                }
                let at = (block * 2 * blocks + 2 * block) * WORDS;
                for words in Pieces::new(weights[of_weights], *pieces).from(at).each() {
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
