//! What a thread of the double backward pass holds: every operand and how it moves, `[x, ẋ]`. A
//! motion that is not there has no columns, and what it would be multiplied with is left out.

use super::Cut;
use super::flow::Flow;
use super::gates::{Decays, Drifts};
use super::operand::{Rows, room_across, room_along};
use super::state::Shape;
use crate::aligned::Aligned;
use crate::lanes::{Isa, Kernel};
use crate::level::compiled_here;
use crate::pack::Packed;
use crate::tile::STRIDE;
use etalon_problem::Error;

/// The memory of one thread.
pub struct Scratch {
    pub decays: Decays,
    pub drifts: Drifts,
    /// Q = σ q with Q̇ = σ ddq + ddσ q, k with ddk, v with ddv, dout with cot_o.
    pub q: [Rows; 2],
    pub k: [Rows; 2],
    pub v: [Rows; 2],
    pub dout: [Rows; 2],
    /// k and v, across.
    pub keys: [Packed; 2],
    pub values: [Packed; 2],
    /// All of them, along.
    pub keys_along: [Packed; 2],
    pub values_along: [Packed; 2],
    pub queries: [Packed; 2],
    pub douts: [Packed; 2],
    /// ω k and α dout, along, and how they move.
    pub keys_weighted: [Packed; 2],
    pub douts_weighted: [Packed; 2],
    /// Whether k, v, Q and dout, and how they move, hold no NaN and no infinity.
    pub finite: [bool; 4],
    /// A and B of a pair of micro-chunks, rows [`STRIDE`] apart.
    pub a: [Aligned; 2],
    pub b: [Aligned; 2],
    /// P, and how its logarithm moves.
    pub p: Aligned,
    pub beta: Aligned,
    /// gg.
    pub flow: Flow,
    /// dq / σ of the chunk, and how it moves.
    pub dq: [Aligned; 2],
    pub gk: Aligned,
    pub gv: Aligned,
    pub gdout: Aligned,
    /// Rows of what is as wide as k, and as v, lie so far apart.
    pub strides: [usize; 2],
    /// Sᵀ, S, D and Dᵀ of the chunk; each with how it moves behind it.
    pub state_transposed: Aligned,
    pub state: Aligned,
    pub back: Aligned,
    pub back_transposed: Aligned,
    /// A query.
    pub row: Vec<f32>,
    pub micro: usize,
}

/// Which operands move: q, k, v and dout.
#[derive(Debug, Clone, Copy)]
pub struct Moves {
    pub q: bool,
    pub k: bool,
    pub v: bool,
    pub dout: bool,
}

/// Room for a value, and for a motion if there is one.
fn both<X>(
    moves: bool,
    dim: usize,
    room: impl Fn(usize) -> Result<X, Error>,
) -> Result<[X; 2], Error> {
    Ok([room(dim)?, room(if moves { dim } else { 0 })?])
}

impl Scratch {
    pub fn new(cut: &Cut, shape: Shape, moves: Moves) -> Result<Self, Error> {
        let zeros = |len| Aligned::zeros(len, "the scratch of a thread");
        let rows = |moves, dim| both(moves, dim, |dim| Rows::room(cut, dim));
        let across = |moves, dim| both(moves, dim, |dim| room_across(cut, dim));
        let along = |moves, dim| both(moves, dim, |dim| room_along(cut, dim));
        let (dim, width) = (shape.dim, shape.width);
        let strides = [dim, width].map(|dim| dim.next_multiple_of(cut.cols));
        let chunk = cut.chunk.next_multiple_of(cut.rows);
        let result = |stride: usize| zeros(chunk.saturating_mul(stride));
        let tile = || zeros(cut.micro.next_multiple_of(cut.rows) * STRIDE);
        let states = |shape: Shape| zeros(shape.len().saturating_mul(2));
        Ok(Scratch {
            decays: Decays::room(cut)?,
            drifts: Drifts::room(cut)?,
            q: rows(moves.q, dim)?,
            k: rows(moves.k, dim)?,
            v: rows(moves.v, width)?,
            dout: rows(moves.dout, width)?,
            keys: across(moves.k, dim)?,
            values: across(moves.v, width)?,
            keys_along: along(moves.k, dim)?,
            values_along: along(moves.v, width)?,
            queries: along(moves.q, dim)?,
            douts: along(moves.dout, width)?,
            keys_weighted: along(true, dim)?,
            douts_weighted: along(true, width)?,
            finite: [true; 4],
            a: [tile()?, tile()?],
            b: [tile()?, tile()?],
            p: tile()?,
            beta: tile()?,
            flow: Flow::room(cut)?,
            dq: [result(strides[0])?, result(strides[0])?],
            gk: result(strides[0])?,
            gv: result(strides[1])?,
            gdout: result(strides[1])?,
            strides,
            state_transposed: states(shape.transposed(cut))?,
            state: states(shape)?,
            back: states(shape)?,
            back_transposed: states(shape.transposed(cut))?,
            row: crate::parallel::zeroed(dim, "a query")?,
            micro: cut.micro,
        })
    }

