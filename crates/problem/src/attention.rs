//! Softmax attention: its problem, its tensors and its equations.
#![cfg_attr(doc, doc = include_str!("../../../docs/assets/links.md"))]
#![cfg_attr(doc, doc = include_str!("../../../docs/attention.md"))]
#![cfg_attr(doc, doc = include_str!("../../../docs/assets/katex.html"))]

use crate::operand::{check_sizes, shapes};
use crate::structs::tensors;
use crate::{Axis, BiasExtents, Error, Extents, Mask, Scalar, Scores, Sequences};
use ndarray::ArrayView4;

/// o = softmax(S) v, with the log-sum-exp of every row: [the equations](self).
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(into = "AttentionFile", from = "AttentionFile"))]
pub struct Attention {
    /// The scores and which of them count.
    pub scores: Scores,
    /// E: elements of a value, at least 1.
    pub value_dim: usize,
}

#[cfg(feature = "serde")]
crate::file::scores! {
    softmax
    /// Softmax attention.
    AttentionFile: Attention,
    [value_dim]
}

impl Attention {
    /// Attention without options, with values as wide as the keys.
    pub fn new(extents: Extents) -> Self {
        Attention { scores: Scores::new(extents), value_dim: extents.dim }
    }

    /// Fails unless every extent and option is in its domain.
    pub fn check(&self) -> Result<(), Error> {
        // A value_dim of 0 that nobody gave is a dim of 0.
        self.scores.check()?;
        Error::expect_extents(&[("value_dim", self.value_dim)])?;
        check_sizes(&self.rows(), |axis| self.extent(axis))
    }

    /// The extent of an axis.
    pub(crate) fn extent(&self, axis: Axis) -> usize {
        if axis == Axis::ValueDim { self.value_dim } else { self.scores.extent(axis) }
    }
}

shapes! { Attention {
    /// The shape of v and of its gradient.
    v_shape: 4 [Batch KeyHeads Keys ValueDim];
    /// The shape of o and of its cotangent.
    o_shape: 4 [Batch QueryHeads Queries ValueDim];
} }

tensors! {
    Attention as problem, gradients each, jvp;
    inputs {
        /// Queries.
        q: Storage [Batch QueryHeads Queries Dim] always => dq "(B5)", ddq, gq "(D10)", tq;
        /// Keys.
        k: Storage [Batch KeyHeads Keys Dim] always => dk "(B6)", ddk, gk "(D11)", tk;
        /// Values.
        v: Storage [Batch KeyHeads Keys ValueDim] always => dv "(B7)", ddv, gv "(D12)", tv;
        /// One more logit per head.
        sinks: Wide [QueryHeads] ("sinks" problem.scores.sinks)
            => dsinks "(B8)", ddsinks, gsinks "(D14)", tsinks;
        /// Added to the scores.
        bias: Storage [BatchOr1 QueryHeadsOr1 Queries Keys] ("bias" problem.scores.bias.is_some())
            => dbias "(B9)", ddbias, gbias "(D15)", tbias;
    }
    numbers {}
    outputs {
        /// o of (F5).
        o: Storage [Batch QueryHeads Queries ValueDim] always saved
            => needed dout, cot_o, gdout "(D5)", to "(J1)";
        /// lse of (F3): the natural logarithm, with the sink.
        lse: Wide [Batch QueryHeads Queries] always saved => zero dlse, cot_lse, gdlse "(D13)", tlse "(J2)";
    }
}

/// The options that attention and attention_lse share, as a chain of calls.
macro_rules! score_options {
    ($Problem:ident $($more:tt)*) => {
        crate::options::options! { $Problem {
            /// Sets σ; without it 1/√D.
            softmax_scale(scale: f64) => scores.softmax_scale = Some(scale),
                or others(x => crate::alternatives::scales(&x.scores));
            /// Caps the scores: c·tanh(s/c).
            softcap(cap: f64) => scores.softcap = Some(cap),
                or others(x => crate::alternatives::limits(x.scores.softcap));
            /// Adds the operand `sinks`, a logit per head without a value.
            sinks() => scores.sinks = true, or tensor;
            /// Adds the operand `bias` with these outer extents (each 1, or the problem's own).
            bias(batch: usize, heads: usize) => scores.bias = Some(BiasExtents { batch, heads }),
                or tensor;
            /// Sets which pairs count.
            mask(mask: Mask) => scores.mask = mask, or others(x => crate::mask::others(&x.scores));
            /// Sets which rows belong together.
            sequences(sequences: Sequences) => scores.sequences = sequences,
                or others(x => crate::alternatives::sequences(&x.scores));
            $($more)*
        } }
    };
}
pub(crate) use score_options;

score_options!(Attention
    /// Sets E, the elements of a value.
    value_dim(elements: usize) => value_dim = elements, or none;
);

impl<'a, T: Scalar> Inputs<'a, T> {
    /// Inputs without sinks and bias.
    pub fn new(q: ArrayView4<'a, T>, k: ArrayView4<'a, T>, v: ArrayView4<'a, T>) -> Self {
        Inputs { q, k, v, sinks: None, bias: None }
    }
}

impl<'a, T: Scalar> Cotangents<'a, T> {
    /// The cotangent of o alone.
    pub fn new(dout: ArrayView4<'a, T>) -> Self {
        Cotangents { dout, dlse: None }
    }
}
