//! The scores of queries against keys, which attention, attention_lse and lazy_attention share.

use crate::operand::shapes;
use crate::{Axis, Error, Mask, Sequence, Sequences};

/// The extents of q and k.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Extents {
    /// B: batch elements.
    pub batch: usize,
    /// Hq: query heads, a multiple of `key_heads`.
    pub query_heads: usize,
    /// Hk: key and value heads, at least 1. Query head h uses key head h / (Hq/Hk).
    pub key_heads: usize,
    /// N: queries (packed sequences: of all sequences together).
    pub queries: usize,
    /// M: keys (packed sequences: of all sequences together).
    pub keys: usize,
    /// D: elements of a query and of a key, at least 1.
    pub dim: usize,
}

/// The outer extents of an additive bias `[batch, heads, queries, keys]`: each is 1 (broadcast)
/// or the problem's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BiasExtents {
    /// 1 or B.
    pub batch: usize,
    /// 1 or Hq.
    pub heads: usize,
}

/// The scores S of attention and which of them count: equations (F1) and (F2) of
/// `docs/attention.md`.
#[derive(Debug, Clone, PartialEq)]
pub struct Scores {
    /// The extents of q and k.
    pub extents: Extents,
    /// σ; `None` is 1/√D.
    pub softmax_scale: Option<f64>,
    /// c: scores become c·tanh(s/c), before bias and mask.
    pub softcap: Option<f64>,
    /// True with an operand `sinks` of shape `[Hq]`: one more logit per head, without a value,
    /// neither scaled nor capped.
    pub sinks: bool,
    /// Outer extents of the operand `bias`, if there is one; it is added after the softcap.
    pub bias: Option<BiasExtents>,
    /// Visible pairs.
    pub mask: Mask,
    /// Division of the rows into sequences.
    pub sequences: Sequences,
}

impl Scores {
    /// Plain scores: full mask, dense sequences, no option set.
    pub fn new(extents: Extents) -> Self {
        Scores {
            extents,
            softmax_scale: None,
            softcap: None,
            sinks: false,
            bias: None,
            mask: Mask::Full,
            sequences: Sequences::Dense,
        }
    }

    /// σ: `softmax_scale`, or 1/√D.
    pub fn scale(&self) -> f64 {
        self.softmax_scale.unwrap_or_else(|| self.usual_scale())
    }

    /// 1/√D.
    pub(crate) fn usual_scale(&self) -> f64 {
        1.0 / (self.extents.dim as f64).sqrt()
    }

    /// Hq/Hk: the query heads that share a key head.
    pub fn group(&self) -> usize {
        self.extents.query_heads / self.extents.key_heads.max(1)
    }

    /// The sequences in the order of their rows; none where there is no row to compute, since no tensor
    /// then vouches for the number of batch elements. The problem must have passed its check.
    pub fn sequences(&self) -> Vec<Sequence> {
        if self.row_shape().contains(&0) {
            return Vec::new();
        }
        let e = &self.extents;
        self.sequences.list(e.batch, e.queries, e.keys)
    }

    /// Fails unless every extent and option is in its domain and every array fits.
    pub fn check(&self) -> Result<(), Error> {
        let e = &self.extents;
        Error::expect_extents(&[("key_heads", e.key_heads), ("dim", e.dim)])?;
        Error::expect_groups(e.query_heads, e.key_heads)?;
        Error::expect_finite("softmax_scale", self.softmax_scale.unwrap_or(1.0))?;
        Error::expect_positive("softcap", self.softcap.unwrap_or(1.0))?;
        if let Some(bias) = self.bias {
            let full =
                [("bias.batch", bias.batch, e.batch), ("bias.heads", bias.heads, e.query_heads)];
            for (name, found, full) in full {
                if found != 1 && found != full {
                    return Err(Error::value(name, format!("1 or {full}"), found));
                }
            }
        }
        self.sequences.check(e.batch, e.queries, e.keys)?;
        self.mask.check(0, [e.batch, e.query_heads, e.queries, e.keys])
    }

    /// The shape of the bias and of its gradient, if there is one.
    pub fn bias_shape(&self) -> Option<[usize; 4]> {
        self.bias.map(|bias| [bias.batch, bias.heads, self.extents.queries, self.extents.keys])
    }

    /// The extent of an axis of q, k, sinks, bias or lse.
    pub(crate) fn extent(&self, axis: Axis) -> usize {
        let e = &self.extents;
        let bias = self.bias.unwrap_or(BiasExtents { batch: 1, heads: 1 });
        match axis {
            Axis::Batch => e.batch,
            Axis::BatchOr1 => bias.batch,
            Axis::QueryHeads => e.query_heads,
            Axis::QueryHeadsOr1 => bias.heads,
            Axis::KeyHeads => e.key_heads,
            Axis::Queries => e.queries,
            Axis::Keys => e.keys,
            Axis::Dim => e.dim,
            _ => 1,
        }
    }
}

shapes! { Scores {
    /// `[B, Hq, N]`: the shape of lse and of every number per query.
    row_shape: 3 [Batch QueryHeads Queries];
    /// `[B, Hq, N, M]`: the shape of everything that has a number per pair.
    pair_shape: 4 [Batch QueryHeads Queries Keys];
    /// The shape of q and of its gradient.
    q_shape: 4 [Batch QueryHeads Queries Dim];
    /// The shape of k and of its gradient.
    k_shape: 4 [Batch KeyHeads Keys Dim];
} }
