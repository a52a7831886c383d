//! The kernels of one chunk of one key head: gradients and, in the second order, their tangents along
//! those of their operands. In the first order
//!
//! ```text
//! A_ij = P_ij (q_i·k_j),  B_ij = P_ij (dout_i·v_j)        (R23)
//! dq_i = σ (Σ_{j ≤ i} B_ij k_j + α_i dout_i Sᵀ)           (R24)
//! dk_j = σ Σ_{i ≥ j} B_ij q_i + ω_j v_j Dᵀ                (R25)
//! dv_j = σ Σ_{i ≥ j} A_ij dout_i + ω_j k_j D              (R26)
//! ```
//!
//! and in the second, with Q = σ q, and a dot for the tangent of each letter:
//!
//! ```text
//! A_ij = P_ij (Q_i·k_j)        Ȧ_ij = P_ij (β_ij Q_i·k_j + Q̇_i·k_j + Q_i·k̇_j)          (R29)
//! B_ij = P_ij (dout_i·v_j)     Ḃ_ij likewise; β_ij the sum of ddg between j and i
//! gdout_i = Σ_{j ≤ i} (Ȧ_ij v_j + A_ij v̇_j) + α_i (a_i Q_i S + Q̇_i S + Q_i Ṡ)          (R32)
//! gq_i    = σ (Σ_{j ≤ i} (Ḃ_ij k_j + B_ij k̇_j) + …) + ddσ dq_i / σ                     (R33)
//! gk_j    = Σ_{i ≥ j} (Ḃ_ij Q_i + B_ij Q̇_i) + ω_j (b_j v_j Dᵀ + v̇_j Dᵀ + v_j Ḋᵀ)       (R34)
//! gv_j    = Σ_{i ≥ j} (Ȧ_ij dout_i + A_ij cot_o_i) + ω_j (b_j k_j D + k̇_j D + k_j Ḋ)   (R35)
//! ```
//!
//! A and B are computed for one pair of micro-chunks at a time and forgotten. Every row of a gradient
//! has one writer. `flow` has dg, (R27), and gg, which is the sum of the tangents of w, x, y and z. What
//! a decay of 0 would multiply is absent.

use super::rows::Factor;
use super::scratch::{Scratch, Wanted};
use super::state::{Reading, passed};
use crate::lanes::prefetch::Queue;
use crate::lanes::{Isa, Kernel, Lanes};
use crate::pack::Packed;
use crate::products::{Along, Sum};
use crate::tile::{STRIDE, Tile};
use std::ops::Range;

/// Dᵀ, in the second order S, and what the state after the chunk contributes to the gradients by k, v
/// and g.
pub struct Behind<'a, 'm> {
    pub len: usize,
    pub wanted: Wanted,
    pub scratch: &'a mut Scratch<'m>,
}

impl Kernel for Behind<'_, '_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Behind { len, wanted, scratch } = self;
        let Scratch { decays, log_tangents, k, v, dk, dv, dq, strides, second, .. } = scratch;
        let Scratch { state, state_transposed, back, back_transposed, then, .. } = scratch;
        let (shape, transposed) = (scratch.shape, scratch.transposed);
        if wanted.dout {
            transposed.turn(isa, state_transposed, state, shape);
        }
        let (weights, [_, log_tangents]) = (&decays.omega[..], log_tangents.lists());
        if wanted.k || wanted.g {
            shape.turn(isa, back, back_transposed, transposed);
            let (rows, states) = (&v.rows, &back_transposed[..]);
            let read = Reading { len, rows, states, shape: transposed, weights, log_tangents };
            // dq is free until the first query head is worked on.
            let spare = (*second && wanted.g).then_some(&mut *dq[0]);
            let [value, tangent] = by_order(*second, dk);
            read.write(isa, value.or(spare), tangent, strides[0], then);
        }
        if wanted.v {
            let read = Reading { len, rows: &k.rows, states: back, shape, weights, log_tangents };
            let [value, tangent] = by_order(*second, dv);
            read.write(isa, value, tangent, strides[1], then);
        }
        if wanted.g {
            begin_flow(isa, len, scratch);
        }
    }
}

