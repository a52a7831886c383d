//! The kernels of the double backward pass: tangents of the gradients of one chunk of one key
//! head along those of their operands. With Q = σ q, and a dot for the tangent of each letter:
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
//! gg is the sum of the tangents of w, x, y and z of (R27). What a decay of 0 would multiply is absent.

use super::decays::{Decays, LogTangents};
use super::gradient::{Block, inner};
use super::rows::{Panels, Rows};
use super::scratch::{Scratch, Wanted};
use super::state::{Shape, transpose_states};
use crate::lanes::{Isa, Kernel, Lanes};
use crate::level::compiled_here;
use crate::tile::{STRIDE, Tile};
use std::ops::Range;

/// S and Dᵀ, and what the state after the chunk contributes to gk, gv and gg.
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
        let Scratch { decays, log_tangents, k, v, dk: gk, dv: gv, dq, strides, flow, .. } = scratch;
        let Scratch { state, state_transposed, back, back_transposed, .. } = scratch;
        let Wanted { dout: gdout, k: keys, v: values, g: gg, .. } = wanted;
        if gdout {
            transpose_states(isa, state_transposed, transposed, state, shape);
        }
        let (weights, log_tangent) = (&decays.omega[..], log_tangents.lists()[1]);
        if keys || gg {
            transpose_states(isa, back, shape, back_transposed, transposed);
            let read = Read { len, rows: v, states: back_transposed, shape: transposed, weights };
            // dq is free until the first query head is worked on.
            let value = gg.then_some(&mut dq[0][..]);
            read.add(isa, log_tangent, value, gk, strides[0]);
        }
        if values {
            let read = Read { len, rows: k, states: back, shape, weights };
            read.add(isa, log_tangent, None, gv, strides[1]);
        }
        if gg {
            for j in 0..len {
                let row = j * strides[0];
                flow.y[j] = match weights[j] {
                    0.0 => 0.0,
                    _ => k[1].dot(isa, j, &dq[0][row..]) + k[0].dot(isa, j, &gk[row..]),
                };
            }
            flow.begin(
                len,
                whole(isa, decays, log_tangents, transposed, state_transposed, back_transposed),
            );
        }
    }
}

/// The tangent of z.
#[inline(always)]
fn whole<I: Isa>(
    isa: I,
    decays: &Decays<'_>,
    log_tangents: &LogTangents<'_>,
    shape: Shape,
    s: &[f32],
    d: &[f32],
) -> f32 {
    if decays.whole == 0.0 {
        return 0.0;
    }
    let ((s, s_tangent), (d, d_tangent)) = (s.split_at(shape.len()), d.split_at(shape.len()));
    let mut sum = inner(isa, shape, s_tangent, d) + inner(isa, shape, s, d_tangent);
    if !log_tangents.zero {
        sum += log_tangents.whole * inner(isa, shape, s, d);
    }
    decays.whole * sum
}

/// Rows times a state, with the tangents of both.
struct Read<'a> {
    len: usize,
    rows: &'a [Rows<'a>; 2],
    states: &'a [f32],
    shape: Shape,
    /// The weights of the rows; where one is 0, the state is absent.
    weights: &'a [f32],
}

impl Read<'_> {
    /// tangent_i = w_i (d_i x_i S + ẋ_i S + x_i Ṡ), with d the tangents of the logarithms of the weights,
    /// and value_i = w_i x_i S.
    #[inline(always)]
    fn add<I: Isa>(
        &self,
        isa: I,
        log_tangent: Option<&[f32]>,
        mut value: Option<&mut [f32]>,
        tangent: &mut [f32],
        stride: usize,
    ) {
        let Read { len, rows, states, shape, weights } = self;
        let (state, state_tangent) = states.split_at(shape.len());
        for first in (0..*len).step_by(I::Tile::ROWS) {
            let panels =
                state.chunks_exact(shape.panel()).zip(state_tangent.chunks_exact(shape.panel()));
            for (number, (panel, panel_tangent)) in panels.enumerate() {
                let at = first * stride + number * I::Tile::COLS;
                let mut tile = I::Tile::zero(isa);
                if log_tangent.is_some() || value.is_some() {
                    rows[0].add_rows(isa, &mut tile, first, panel);
                }
                if let Some(value) = &mut value {
                    tile.scale_rows(isa, &weights[first..]).store(&mut value[at..], stride);
                }
                tile = match log_tangent {
                    Some(log_tangent) => tile.scale_rows(isa, &log_tangent[first..]),
                    None => I::Tile::zero(isa),
                };
                rows[1].add_rows(isa, &mut tile, first, panel);
                rows[0].add_rows(isa, &mut tile, first, panel_tangent);
                tile.scale_rows(isa, &weights[first..]).store(&mut tangent[at..], stride);
            }
        }
    }
}

