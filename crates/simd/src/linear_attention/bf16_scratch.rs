//! Scratch of a thread for a chunk of the backward or double backward pass in bf16, and the operands and states in it.

use super::bf16_state::{End, Rounded, grow};
use super::decays::{Decays, LogTangents};
use super::schedule::Schedule;
use super::words::{Forms, Words};
use crate::Level;
use crate::element::Tensor;
use crate::lanes::matrix::BLOCK;
use crate::pack::Form;
use crate::tile::STRIDE;
use crate::workspace::Parts;
use ndarray::Ix2;
use std::ops::Range;

/// An operand and its tangent.
pub type Pair<'m> = [Words<'m>; 2];

/// The memory of one thread, beside that of sums and states. Of lists of two the second is that of tangents, and empty
/// in the first order.
pub struct TileScratch<'m> {
    pub q: Pair<'m>,
    pub k: Pair<'m>,
    pub v: Pair<'m>,
    pub dout: Pair<'m>,
    /// q·k and dout·v of 32 queries; P of two, and the tangents of its logarithm.
    pub products: [[&'m mut [f32]; 2]; 2],
    pub p: [&'m mut [f32]; 2],
    /// A and B of 32 queries in pairs of queries, and in pairs of keys; and in pairs of queries of all, transposed.
    pub pairs: [[&'m mut [f32]; 2]; 2],
    pub of_keys: [[&'m mut [f32]; 2]; 2],
    pub turned: [[&'m mut [f32]; 2]; 2],
    /// Numbers of bf16 as whose sum these are multiplied, and states.
    pub pieces: usize,
    /// S and D.
    pub front: [Rounded<'m>; 2],
    pub back: [Rounded<'m>; 2],
    /// Rows that read a state, where 32 rows read its tangent, too.
    pub value: &'m mut [f32],
    /// α with the factor σ, and ω.
    pub begin: End<'m>,
    pub end: End<'m>,
    pub second: bool,
}

impl<'m> TileScratch<'m> {
    /// Rows of what is as wide as k, and as v, lie so far apart; of q, k, v and dout some have tangents.
    pub fn new(
        parts: &mut Parts<'m>,
        schedule: &Schedule<'_>,
        strides: [usize; 2],
        tangents: [bool; 4],
    ) -> Self {
        let Schedule { cut, shape, order, .. } = *schedule;
        let second = cut.bf16 && order == 2;
        let room = |len: usize| if cut.bf16 { len } else { 0 };
        let both = |len: usize| [room(len), if second { len } else { 0 }];
        let [band, all] = [(BLOCK, cut.chunk), (cut.chunk, cut.chunk)]
            .map(|(len, dim)| Form::len(len, dim).saturating_mul(cut.pieces));
        let mut words = |dim: usize, number: usize, [across, weighted, columns]: [bool; 3]| {
            let there = second && tangents[number];
            let forms =
                |there: bool, weighted| [there, across && there, there, weighted, columns && there];
            let [value, tangent] = [forms(true, weighted), forms(there, second && weighted)];
            [value, tangent].map(|forms| Words::new(parts, &cut, dim, forms))
        };
        let (dim, width) = (shape.dim, shape.width);
        let q = words(dim, 0, [false, false, true]);
        let k = words(dim, 1, [true, false, true]);
        let v = words(width, 2, [true, true, false]);
        let dout = words(width, 3, [false, true, false]);
        let mut lists = |len: usize| both(len).map(|len| parts.room(len));
        let (products, p) = ([lists(BLOCK * STRIDE), lists(BLOCK * STRIDE)], lists(2 * STRIDE));
        let (pairs, turned) = ([lists(band), lists(band)], [lists(all), lists(all)]);
        let of_keys = [lists(if second { band } else { 0 }), lists(band)];
        let mut rounded = |[along, across]: [bool; 2]| {
            [cut.bf16, second]
                .map(|there| [along && there, across && there])
                .map(|forms| Rounded::new(parts, shape, cut.pieces, forms))
        };
        let (front, back) = (rounded([second, true]), rounded([true; 2]));
        let value = if second { BLOCK.saturating_mul(strides[0].max(strides[1])) } else { 0 };
        let mut end = || End::new(parts, room(cut.chunk), second);
        let (begin, end) = (end(), end());
        TileScratch {
            q,
            k,
            v,
            dout,
            products,
            p,
            pairs,
            of_keys,
            turned,
            pieces: cut.pieces,
            front,
            back,
            value: parts.room(value),
            begin,
            end,
            second,
        }
    }
}

impl TileScratch<'_> {
    /// Weights of the tokens of a chunk, with σ and its tangent.
    pub fn prepare(
        &mut self,
        decays: &Decays<'_>,
        log_tangents: &LogTangents<'_>,
        scales: [f32; 2],
        len: usize,
    ) {
        let [alpha, omega] = log_tangents.lists();
        self.begin.prepare((decays.alpha, decays.none), alpha, scales, len);
        self.end.prepare((decays.omega, decays.none), omega, [1.0, 0.0], len);
    }

    /// Packs the keys and values of a chunk: for the state alone, or for gradients.
    pub fn read_keys(
        &mut self,
        level: Level,
        decays: &Decays<'_>,
        [k, v]: [[Option<Tensor<'_, Ix2>>; 2]; 2],
        len: usize,
        gradients: bool,
    ) {
        let (tokens, second) = (decays.first..len, self.second);
        let of_k = Forms { across: gradients, along: true, columns: !gradients, weights: None };
        let of_v = Forms { across: gradients, along: !gradients || second, ..Forms::default() };
        let state = (!gradients).then_some(&self.end);
        read(level, &mut self.k, k, of_k, None, tokens.clone());
        read(level, &mut self.v, v, of_v, state, tokens);
    }

    /// Packs the queries and cotangents of a query head in a chunk: for gradients, and with `state` for D.
    pub fn read_head(
        &mut self,
        level: Level,
        decays: &Decays<'_>,
        [q, dout]: [[Option<Tensor<'_, Ix2>>; 2]; 2],
        len: usize,
        state: bool,
    ) {
        let tokens = 0..decays.reset.min(len);
        let of_q = Forms { along: true, columns: state, ..Forms::default() };
        let of_dout = Forms { along: true, ..Forms::default() };
        let state = state.then_some(&self.begin);
        read(level, &mut self.q, q, of_q, None, tokens.clone());
        read(level, &mut self.dout, dout, of_dout, state, tokens);
    }

    /// (R22), or a term of (R30): of keys and values those, or their tangents.
    pub fn advance_front(
        &self,
        schedule: &Schedule<'_>,
        state: (&mut [f32], f32),
        decays: &Decays<'_>,
        [k, v]: [usize; 2],
        len: usize,
    ) {
        let (level, right) = (schedule.options.level, (&self.v[v], self.end.plain));
        grow(level, schedule.shape, state, &self.k[k], right, decays.first..len);
    }

    /// (R28), or a term of (R31), for one query head, D having decayed. Tokens from a reset on do not see what is
    /// before the chunk.
    pub fn advance_back(
        &self,
        schedule: &Schedule<'_>,
        state: &mut [f32],
        decays: &Decays<'_>,
        [q, dout]: [usize; 2],
        len: usize,
    ) {
        let (level, right) = (schedule.options.level, (&self.dout[dout], self.begin.plain));
        grow(level, schedule.shape, (state, 1.0), &self.q[q], right, 0..decays.reset.min(len));
    }

    /// Rounds S and D.
    pub fn round(&mut self, schedule: &Schedule<'_>, states: [&[f32]; 2]) {
        let (level, shape) = (schedule.options.level, schedule.shape);
        for (state, to) in states.into_iter().zip([&mut self.front, &mut self.back]) {
            for (state, to) in state.chunks_exact(shape.len()).zip(to) {
                to.round(level, shape, state);
            }
        }
    }
}

/// Packs an operand and its tangent, and weighs them for the state at an end of the chunk.
fn read(
    level: Level,
    [value, tangent]: &mut Pair<'_>,
    sources: [Option<Tensor<'_, Ix2>>; 2],
    forms: Forms<'_>,
    state: Option<&End<'_>>,
    tokens: Range<usize>,
) {
    let [source, of_tangent] = sources;
    let state = state.filter(|end| !end.plain);
    let weights = state.map(|end| &*end.weights[0]);
    value.pack(level, source, Forms { weights, ..forms }, tokens.clone());
    tangent.pack(level, of_tangent, forms, tokens.clone());
    if let Some(end) = state
        && !tangent.weighted.is_empty()
    {
        tangent.weigh_tangents(level, value, [&*end.weights[0], end.tangents()], tokens);
    }
}