/// A gradient as a product or, in the second order, as the tangent of one.
#[inline(always)]
fn by_order(second: bool, gradient: &mut [f32]) -> [Option<&mut [f32]>; 2] {
    if second { [None, Some(gradient)] } else { [Some(gradient), None] }
}

/// dg from what passes the end of the chunk: y and z or, in the second order, their tangents.
#[inline(always)]
fn begin_flow<I: Isa>(isa: I, len: usize, scratch: &mut Scratch<'_>) {
    let Scratch { decays, log_tangents, k, dk, dq, strides, flow, second, .. } = scratch;
    let (shape, [rows, tangent]) = (scratch.transposed, &k.rows);
    for j in 0..len {
        let row = j * strides[0];
        flow.y[j] = match decays.omega[j] {
            0.0 => 0.0,
            _ if *second => tangent.dot(isa, j, &dq[0][row..]) + rows.dot(isa, j, &dk[row..]),
            _ => rows.dot(isa, j, &dk[row..]),
        };
    }
    let states = [&*scratch.state_transposed, &*scratch.back_transposed];
    let log_tangent = (!log_tangents.zero).then_some(log_tangents.whole);
    let z = passed(isa, shape, decays.whole, log_tangent, states);
    flow.begin(len, z);
}

/// The contribution of one query head to the gradients of a chunk; and dq / σ of it or, in the second order,
/// gdout of it and dq / σ with its tangent.
pub struct Chunk<'a, 'm> {
    pub len: usize,
    pub wanted: Wanted,
    /// True if S, and its tangent, are 0.
    pub blank: bool,
    pub scratch: &'a mut Scratch<'m>,
    /// Σ q_i · dq_i / σ is added to it, in the first order.
    pub dscale: &'a mut f64,
}

impl Kernel for Chunk<'_, '_> {
    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) {
        let (len, micro) = (self.len, self.scratch.micro);
        self.add_before(isa);
        for keys in (0..len).step_by(micro).map(|j| j..len.min(j + micro)) {
            for queries in (keys.start..len).step_by(micro).map(|i| i..len.min(i + micro)) {
                self.pair(isa, queries, keys.clone());
            }
        }
        if self.wanted.g {
            self.scratch.flow.finish(len);
        }
        let Scratch { q, dq, strides, second, .. } = &*self.scratch;
        if self.wanted.dq && !second {
            for i in 0..len {
                *self.dscale += f64::from(q.rows[0].dot(isa, i, &dq[0][i * strides[0]..]));
            }
        }
    }
}

impl Chunk<'_, '_> {
    /// dq and x or, in the second order, gdout, dq and their tangents, from the state before the chunk.
    #[inline(always)]
    fn add_before<I: Isa>(&mut self, isa: I) {
        let Chunk { len, wanted, blank, scratch, .. } = self;
        let Scratch { decays, log_tangents, q, dout, gdout, dq, strides, flow, .. } = scratch;
        let Scratch { state, state_transposed, shape, transposed, scale, second, then, .. } =
            scratch;
        if *blank {
            gdout.fill(0.0);
            dq.iter_mut().for_each(|dq| dq.fill(0.0));
            flow.x.fill(0.0);
            return;
        }
        let (len, weights) = (*len, &decays.alpha[..]);
        let [log_tangents, _] = log_tangents.lists();
        if wanted.dout {
            let (rows, shape) = (&q.rows, *shape);
            let read = Reading { len, rows, states: state, shape, weights, log_tangents };
            read.write(isa, None, Some(gdout), strides[1], then);
        }
        let [value, tangent] = dq;
        if wanted.q || wanted.dq || wanted.g {
            let (rows, states, shape) = (&dout.rows, &state_transposed[..], *transposed);
            let read = Reading { len, rows, states, shape, weights, log_tangents };
            let value = (wanted.dq || wanted.g).then_some(&mut value[..]);
            read.write(isa, value, second.then_some(tangent), strides[0], then);
        }
        if wanted.g {
            let [rows, rows_tangent] = &q.rows;
            for i in 0..len {
                let row = i * strides[0];
                flow.x[i] = match weights[i] {
                    0.0 => 0.0,
                    _ if *second => {
                        rows_tangent.dot(isa, i, &value[row..]) + rows.dot(isa, i, &tangent[row..])
                    }
                    _ => *scale * rows.dot(isa, i, &value[row..]),
                };
            }
        }
    }

