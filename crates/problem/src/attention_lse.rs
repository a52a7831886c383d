//! The log-sum-exp of attention scores: its problem, its tensors and its equations.
#![cfg_attr(doc, doc = include_str!("../../../docs/assets/links.md"))]
#![cfg_attr(doc, doc = include_str!("../../../docs/attention_lse.md"))]
#![cfg_attr(doc, doc = include_str!("../../../docs/assets/katex.html"))]

use crate::attention::score_options;
use crate::operand::check_sizes;
use crate::structs::tensors;
use crate::{Axis, BiasExtents, Error, Extents, Mask, Scalar, Scores, Sequences};
use ndarray::ArrayView4;

/// lse = log Σ exp(S) of every row, without values:
/// [the equations](self).
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(into = "AttentionLseFile", from = "AttentionLseFile"))]
pub struct AttentionLse {
    /// The scores and which of them count.
    pub scores: Scores,
}

#[cfg(feature = "serde")]
crate::file::scores! {
    softmax
    /// The log-sum-exp of attention scores.
    AttentionLseFile: AttentionLse,
    []
}

impl AttentionLse {
    /// The log-sum-exp without options.
    pub fn new(extents: Extents) -> Self {
        AttentionLse { scores: Scores::new(extents) }
    }

    /// Fails unless every extent and option is in its domain.
    pub fn check(&self) -> Result<(), Error> {
        self.scores.check()?;
        check_sizes(&self.rows(), |axis| self.extent(axis))
    }

    /// The extent of an axis.
    pub(crate) fn extent(&self, axis: Axis) -> usize {
        self.scores.extent(axis)
    }
}

tensors! {
    AttentionLse as problem, gradients each, jvp;
    inputs {
        /// Queries.
        q: Storage [Batch QueryHeads Queries Dim] always => dq "(B5)", ddq, gq "(D10)", tq;
        /// Keys.
        k: Storage [Batch KeyHeads Keys Dim] always => dk "(B6)", ddk, gk "(D11)", tk;
        /// One more logit per head.
        sinks: Wide [QueryHeads] ("sinks" problem.scores.sinks)
            => dsinks "(B8)", ddsinks, gsinks "(D14)", tsinks;
        /// Added to the scores.
        bias: Storage [BatchOr1 QueryHeadsOr1 Queries Keys] ("bias" problem.scores.bias.is_some())
            => dbias "(B9)", ddbias, gbias "(D15)", tbias;
    }
    numbers {}
    outputs {
        /// (L1): the natural logarithm, with the sink.
        lse: Wide [Batch QueryHeads Queries] always saved
            => needed dlse, cot_lse, gdlse "(D13)", tlse "(J2)";
        /// ∂lse/∂q, if the tier returns it: dq then needs no sweep.
        gradient: Wide [Batch QueryHeads Queries Dim] optional saved;
    }
}

score_options!(AttentionLse);

impl<'a, T: Scalar> Inputs<'a, T> {
    /// Inputs without sinks and bias.
    pub fn new(q: ArrayView4<'a, T>, k: ArrayView4<'a, T>) -> Self {
        Inputs { q, k, sinks: None, bias: None }
    }
}
