//! Operands of the passes of the softmax algorithms, of any element type.

use super::cut::Cut;
use crate::element::{Tensor, View};
use crate::known::Known;
use crate::{Options, named};
use etalon_problem::{Blocking, DistanceBias, Error, Pass, Problem, Scores, Sequence};
use ndarray::{Ix1, Ix2, Ix3, Ix4};

/// A number for each distance below W, `[Hq, W]`.
pub type ByDistance<'a> = (DistanceBias, View<'a, f32, Ix2>);

/// The operands of attention, of lazy attention, or of attention_lse, which has no values: those that a
/// pass has.
#[derive(Clone, Copy)]
pub struct Operands<'a> {
    /// The scores and which of them count.
    pub scores: &'a Scores,
    /// The sequences of queries and keys.
    pub sequences: &'a [Sequence],
    /// `[B, Hq, N, D]`.
    pub q: Tensor<'a, Ix4>,
    /// `[B, Hk, M, D]`.
    pub k: Tensor<'a, Ix4>,
    /// `[B, Hk, M, E]`.
    pub v: Option<Tensor<'a, Ix4>>,
    /// `[Hq]`, where the problem has sinks.
    pub sinks: Option<View<'a, f32, Ix1>>,
    /// `[B or 1, Hq or 1, N, M]`, where the problem has a bias.
    pub bias: Option<Tensor<'a, Ix4>>,
    /// `[Hq, W]`, of lazy attention, where the problem has a bias by distance.
    pub distances: Option<ByDistance<'a>>,
    /// τ `[Hq]`, of lazy attention alone.
    pub tau: Option<View<'a, f32, Ix1>>,
    /// o of the forward pass, `[B, Hq, N, E]`.
    pub o: Option<Tensor<'a, Ix4>>,
    /// lse of the forward pass, `[B, Hq, N]`.
    pub lse: Option<View<'a, f32, Ix3>>,
    /// ∂lse/∂q of the forward pass, `[B, Hq, N, D]`; of attention_lse, where it was written: then dq
    /// needs no sweep.
    pub gradient: Option<View<'a, f32, Ix4>>,
    /// Σ a P v of the forward pass of lazy attention, `[B, Hq, N, E]`, where it was written: its product
    /// with dout is Δ.
    pub pv: Option<View<'a, f32, Ix4>>,
    pub dout: Option<Tensor<'a, Ix4>>,
    pub dlse: Option<View<'a, f32, Ix3>>,
    /// The direction in which the inputs move, or the cotangents of their gradients: each in the shape
    /// of its input; an absent one is zero.
    pub ddq: Option<Tensor<'a, Ix4>>,
    pub ddk: Option<Tensor<'a, Ix4>>,
    pub ddv: Option<Tensor<'a, Ix4>>,
    pub ddsinks: Option<View<'a, f32, Ix1>>,
    pub ddbias: Option<Tensor<'a, Ix4>>,
    /// ddbias of lazy attention, `[Hq, W]`.
    pub dd_distances: Option<ByDistance<'a>>,
    /// `[Hq]`, of lazy attention.
    pub ddtau: Option<View<'a, f32, Ix1>>,
    pub cot_o: Option<Tensor<'a, Ix4>>,
    pub cot_lse: Option<View<'a, f32, Ix3>>,
}

impl<'a> Operands<'a> {
    /// The operands of a pass, by name.
    pub fn of(
        known: &'a Known,
        scores: &'a Scores,
        x: named::Inputs<'a, '_>,
    ) -> Result<Operands<'a>, Error> {
        let [ddq, ddk, ddv, ddsinks, ddbias] = match known.pass {
            Pass::Jvp => ["tq", "tk", "tv", "tsinks", "tbias"],
            _ => ["ddq", "ddk", "ddv", "ddsinks", "ddbias"],
        };
        let reach = match &known.problem {
            Problem::LazyAttention(problem) => problem.bias,
            _ => None,
        };
        let by_distance = |name| match reach {
            Some(reach) => Ok(x.float(name)?.map(|numbers| (reach, numbers))),
            None => Ok(None),
        };
        let by_pair = |name| if reach.is_none() { x.tensor(name) } else { Ok(None) };
        Ok(Operands {
            scores,
            sequences: &known.sequences,
            q: x.needed("q")?,
            k: x.needed("k")?,
            v: x.tensor("v")?,
            sinks: x.float("sinks")?,
            bias: by_pair("bias")?,
            distances: by_distance("bias")?,
            tau: x.float("tau")?,
            o: x.tensor("o")?,
            lse: x.float("lse")?,
            gradient: x.float("gradient")?,
            pv: x.float("pv_sum")?,
            dout: x.tensor("dout")?,
            dlse: x.float("dlse")?,
            ddq: x.tensor(ddq)?,
            ddk: x.tensor(ddk)?,
            ddv: x.tensor(ddv)?,
            ddsinks: x.float(ddsinks)?,
            ddbias: by_pair(ddbias)?,
            dd_distances: by_distance(ddbias)?,
            ddtau: x.float("ddtau")?,
            cot_o: x.tensor("cot_o")?,
            cot_lse: x.float("cot_lse")?,
        })
    }

    /// E, or 0 without values.
    pub fn value_dim(&self) -> usize {
        self.v.map_or(0, |v| v.shape()[3])
    }

    /// True if a pass multiplies its operands in bf16: where the options let it, and all are of bf16.
    pub fn in_bf16(&self, pass: Pass, options: &Options) -> bool {
        let Operands { q, k, v, dout, ddq, ddk, ddv, cot_o, .. } = *self;
        let multiplied = [Some(q), Some(k), v, dout, ddq, ddk, ddv, cot_o];
        multiplied
            .iter()
            .flatten()
            .all(|x| x.shape()[3] > 0 && options.multiplies_bf16(pass, x.dtype()))
    }

    /// The sizes of tiles of a pass: of f32 or of bf16, each with its default.
    pub fn cut(
        &self,
        pass: Pass,
        options: &Options,
        [of_f32, of_bf16]: [Blocking; 2],
    ) -> Result<Cut, Error> {
        match self.in_bf16(pass, options) {
            true => Cut::of_bf16(self.scores, options, of_bf16),
            false => Cut::new(self.scores, options, of_f32),
        }
    }

    /// The sink of a head, −∞ without one, and the direction in which it moves.
    pub fn sink(&self, head: usize) -> [f32; 2] {
        let of = |list: Option<View<'_, f32, Ix1>>, none| list.map_or(none, |list| list[head]);
        [of(self.sinks, f32::NEG_INFINITY), of(self.ddsinks, 0.0)]
    }
}

/// The number of a row, `[batch, head, row]`; 0 where there is none.
pub fn number(of: Option<View<'_, f32, Ix3>>, at: [usize; 3]) -> f32 {
    of.map_or(0.0, |of| of[at])
}

/// π of a row: 1 where the sink counts alone, be it infinite.
pub fn sink_weight(sink: f32, lse: f32) -> f64 {
    if sink == lse { 1.0 } else { (f64::from(sink) - f64::from(lse)).exp() }
}

/// True if a row sees no key: then it counts for nothing, whatever stands in its operands.
pub fn blind(lse: Option<View<'_, f32, Ix3>>, at: [usize; 3]) -> bool {
    number(lse, at) == f32::NEG_INFINITY
}