    /// A pair of micro-chunks.
    #[inline(always)]
    fn pair<I: Isa>(&mut self, isa: I, queries: Range<usize>, keys: Range<usize>) {
        let diagonal = queries.start == keys.start;
        let height = I::Short::ROWS;
        for first in queries.clone().step_by(height) {
            let at = (first - queries.start) * STRIDE;
            let last = if diagonal { keys.end.min(first + height) } else { keys.end };
            self.multiply(isa, first, at, keys.start..last);
            let Scratch { decays, log_tangents, p, beta, .. } = &mut *self.scratch;
            if !decays.none {
                decays.rows(isa, first, keys.clone(), &mut p[at..]);
                if !log_tangents.zero {
                    log_tangents.rows(isa, first, keys.clone(), &mut beta[at..]);
                }
            }
            self.apply_decays(isa, first, at, keys.clone());
            self.grow_queries(isa, first, queries.start, keys.start..last);
        }
        // The keys of a diagonal pair are seen from themselves on.
        for first in keys.clone().step_by(height) {
            let from = if diagonal { first } else { queries.start };
            self.grow_keys(isa, first, from..queries.end, queries.start);
        }
        if self.wanted.g {
            self.scratch.flow.pair(isa, queries, keys);
        }
    }

    /// The products of a register block of queries with keys, and with values, before weights.
    #[inline(always)]
    fn multiply<I: Isa>(&mut self, isa: I, first: usize, at: usize, keys: Range<usize>) {
        let Wanted { q: gq, dq, k: gk, v: gv, g: gg, dout: gdout, .. } = self.wanted;
        let Scratch { q, k, v, dout, a, b, then, .. } = &mut *self.scratch;
        if gdout || gv || gg {
            multiply(isa, q, first, k, keys.clone(), (a, at), then);
        }
        if gq || dq || gk || gg {
            multiply(isa, dout, first, v, keys, (b, at), then);
        }
    }

    /// A, B, w and, in the second order, their tangents from products; 0 where P is, or without decays
    /// where j > i.
    #[inline(always)]
    fn apply_decays<I: Isa>(&mut self, isa: I, first: usize, at: usize, keys: Range<usize>) {
        let scratch = &mut *self.scratch;
        let width = keys.len().next_multiple_of(I::F32::N);
        for r in 0..I::Short::ROWS {
            let here = at + r * STRIDE + keys.start;
            if !scratch.decays.none {
                match scratch.second {
                    false => weigh_row(isa, scratch, here..here + width),
                    true => weigh_row_and_tangents(isa, scratch, here..here + width),
                }
                continue;
            }
            let after = (first + r + 1).saturating_sub(keys.start).min(keys.len());
            for list in scratch.a.iter_mut().chain(&mut scratch.b) {
                // In the first order there are no tangents.
                if !list.is_empty() {
                    list[here + after..here + keys.len()].fill(0.0);
                }
            }
        }
    }

    /// dq / σ += B K of a register block of queries; in the second order its tangent += Ḃ K + B K̇, and
    /// gdout += Ȧ V + A V̇.
    #[inline(always)]
    fn grow_queries<I: Isa>(&mut self, isa: I, first: usize, top: usize, range: Range<usize>) {
        let Wanted { q: gq, dq: value, dout: outputs, .. } = self.wanted;
        let Scratch { decays, p, a, b, k, v, strides, dq: [dq, tangent], gdout, second, .. } =
            &mut *self.scratch;
        let (none, rows) = (decays.none, I::Short::ROWS);
        let block = Block { of_keys: false, first, rows, range, top, none, p };
        if value {
            block.grow(isa, dq, strides[0], k.finite, &[(b[0], &k.along[0])]);
        }
        if *second && (gq || value) {
            let terms = [(&*b[1], &k.along[0]), (b[0], &k.along[1])];
            block.grow(isa, tangent, strides[0], k.finite, &terms);
        }
        if outputs {
            let terms = [(&*a[1], &v.along[0]), (a[0], &v.along[1])];
            block.grow(isa, gdout, strides[1], v.finite, &terms);
        }
    }

