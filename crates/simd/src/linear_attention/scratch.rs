//! What a thread of a backward or double backward pass holds of a chunk: every operand and its tangent,
//! `[x, ẋ]`. A tangent that is not there has no columns, and what it would be multiplied with is left
//! out; in the first order there is none.

use super::decays::{Decays, LogTangents};
use super::flow::Flow;
use super::operands::Operands;
use super::rows::{Panels, Rows, across, along};
use super::schedule::Schedule;
use crate::lanes::{Isa, Kernel};
use crate::level::compiled_here;
use crate::tile::STRIDE;
use crate::workspace::Parts;

/// The memory of one thread.
pub struct Scratch<'m> {
    pub decays: Decays<'m>,
    pub log_tangents: LogTangents<'m>,
    /// q, in the second order Q = σ q with Q̇ = σ ddq + ddσ q; k with ddk, v with ddv, dout with cot_o.
    pub q: [Rows<'m>; 2],
    pub k: [Rows<'m>; 2],
    pub v: [Rows<'m>; 2],
    pub dout: [Rows<'m>; 2],
    /// k and v, across.
    pub keys: [Panels<'m>; 2],
    pub values: [Panels<'m>; 2],
    /// All of them along, in the first order σ q and σ dout, and no v.
    pub keys_along: [Panels<'m>; 2],
    pub values_along: [Panels<'m>; 2],
    pub queries: [Panels<'m>; 2],
    pub douts: [Panels<'m>; 2],
    /// ω k and α dout, in the first order σ α dout, along.
    pub keys_weighted: [Panels<'m>; 2],
    pub douts_weighted: [Panels<'m>; 2],
    /// Whether k, v, q and dout, and their tangents, hold no NaN and no infinity.
    pub finite: [bool; 4],
    /// A and B of a pair of micro-chunks, rows [`STRIDE`] apart.
    pub a: [&'m mut [f32]; 2],
    pub b: [&'m mut [f32]; 2],
    /// P, and the tangent of its logarithm.
    pub p: &'m mut [f32],
    pub beta: &'m mut [f32],
    /// dg or gg.
    pub flow: Flow<'m>,
    /// dq / σ of the chunk.
    pub dq: [&'m mut [f32]; 2],
    /// dk and dv of the chunk, or gk and gv; and gdout.
    pub dk: &'m mut [f32],
    pub dv: &'m mut [f32],
    pub gdout: &'m mut [f32],
    /// Rows of what is as wide as k, and as v, lie so far apart.
    pub strides: [usize; 2],
    /// Sᵀ, D and Dᵀ of the chunk, in the second order also S; each with its tangent behind it.
    pub state_transposed: &'m mut [f32],
    pub state: &'m mut [f32],
    pub back: &'m mut [f32],
    pub back_transposed: &'m mut [f32],
    /// A query.
    pub row: &'m mut [f32],
    pub micro: usize,
    pub scale: f32,
}

/// Which gradients are computed.
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
}

/// Which operands have a tangent: q, k, v and dout.
#[derive(Debug, Clone, Copy)]
pub struct Tangents {
    pub q: bool,
    pub k: bool,
    pub v: bool,
    pub dout: bool,
}

impl Tangents {
    /// Those of a pass, or all that there may be.
    pub fn of(operands: &Operands<'_>) -> Self {
        Tangents {
            q: operands.q[1].is_some() || operands.scale[1] != 0.0,
            k: operands.k[1].is_some(),
            v: operands.v[1].is_some(),
            dout: operands.dout[1].is_some(),
        }
    }
}

impl<'m> Scratch<'m> {
    pub fn new(parts: &mut Parts<'m>, schedule: &Schedule<'_>, tangents: Tangents) -> Self {
        let Schedule { cut, shape, transposed, order, .. } = *schedule;
        let (dim, width, second) = (shape.dim, shape.width, order == 2);
        let strides = [dim, width].map(|dim| dim.next_multiple_of(cut.cols));
        let both = |dim: usize, tangent: bool| [dim, if tangent { dim } else { 0 }];
        let [q, k] = [tangents.q, tangents.k].map(|tangent| both(dim, tangent));
        let [v, dout] = [tangents.v, tangents.dout].map(|tangent| both(width, tangent));
        let values = if second { v } else { [0; 2] };
        let weighted = [both(dim, second), both(width, second)];
        let tile = cut.micro.next_multiple_of(cut.rows) * STRIDE;
        let result = |stride: usize| cut.chunk.next_multiple_of(cut.rows).saturating_mul(stride);
        let state = |elements: usize| elements.saturating_mul(order);
        let only_second = |len: usize| if second { len } else { 0 };

        parts.group("operands of a chunk");
        let [q_rows, k_rows, v_rows, dout_rows] =
            [q, k, v, dout].map(|dims| dims.map(|dim| Rows::new(parts, &cut, dim)));
        let [k_across, v_across] = [k, v].map(|dims| dims.map(|dim| across(parts, &cut, dim)));
        let [keys_along, values_along, queries, douts, keys_weighted, douts_weighted] =
            [k, values, q, dout, weighted[0], weighted[1]]
                .map(|dims| dims.map(|dim| along(parts, &cut, dim)));
        let row = parts.room(only_second(dim));
        parts.group("decays of a chunk");
        let decays = Decays::new(parts, &cut);
        let log_tangents = LogTangents::new(parts, &cut, order);
        let flow = Flow::new(parts, &cut);
        parts.group("a pair of micro-chunks");
        let [a, b] = [both(tile, second); 2].map(|lens| lens.map(|len| parts.room(len)));
        let [p, beta] = both(tile, second).map(|len| parts.room(len));
        parts.group("results of a chunk");
        let dq = both(result(strides[0]), second).map(|len| parts.room(len));
        let [dk, dv] = strides.map(|stride| parts.room(result(stride)));
        let gdout = parts.room(only_second(result(strides[1])));
        parts.group("states of a chunk");
        Scratch {
            decays,
            log_tangents,
            q: q_rows,
            k: k_rows,
            v: v_rows,
            dout: dout_rows,
            keys: k_across,
            values: v_across,
            keys_along,
            values_along,
            queries,
            douts,
            keys_weighted,
            douts_weighted,
            finite: [true; 4],
            a,
            b,
            p,
            beta,
            flow,
            dq,
            dk,
            dv,
            gdout,
            strides,
            state_transposed: parts.room(state(transposed.len())),
            state: parts.room(only_second(state(shape.len()))),
            back: parts.room(state(shape.len())),
            back_transposed: parts.room(state(transposed.len())),
            row,
            micro: cut.micro,
            scale: schedule.problem.scale as f32,
        }
    }
}

/// Packs the keys and values of a chunk: for the state alone, or for gradients.
pub struct PackKeys<'a, 'm> {
    pub len: usize,
    pub gradients: bool,
    pub scratch: &'a mut Scratch<'m>,
}

compiled_here!(PackKeys<'_, '_>);

impl Kernel for PackKeys<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let PackKeys { len, gradients, scratch } = self;
        let Scratch { decays, log_tangents, k, v, keys, values, keys_along, .. } = scratch;
        if !gradients {
            let [weighted, tangent] = &mut scratch.keys_weighted;
            let weights = (!decays.none).then_some(&*decays.omega);
            k[0].along(isa, len, weights, weighted);
            if !tangent.panels.is_empty() {
                let [_, log_tangent] = log_tangents.lists();
                k[1].tangent_along(isa, len, &k[0], decays.omega, log_tangent, tangent);
            }
            return;
        }
        for n in 0..2 {
            k[n].along(isa, len, None, &mut keys_along[n]);
            k[n].across(isa, len, &mut keys[n]);
            v[n].across(isa, len, &mut values[n]);
        }
        scratch.finite[0] = k[0].finite(len) && k[1].finite(len);
        if !scratch.values_along[0].panels.is_empty() {
            for n in 0..2 {
                v[n].along(isa, len, None, &mut scratch.values_along[n]);
            }
            scratch.finite[1] = v[0].finite(len) && v[1].finite(len);
        }
    }
}

/// Packs the queries and cotangents of a query head in a chunk: for the states alone, or for gradients.
pub struct PackQueries<'a, 'm> {
    pub len: usize,
    pub gradients: bool,
    pub scratch: &'a mut Scratch<'m>,
}

compiled_here!(PackQueries<'_, '_>);

impl Kernel for PackQueries<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let PackQueries { len, gradients, scratch } = self;
        let Scratch { decays, log_tangents, q, dout, queries, douts, flow, scale, .. } = scratch;
        let [weighted, tangent] = &mut scratch.douts_weighted;
        if tangent.panels.is_empty() {
            // x is free until the gradients are computed.
            let x = &mut *flow.x;
            if !decays.none {
                for (weight, &alpha) in x.iter_mut().zip(&*decays.alpha).take(len) {
                    *weight = *scale * alpha;
                }
                dout[0].along(isa, len, Some(x), weighted);
            }
            x[..len].fill(*scale);
            if gradients || decays.none {
                dout[0].along(isa, len, Some(x), &mut douts[0]);
            }
            if gradients {
                q[0].along(isa, len, Some(x), &mut queries[0]);
            }
        } else {
            let [log_tangent, _] = log_tangents.lists();
            dout[0].along(isa, len, Some(decays.alpha), weighted);
            dout[1].tangent_along(isa, len, &dout[0], decays.alpha, log_tangent, tangent);
            for n in 0..if gradients { 2 } else { 0 } {
                q[n].along(isa, len, None, &mut queries[n]);
                dout[n].along(isa, len, None, &mut douts[n]);
            }
        }
        if gradients {
            scratch.finite[2] = q[0].finite(len) && q[1].finite(len);
            scratch.finite[3] = dout[0].finite(len) && dout[1].finite(len);
        }
    }
}