/// What one query head contributes to the second gradients of a chunk; gdout of it, and dq / σ with
/// its tangent.
pub struct Chunk<'a, 'm> {
    pub len: usize,
    pub shape: Shape,
    pub transposed: Shape,
    pub wanted: Wanted,
    /// Whether S and its tangent are 0.
    pub blank: bool,
    pub scratch: &'a mut Scratch<'m>,
}

compiled_here!(Chunk<'_, '_>);

impl Kernel for Chunk<'_, '_> {
    type Output = ();

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
    }
}

impl Chunk<'_, '_> {
    /// gdout, dq with its tangent, and x, from the state before the chunk.
    #[inline(always)]
    fn add_before<I: Isa>(&mut self, isa: I) {
        let Chunk { len, shape, transposed, wanted, blank, scratch } = self;
        let Scratch { decays, log_tangents, q, dout, gdout, dq, strides, flow, .. } = scratch;
        let Scratch { state, state_transposed, .. } = scratch;
        if *blank {
            gdout.fill(0.0);
            dq.iter_mut().for_each(|dq| dq.fill(0.0));
            flow.x.fill(0.0);
            return;
        }
        let (len, weights) = (*len, &decays.alpha[..]);
        let log_tangent = log_tangents.lists()[0];
        if wanted.dout {
            let read = Read { len, rows: q, states: state, shape: *shape, weights };
            read.add(isa, log_tangent, None, gdout, strides[1]);
        }
        if wanted.q || wanted.dq || wanted.g {
            let (states, shape) = (&state_transposed[..], *transposed);
            let read = Read { len, rows: dout, states, shape, weights };
            let [value, tangent] = dq;
            let value = (wanted.dq || wanted.g).then_some(&mut value[..]);
            read.add(isa, log_tangent, value, tangent, strides[0]);
        }
        if wanted.g {
            for i in 0..len {
                let row = i * strides[0];
                flow.x[i] = match weights[i] {
                    0.0 => 0.0,
                    _ => q[1].dot(isa, i, &dq[0][row..]) + q[0].dot(isa, i, &dq[1][row..]),
                };
            }
        }
    }

    /// A pair of micro-chunks.
    #[inline(always)]
    fn pair<I: Isa>(&mut self, isa: I, queries: Range<usize>, keys: Range<usize>) {
        let diagonal = queries.start == keys.start;
        let height = I::Tile::ROWS;
        for first in queries.clone().step_by(height) {
            let at = (first - queries.start) * STRIDE;
            let last = if diagonal { keys.end.min(first + height) } else { keys.end };
            self.products(isa, first, at, keys.start..last);
            let Scratch { decays, log_tangents, p, beta, .. } = &mut *self.scratch;
            if !decays.none {
                let begin = diagonal && first == queries.start;
                decays.rows(isa, first, keys.clone(), begin, &mut p[at..]);
                if !log_tangents.zero {
                    log_tangents.rows(isa, first, keys.clone(), begin, &mut beta[at..]);
                }
            }
            self.weigh(isa, first, at, keys.clone());
            self.grow_queries(isa, first, queries.start, keys.start..last);
        }
        // The keys of a diagonal pair are seen from themselves on.
        for first in keys.clone().step_by(height) {
            let from = if diagonal { first } else { queries.start };
            self.grow_keys(isa, first, from..queries.end, queries.start);
        }
        if self.wanted.g {
            self.scratch.flow.pair(isa, queries, keys, diagonal);
        }
    }

    /// The products of a register block of queries with keys, and with values, before weights.
    #[inline(always)]
    fn products<I: Isa>(&mut self, isa: I, first: usize, at: usize, keys: Range<usize>) {
        let Wanted { q: gq, dq, k: gk, v: gv, g: gg, dout: gdout } = self.wanted;
        let Scratch { q, dout, keys: k, values: v, a, b, .. } = &mut *self.scratch;
        if gdout || gv || gg {
            multiply(isa, q, first, k, keys.clone(), a, at);
        }
        if gq || dq || gk || gg {
            multiply(isa, dout, first, v, keys, b, at);
        }
    }