    /// Of a register block of keys dk += σ Bᵀ Q and dv += σ Aᵀ dO; in the second order gk += Ḃᵀ Q + Bᵀ Q̇
    /// and gv += Ȧᵀ dO + Aᵀ dȮ.
    #[inline(always)]
    fn grow_keys<I: Isa>(&mut self, isa: I, first: usize, range: Range<usize>, top: usize) {
        if range.is_empty() {
            return;
        }
        let Scratch { decays, p, a, b, q, dout, dk, dv, strides, second, .. } = &mut *self.scratch;
        let (none, rows) = (decays.none, I::Short::ROWS.min(self.len - first));
        let block = Block { of_keys: true, first, rows, range, top, none, p };
        // In the first order Q and dO have no tangents, and what they would be multiplied with is left
        // out.
        let tangent = usize::from(*second);
        if self.wanted.k {
            let terms = [(&*b[tangent], &q.along[0]), (b[0], &q.along[1])];
            block.grow(isa, dk, strides[0], q.finite, &terms);
        }
        if self.wanted.v {
            let terms = [(&*a[tangent], &dout.along[0]), (a[0], &dout.along[1])];
            block.grow(isa, dv, strides[1], dout.finite, &terms);
        }
    }
}

/// A register block of rows times packed rows and, in the second order, its tangent: what A and B are
/// made of.
#[inline(always)]
fn multiply<I: Isa>(
    isa: I,
    rows: &Factor<'_>,
    first: usize,
    packed: &Factor<'_>,
    keys: Range<usize>,
    ([to, to_tangent], at): (&mut [&mut [f32]; 2], usize),
    then: &mut Queue,
) {
    let ([rows, tangent], [packed, packed_tangent]) = (&rows.rows, &packed.across);
    let cols = I::Short::COLS;
    for column in (keys.start / cols * cols..keys.end).step_by(cols) {
        let panel = packed.from(column / cols);
        let mut tile = I::Short::zero(isa);
        rows.add_rows(isa, &mut tile, first, panel, then);
        tile.store(&mut to[at + column..], STRIDE);
        if to_tangent.is_empty() {
            continue;
        }
        let mut tile = I::Short::zero(isa);
        tangent.add_rows(isa, &mut tile, first, panel, then);
        if !packed_tangent.panels.is_empty() {
            rows.add_rows(isa, &mut tile, first, packed_tangent.from(column / cols), then);
        }
        tile.store(&mut to_tangent[at + column..], STRIDE);
    }
}

/// (R23) of a row from products, and w; 0 where P is.
#[inline(always)]
fn weigh_row<I: Isa>(isa: I, scratch: &mut Scratch<'_>, row: Range<usize>) {
    let Scratch { a: [a, _], b: [b, _], p, flow, scale, .. } = scratch;
    let (zero, scale) = (I::F32::splat(isa, 0.0), I::F32::splat(isa, *scale));
    let a = a[row.clone()].chunks_exact_mut(I::F32::N);
    let b = b[row.clone()].chunks_exact_mut(I::F32::N);
    let p = p[row.clone()].chunks_exact(I::F32::N);
    let w = flow.w[row].chunks_exact_mut(I::F32::N);
    for (((a, b), p), w) in a.zip(b).zip(p).zip(w) {
        let p = I::F32::load(isa, p);
        let dov = I::F32::load(isa, b);
        let weight = I::F32::load(isa, a) * p;
        zero.select_less(p, scale * weight * dov, zero).store(w);
        zero.select_less(p, weight, zero).store(a);
        zero.select_less(p, dov * p, zero).store(b);
    }
}

