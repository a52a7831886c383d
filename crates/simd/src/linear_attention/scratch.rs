//! Scratch of a thread for a chunk of a backward or double backward pass: every operand and its tangent,
//! `[x, ẋ]`. A tangent that is not there has no columns, and what it would be multiplied with is left
//! out; in the first order there is none.

use super::bf16_scratch::TileScratch;
use super::decays::{Decays, LogTangents};
use super::flow::Flow;
use super::operands::{Operands, Results};
use super::rows::Factor;
use super::schedule::{Schedule, Uses};
use super::state::Shape;
use crate::lanes::matrix::BLOCK;
use crate::lanes::prefetch::Queue;
use crate::lanes::{Isa, Kernel};
use crate::tile::STRIDE;
use crate::workspace::Parts;

/// The memory of one thread.
pub struct Scratch<'m> {
    pub decays: Decays<'m>,
    pub log_tangents: LogTangents<'m>,
    /// q with ddq, in the second order Q = σ q with Q̇ = σ ddq + ddσ q; in the first order σ q along.
    pub q: Factor<'m>,
    /// k with ddk; ω k is weighted.
    pub k: Factor<'m>,
    /// v with ddv; along in the second order alone.
    pub v: Factor<'m>,
    /// dout with cot_o, in the first order σ dout along; α dout is weighted, in the first order σ α dout.
    pub dout: Factor<'m>,
    /// A and B of a pair of micro-chunks, rows [`STRIDE`] apart.
    pub a: [&'m mut [f32]; 2],
    pub b: [&'m mut [f32]; 2],
    /// P, and the tangent of its logarithm.
    pub p: &'m mut [f32],
    pub beta: &'m mut [f32],
    /// dg or gg.
    pub flow: Flow<'m>,
    /// dq / σ of the chunk; in bf16 dq, or gq, of 32 queries.
    pub dq: [&'m mut [f32]; 2],
    /// dk and dv of the chunk, or gk and gv; and gdout, in bf16 of 32 queries.
    pub dk: &'m mut [f32],
    pub dv: &'m mut [f32],
    pub gdout: &'m mut [f32],
    /// Rows of what is as wide as k, and as v, lie so far apart.
    pub strides: [usize; 2],
    /// Sᵀ, D and Dᵀ of the chunk, in the second order also S; each with its tangent behind it. Of bf16 S stands in
    /// place of Sᵀ wherever it is kept.
    pub state_transposed: &'m mut [f32],
    pub state: &'m mut [f32],
    pub back: &'m mut [f32],
    pub back_transposed: &'m mut [f32],
    /// The shapes of S and D, and of Sᵀ and Dᵀ.
    pub shape: Shape,
    pub transposed: Shape,
    /// D before the first chunk of a span, from the span alone.
    pub back_sum: &'m mut [f32],
    /// Sᵀ after each chunk of a span, from the span alone.
    pub sums: &'m mut [f32],
    /// Sᵀ before each span of a slot that is left to one thread.
    pub fronts: &'m mut [f32],
    /// A query.
    pub row: &'m mut [f32],
    /// Operands, and A and B, in bf16.
    pub tiles: TileScratch<'m>,
    /// Lines that are read or written next, prefetched meanwhile.
    pub then: Queue,
    pub micro: usize,
    pub scale: f32,
    /// True if there are tangents.
    pub second: bool,
}

/// Gradients to compute.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    pub q: bool,
    /// dq itself, which in the second order is a part of those by q and by σ.
    pub dq: bool,
    pub k: bool,
    pub v: bool,
    /// By whatever decays.
    pub g: bool,
    pub dout: bool,
    /// By σ.
    pub scale: bool,
}

impl Wanted {
    /// The gradients that have a place.
    pub fn of(results: &Results<'_>, operands: &Operands<'_>, order: usize) -> Self {
        let (q, scale) = (results.q.is_some(), results.scale.is_some());
        Wanted {
            q,
            dq: scale || q && (order == 1 || operands.ddscale != 0.0),
            k: results.k.is_some(),
            v: results.v.is_some(),
            g: results.g.is_some() || results.g_gamma.is_some(),
            dout: results.dout.is_some(),
            scale,
        }
    }
}

impl<'m> Scratch<'m> {
    /// With tangents of q, k, v and dout, of those that have one.
    pub fn new(parts: &mut Parts<'m>, schedule: &Schedule<'_>, [q, k, v, dout]: [bool; 4]) -> Self {
        let Schedule { cut, shape, transposed, order, .. } = *schedule;
        let (dim, width, second) = (shape.dim, shape.width, order == 2);
        let strides = [dim, width].map(|dim| dim.next_multiple_of(cut.cols));
        let in_f32 = |len: usize| if cut.bf16 { 0 } else { len };
        let both = |dim: usize, tangent: bool| [dim, if tangent { dim } else { 0 }].map(in_f32);
        let (none, there) = ([0; 2], [q, k, v, dout]);
        let [q, k] = [q, k].map(|tangent| both(dim, tangent));
        let [v, dout] = [v, dout].map(|tangent| both(width, tangent));
        let tile = cut.micro.next_multiple_of(cut.rows) * STRIDE;
        let result = |stride: usize| cut.chunk.next_multiple_of(cut.rows).saturating_mul(stride);
        let queries =
            |stride: usize| if cut.bf16 { BLOCK.saturating_mul(stride) } else { result(stride) };
        let states =
            |shape: Shape, count: usize| shape.len().saturating_mul(order).saturating_mul(count);
        let only_second = |len: usize| if second { len } else { 0 };
        let kept = if schedule.whole() { schedule.longest() } else { 0 };

        // In the order of the fields: what follows a group is in it.
        Scratch {
            q: Factor::new(parts.group("operands of a chunk"), &cut, q, [none, q, none]),
            k: Factor::new(parts, &cut, k, [k, k, both(dim, second)]),
            v: Factor::new(parts, &cut, v, [v, if second { v } else { none }, none]),
            dout: Factor::new(parts, &cut, dout, [none, dout, both(width, second)]),
            row: parts.room(in_f32(only_second(dim))),
            decays: Decays::new(parts.group("decays of a chunk"), &cut),
            log_tangents: LogTangents::new(parts, &cut, order),
            flow: Flow::new(parts, &cut),
            p: parts.group("a pair of micro-chunks").room(in_f32(tile)),
            beta: parts.room(in_f32(only_second(tile))),
            a: both(tile, second).map(|len| parts.room(len)),
            b: both(tile, second).map(|len| parts.room(len)),
            dk: parts.group("results of a chunk").room(result(strides[0])),
            dv: parts.room(result(strides[1])),
            dq: [queries(strides[0]), in_f32(only_second(result(strides[0])))]
                .map(|len| parts.room(len)),
            gdout: parts.room(only_second(queries(strides[1]))),
            state: parts.group("states of a chunk").room(in_f32(only_second(states(shape, 1)))),
            state_transposed: parts.room(states(transposed, 1)),
            back: parts.room(states(shape, 1)),
            back_transposed: parts.room(in_f32(states(transposed, 1))),
            back_sum: parts.room(states(shape, 1)),
            sums: parts.group("states that are kept").room(states(transposed, schedule.interval())),
            fronts: parts.room(states(transposed, kept)),
            tiles: TileScratch::new(parts.group("tiles of a chunk"), schedule, strides, there),
            then: Queue::new(),
            strides,
            shape,
            transposed,
            micro: cut.micro,
            scale: schedule.problem.scale as f32,
            second,
        }
    }
}

/// Packs the keys and values of a chunk: for the state alone, or for gradients.
pub struct PackKeys<'a, 'm> {
    pub len: usize,
    pub gradients: bool,
    pub scratch: &'a mut Scratch<'m>,
}

impl Kernel for PackKeys<'_, '_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let PackKeys { len, gradients, scratch } = self;
        let Scratch { decays, log_tangents, k, v, second, .. } = scratch;
        if gradients {
            k.pack_along(isa, len);
            k.pack_across(isa, len);
            v.pack_across(isa, len);
            k.look(len);
            if *second {
                v.pack_along(isa, len);
                v.look(len);
            }
            return;
        }
        let ([rows, tangent], [weighted, weighted_tangent]) = (&k.rows, &mut k.weighted);
        rows.along(isa, len, (!decays.none).then_some(&*decays.omega), weighted);
        if *second {
            let [_, log_tangent] = log_tangents.lists();
            tangent.tangent_along(isa, len, rows, decays.omega, log_tangent, weighted_tangent);
        }
    }
}