    /// Its buffers by what they are for.
    pub fn buffers(&self) -> [(&'static str, usize); 5] {
        let sum = |list: &[&Aligned]| list.iter().map(|x| x.bytes()).sum::<usize>();
        let rows = [&self.q, &self.k, &self.v, &self.dout].into_iter().flatten().map(Rows::bytes);
        let packed = [&self.keys, &self.values, &self.keys_along, &self.values_along]
            .into_iter()
            .chain([&self.queries, &self.douts, &self.keys_weighted, &self.douts_weighted])
            .flatten()
            .map(|packed| packed.panels.bytes());
        let row = self.row.len() * size_of::<f32>();
        let [pair, gates] = self.flow.bytes();
        let [a, b, dq] = [&self.a, &self.b, &self.dq].map(|[x, y]| sum(&[x, y]));
        let Scratch { state_transposed, state, back, back_transposed, .. } = self;
        [
            ("operands of a chunk", rows.sum::<usize>() + packed.sum::<usize>() + row),
            ("a pair of micro-chunks", pair + a + b + sum(&[&self.p, &self.beta])),
            ("decays of a chunk", self.decays.bytes() + self.drifts.bytes() + gates),
            ("results of a chunk", dq + sum(&[&self.gk, &self.gv, &self.gdout])),
            ("states of a chunk", sum(&[state_transposed, state, back, back_transposed])),
        ]
    }
}

/// Packs the keys and values of a chunk, for the states alone or for gradients.
pub struct PackKeys<'a> {
    pub len: usize,
    pub gradients: bool,
    pub scratch: &'a mut Scratch,
}

compiled_here!(PackKeys<'_>);

impl Kernel for PackKeys<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let PackKeys { len, gradients, scratch } = self;
        let Scratch { decays, drifts, k, v, keys, values, keys_along, values_along, .. } = scratch;
        let [weighted, moving] = &mut scratch.keys_weighted;
        let drift = (!drifts.still).then_some(&drifts.omega[..]);
        k[0].along(isa, len, Some(&decays.omega), weighted);
        k[1].along_moving(isa, len, &k[0], &decays.omega, drift, moving);
        if !gradients {
            return;
        }
        for n in 0..2 {
            k[n].across(isa, len, &mut keys[n]);
            v[n].across(isa, len, &mut values[n]);
            k[n].along(isa, len, None, &mut keys_along[n]);
            v[n].along(isa, len, None, &mut values_along[n]);
        }
        scratch.finite[0] = k[0].finite(len) && k[1].finite(len);
        scratch.finite[1] = v[0].finite(len) && v[1].finite(len);
    }
}

/// Packs the queries and cotangents of a query head in a chunk, for the states alone or for gradients.
pub struct PackQueries<'a> {
    pub len: usize,
    pub gradients: bool,
    pub scratch: &'a mut Scratch,
}

compiled_here!(PackQueries<'_>);

impl Kernel for PackQueries<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let PackQueries { len, gradients, scratch } = self;
        let Scratch { decays, drifts, q, dout, queries, douts, .. } = scratch;
        let [weighted, moving] = &mut scratch.douts_weighted;
        let drift = (!drifts.still).then_some(&drifts.alpha[..]);
        dout[0].along(isa, len, Some(&decays.alpha), weighted);
        dout[1].along_moving(isa, len, &dout[0], &decays.alpha, drift, moving);
        if !gradients {
            return;
        }
        for n in 0..2 {
            q[n].along(isa, len, None, &mut queries[n]);
            dout[n].along(isa, len, None, &mut douts[n]);
        }
        scratch.finite[2] = q[0].finite(len) && q[1].finite(len);
        scratch.finite[3] = dout[0].finite(len) && dout[1].finite(len);
    }
}