/// (R29) of a row from products and their tangents, and the tangent of w; 0 where P is.
#[inline(always)]
fn weigh_row_and_tangents<I: Isa>(isa: I, scratch: &mut Scratch<'_>, row: Range<usize>) {
    let Scratch { log_tangents, a: [a, da], b: [b, db], p, beta, flow, .. } = scratch;
    let (a, da) = (&mut a[row.clone()], &mut da[row.clone()]);
    let (b, db) = (&mut b[row.clone()], &mut db[row.clone()]);
    let (p, beta, w) = (&p[row.clone()], &beta[row.clone()], &mut flow.w[row]);
    let zero = I::F32::splat(isa, 0.0);
    for n in (0..p.len()).step_by(I::F32::N) {
        let (s, t) = (I::F32::load(isa, &a[n..]), I::F32::load(isa, &b[n..]));
        let (mut ds, dt) = (I::F32::load(isa, &da[n..]), I::F32::load(isa, &db[n..]));
        let p = I::F32::load(isa, &p[n..]);
        // P has the tangent β P, once in A and once in B; w has one P.
        let mut tangent = dt;
        if !log_tangents.zero {
            let beta = I::F32::load(isa, &beta[n..]);
            (ds, tangent) = (beta.mul_add(s, ds), beta.mul_add(t, dt));
        }
        let (s, ds) = (s * p, ds * p);
        zero.select_less(p, ds.mul_add(t, s * dt), zero).store(&mut w[n..]);
        zero.select_less(p, s, zero).store(&mut a[n..]);
        zero.select_less(p, ds, zero).store(&mut da[n..]);
        zero.select_less(p, t * p, zero).store(&mut b[n..]);
        zero.select_less(p, tangent * p, zero).store(&mut db[n..]);
    }
}

/// A register block of results: the queries or keys from `first` on, with the keys or queries of
/// `range` that they see or are seen by.
struct Block<'a> {
    /// True for a block of keys: the weights are then transposed.
    of_keys: bool,
    first: usize,
    /// Of the register block, those that are rows of a chunk.
    rows: usize,
    range: Range<usize>,
    /// The query in row 0 of the weights.
    top: usize,
    /// True if nothing decays; else P says what is seen.
    none: bool,
    p: &'a [f32],
}

impl Block<'_> {
    /// += Σ W X, for each W and X of the terms. `finite` says whether X holds no NaN and no infinity.
    #[inline(always)]
    fn grow<I: Isa>(
        &self,
        isa: I,
        acc: &mut [f32],
        stride: usize,
        finite: bool,
        terms: &[(&[f32], &Packed<'_>)],
    ) {
        for &(weights, packed) in terms {
            if packed.panels.is_empty() {
                continue;
            }
            let sum = Sum { acc: &mut acc[self.first * stride..], stride };
            let along = Along { packed, start: self.range.start, depth: self.range.len() };
            let block = self.at(self.pair(0, 0));
            match (finite, self.of_keys) {
                (true, false) => sum.add_rows::<I, I::Short>(isa, &weights[block..], along),
                (true, true) => sum.add_columns::<I, I::Short>(isa, &weights[block..], along),
                (false, _) => sum.add_visible::<I, I::Short>(
                    isa,
                    self.rows,
                    along,
                    #[inline(always)]
                    |r, n| {
                        let (i, j) = self.pair(r, n);
                        let at = self.at((i, j));
                        (j <= i && (self.none || self.p[at] > 0.0)).then(|| weights[at])
                    },
                ),
            }
        }
    }

    /// The query and the key of row `r` of the block and element `n` of the range.
    #[inline(always)]
    fn pair(&self, r: usize, n: usize) -> (usize, usize) {
        let (row, other) = (self.first + r, self.range.start + n);
        if self.of_keys { (other, row) } else { (row, other) }
    }

    /// The place of the weight of a query and a key.
    #[inline(always)]
    fn at(&self, (i, j): (usize, usize)) -> usize {
        (i - self.top) * STRIDE + j
    }
}
