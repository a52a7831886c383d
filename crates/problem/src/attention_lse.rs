//! The log-sum-exp of attention scores.

use crate::attention::score_options;
use crate::operand::Row;
use crate::{Axis, BiasExtents, Error, Extents, Mask, Scores, Sequences};

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

    /// The extent of an axis.
    pub(crate) fn extent(&self, axis: Axis) -> usize {
        self.scores.extent(axis)
    }

    /// The table of tensors.
    pub(crate) fn rows(&self) -> Vec<Row> {
        use Axis::{Batch, Dim, Queries, QueryHeads};
        let mut rows = self.scores.rows();
        let gradient = Row::fact("gradient", &[Batch, QueryHeads, Queries, Dim]);
        rows.extend([Scores::lse_row().needed(), gradient.wide().saved().optional()]);
        rows
    }
}

score_options!(AttentionLse);
