//! What a thread of the backward pass holds, and how it is packed.

use super::Cut;
use super::flow::Flow;
use super::gates::Decays;
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
    pub q: Rows,
    pub k: Rows,
    pub v: Rows,
    pub dout: Rows,
    /// k and v, across.
    pub keys: Packed,
    pub values: Packed,
    /// k along; and with each row times its ω.
    pub keys_along: Packed,
    pub keys_weighted: Packed,
    /// σ q and σ dout along; the latter also times α, where anything decays.
    pub queries: Packed,
    pub douts: Packed,
    pub douts_weighted: Packed,
    /// Whether k, q and dout hold no NaN and no infinity.
    pub finite: [bool; 3],
    /// A, B and P of a pair of micro-chunks, rows [`STRIDE`] apart.
    pub a: Aligned,
    pub b: Aligned,
    pub p: Aligned,
    /// dq / σ, dk and dv of the chunk.
    pub dq: Aligned,
    pub dk: Aligned,
    pub dv: Aligned,
    /// Rows of these lie so far apart.
    pub strides: [usize; 2],
    /// dg.
    pub flow: Flow,
    /// Sᵀ, D and Dᵀ of the chunk.
    pub state: Aligned,
    pub back: Aligned,
    pub back_transposed: Aligned,
    pub micro: usize,
    pub scale: f32,
}

impl Scratch {
    pub fn new(cut: &Cut, shape: Shape, scale: f32) -> Result<Self, Error> {
        let zeros = |len| Aligned::zeros(len, "the scratch of a thread");
        let (dim, width) = (shape.dim, shape.width);
        let strides = [dim, width].map(|dim| dim.next_multiple_of(cut.cols));
        let rows = cut.chunk.next_multiple_of(cut.rows);
        let tile = || zeros(cut.micro.next_multiple_of(cut.rows) * STRIDE);
        Ok(Scratch {
            decays: Decays::room(cut)?,
            q: Rows::room(cut, dim)?,
            k: Rows::room(cut, dim)?,
            v: Rows::room(cut, width)?,
            dout: Rows::room(cut, width)?,
            keys: room_across(cut, dim)?,
            values: room_across(cut, width)?,
            keys_along: room_along(cut, dim)?,
            keys_weighted: room_along(cut, dim)?,
            queries: room_along(cut, dim)?,
            douts: room_along(cut, width)?,
            douts_weighted: room_along(cut, width)?,
            finite: [true; 3],
            a: tile()?,
            b: tile()?,
            p: tile()?,
            dq: zeros(rows.saturating_mul(strides[0]))?,
            dk: zeros(rows.saturating_mul(strides[0]))?,
            dv: zeros(rows.saturating_mul(strides[1]))?,
            strides,
            flow: Flow::room(cut)?,
            state: zeros(shape.transposed(cut).len())?,
            back: zeros(shape.len())?,
            back_transposed: zeros(shape.transposed(cut).len())?,
            micro: cut.micro,
            scale,
        })
    }

    /// Its buffers by what they are for.
    pub fn buffers(&self) -> [(&'static str, usize); 5] {
        let sum = |list: &[&Aligned]| list.iter().map(|x| x.bytes()).sum::<usize>();
        let rows = [&self.q, &self.k, &self.v, &self.dout].map(Rows::bytes).iter().sum::<usize>();
        let packed = [&self.keys, &self.values, &self.keys_along, &self.keys_weighted]
            .into_iter()
            .chain([&self.queries, &self.douts, &self.douts_weighted])
            .map(|packed| packed.panels.bytes());
        let [pair, gates] = self.flow.bytes();
        [
            ("operands of a chunk", rows + packed.sum::<usize>()),
            ("a pair of micro-chunks", pair + sum(&[&self.a, &self.b, &self.p])),
            ("decays of a chunk", self.decays.bytes() + gates),
            ("results of a chunk", sum(&[&self.dq, &self.dk, &self.dv])),
            ("states of a chunk", sum(&[&self.state, &self.back, &self.back_transposed])),
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
        let Scratch { decays, k, v, keys, values, keys_along, keys_weighted, .. } = scratch;
        if !gradients {
            let weights = (!decays.none).then_some(&decays.omega[..]);
            return k.along(isa, len, weights, keys_weighted);
        }
        k.along(isa, len, None, keys_along);
        k.across(isa, len, keys);
        v.across(isa, len, values);
        scratch.finite[0] = k.finite(len);
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
        let Scratch { decays, q, dout, queries, douts, douts_weighted, flow, scale, .. } = scratch;
        let x = &mut flow.x;
        // x is free until the gradients are computed.
        if !decays.none {
            for (weight, &alpha) in x.iter_mut().zip(&*decays.alpha).take(len) {
                *weight = *scale * alpha;
            }
            dout.along(isa, len, Some(x), douts_weighted);
        }
        x[..len].fill(*scale);
        if gradients || decays.none {
            dout.along(isa, len, Some(x), douts);
        }
        if gradients {
            q.along(isa, len, Some(x), queries);
            scratch.finite[1] = q.finite(len);
            scratch.finite[2] = dout.finite(len);
        }
    }
}