    /// A, B and their tangents, from products, and the tangent of w; 0 where P is, or without decays where
    /// j > i.
    #[inline(always)]
    fn weigh<I: Isa>(&mut self, isa: I, first: usize, at: usize, keys: Range<usize>) {
        let Scratch { decays, log_tangents, a: [a, da], b: [b, db], p, beta, flow, .. } =
            &mut *self.scratch;
        let zero = I::F32::splat(isa, 0.0);
        let width = keys.len().next_multiple_of(I::F32::N);
        for r in 0..I::Tile::ROWS {
            let here = at + r * STRIDE + keys.start;
            if decays.none {
                let after = (first + r + 1).saturating_sub(keys.start).min(keys.len());
                for x in [&mut *a, &mut *da, &mut *b, &mut *db] {
                    x[here + after..here + keys.len()].fill(0.0);
                }
                continue;
            }
            let row = here..here + width;
            let (a, da) = (&mut a[row.clone()], &mut da[row.clone()]);
            let (b, db) = (&mut b[row.clone()], &mut db[row.clone()]);
            let (p, beta, w) = (&p[row.clone()], &beta[row.clone()], &mut flow.w[row]);
            for n in (0..width).step_by(I::F32::N) {
                let [s, mut ds, t, dt, p] = [&*a, &*da, &*b, &*db, p].map(
                    #[inline(always)]
                    |x| I::F32::load(isa, &x[n..]),
                );
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
    }

    /// dq / σ += B K and its tangent += Ḃ K + B K̇, gdout += Ȧ V + A V̇, of a register block of queries.
    #[inline(always)]
    fn grow_queries<I: Isa>(&mut self, isa: I, first: usize, top: usize, keys: Range<usize>) {
        let Wanted { q: gq, dq: value, dout: outputs, .. } = self.wanted;
        let scratch = &mut *self.scratch;
        let Scratch { decays, p, a, b, keys_along: k, values_along: v, strides, .. } = scratch;
        let Scratch { dq: [dq, tangent], gdout, finite, .. } = scratch;
        let (none, rows) = (decays.none, I::Tile::ROWS);
        let mut block = Block { first, rows, range: keys, top, none, p, finite: finite[0] };
        if value {
            block.grow_rows(isa, dq, strides[0], &[(b[0], &k[0])]);
        }
        if gq || value {
            block.grow_rows(isa, tangent, strides[0], &[(b[1], &k[0]), (b[0], &k[1])]);
        }
        block.finite = finite[1];
        if outputs {
            block.grow_rows(isa, gdout, strides[1], &[(a[1], &v[0]), (a[0], &v[1])]);
        }
    }

    /// gk += Ḃᵀ Q + Bᵀ Q̇ and gv += Ȧᵀ dO + Aᵀ dȮ, of a register block of keys.
    #[inline(always)]
    fn grow_keys<I: Isa>(&mut self, isa: I, first: usize, queries: Range<usize>, top: usize) {
        if queries.is_empty() {
            return;
        }
        let Wanted { k: keys, v: values, .. } = self.wanted;
        let rows = I::Tile::ROWS.min(self.len - first);
        let Scratch { decays, p, a, b, queries: q, douts, dk: gk, dv: gv, strides, finite, .. } =
            &mut *self.scratch;
        let none = decays.none;
        let mut block = Block { first, rows, range: queries, top, none, p, finite: finite[2] };
        if keys {
            block.grow_columns(isa, gk, strides[0], &[(b[1], &q[0]), (b[0], &q[1])]);
        }
        block.finite = finite[3];
        if values {
            block.grow_columns(isa, gv, strides[1], &[(a[1], &douts[0]), (a[0], &douts[1])]);
        }
    }
}

/// Rows times packed rows, with the tangent: what A and B are made of.
#[inline(always)]
fn multiply<I: Isa>(
    isa: I,
    rows: &[Rows<'_>; 2],
    first: usize,
    packed: &[Panels<'_>; 2],
    keys: Range<usize>,
    to: &mut [&mut [f32]; 2],
    at: usize,
) {
    let cols = I::Tile::COLS;
    for column in (keys.start / cols * cols..keys.end).step_by(cols) {
        let panel = packed[0].from(column / cols);
        let mut tile = I::Tile::zero(isa);
        rows[0].add_rows(isa, &mut tile, first, panel);
        tile.store(&mut to[0][at + column..], STRIDE);
        let mut tile = I::Tile::zero(isa);
        rows[1].add_rows(isa, &mut tile, first, panel);
        if !packed[1].panels.is_empty() {
            rows[0].add_rows(isa, &mut tile, first, packed[1].from(column / cols));
        }
        tile.store(&mut to[1][at + column..], STRIDE);
    }
}
