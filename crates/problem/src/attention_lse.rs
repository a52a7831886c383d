//! The log-sum-exp of attention scores.

use crate::attention::score_options;
use crate::{BiasExtents, Error, Extents, Mask, Operand, Pass, Role, Scores, Sequences};

/// lse = log Σ exp(S) of every row, without values:
/// [`docs::attention_lse`](crate::docs::attention_lse).
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(
    feature = "serde",
    serde(into = "crate::file::AttentionLseFile", from = "crate::file::AttentionLseFile")
)]
pub struct AttentionLse {
    /// The scores and which of them count.
    pub scores: Scores,
}

impl AttentionLse {
    /// The log-sum-exp without options.
    pub fn new(extents: Extents) -> Self {
        AttentionLse { scores: Scores::new(extents) }
    }

    /// Fails unless every extent and option is in its domain.
    pub fn check(&self) -> Result<(), Error> {
        self.scores.check()
    }

    /// The tensors of a pass: inputs, cotangents and outputs, in this order; none where the
    /// algorithm does not have the pass.
    pub fn operands(&self, pass: Pass) -> Vec<Operand> {
        use Role::{Cotangent, OptionalCotangent, Output};
        let scores = &self.scores;
        let (q, k, rows) = (scores.q_shape(), scores.k_shape(), scores.row_shape());
        if pass == Pass::Step {
            return Vec::new();
        }
        let mut list = scores.operands();
        match pass {
            Pass::Step => {}
            Pass::Forward => list.push(Operand::wide("lse", &rows, Output)),
            Pass::Backward => {
                list.push(Operand::wide("dlse", &rows, Cotangent));
                list.push(Operand::storage("dq", &q, Output));
                list.push(Operand::storage("dk", &k, Output));
                list.extend(scores.optional(["dsinks", "dbias"], Output));
            }
            Pass::DoubleBackward => {
                list.push(Operand::wide("dlse", &rows, Cotangent));
                list.push(Operand::storage("ddq", &q, OptionalCotangent));
                list.push(Operand::storage("ddk", &k, OptionalCotangent));
                list.extend(scores.optional(["ddsinks", "ddbias"], OptionalCotangent));
                list.push(Operand::wide("cot_lse", &rows, OptionalCotangent));
                list.push(Operand::storage("gq", &q, Output));
                list.push(Operand::storage("gk", &k, Output));
                list.push(Operand::wide("gdlse", &rows, Output));
                list.extend(scores.optional(["gsinks", "gbias"], Output));
            }
            Pass::Jvp => {
                list.push(Operand::storage("tq", &q, OptionalCotangent));
                list.push(Operand::storage("tk", &k, OptionalCotangent));
                list.extend(scores.optional(["tsinks", "tbias"], OptionalCotangent));
                list.push(Operand::wide("tlse", &rows, Output));
            }
        }
        list
    }
}

score_options!(AttentionLse);