/// Packs the queries and cotangents of a query head in a chunk.
pub struct PackQueries<'a, 'm> {
    pub len: usize,
    pub uses: Uses,
    pub scratch: &'a mut Scratch<'m>,
}

impl Kernel for PackQueries<'_, '_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let PackQueries { len, uses: Uses { results, state }, scratch } = self;
        let Scratch { decays, log_tangents, q, dout, flow, scale, second, .. } = scratch;
        let ([rows, tangent], [weighted, weighted_tangent]) = (&dout.rows, &mut dout.weighted);
        if *second {
            let [log_tangent, _] = log_tangents.lists();
            if state {
                rows.along(isa, len, Some(decays.alpha), weighted);
                tangent.tangent_along(isa, len, rows, decays.alpha, log_tangent, weighted_tangent);
            }
            if results {
                q.pack_along(isa, len);
                dout.pack_along(isa, len);
            }
        } else {
            // x is free until the gradients are computed.
            let x = &mut *flow.x;
            if state && !decays.none {
                for (weight, &alpha) in x.iter_mut().zip(&*decays.alpha).take(len) {
                    *weight = *scale * alpha;
                }
                rows.along(isa, len, Some(x), weighted);
            }
            x[..len].fill(*scale);
            if results || state && decays.none {
                rows.along(isa, len, Some(x), &mut dout.along[0]);
            }
            if results {
                q.rows[0].along(isa, len, Some(x), &mut q.along[0]);
            }
        }
        if results {
            q.look(len);
            dout.look(len);
        }
    }
}
