//! Which pairs of a query and a key count, and what is added to their scores.

use crate::element::Tensor;
use crate::mask::{QueryHead, Sight as PreparedMask};
use crate::tiles::{key_rows, query_rows};
use etalon_problem::{Cover, Scores};
use ndarray::{Ix2, Ix4, s};
use std::ops::Range;

/// Which pairs of one sequence and query head count, and what is added to their scores.
#[derive(Clone, Copy)]
pub struct ScoreRule<'a> {
    /// σ.
    pub scale: f32,
    /// c.
    pub softcap: Option<f32>,
    /// The mask.
    pub mask: &'a PreparedMask<'a>,
    /// The bias of this sequence and head, `[n, m]`.
    pub bias: Option<Tensor<'a, Ix2>>,
    /// The sequence and the query head.
    pub of: QueryHead<'a>,
}

impl<'a> ScoreRule<'a> {
    /// The rule of a sequence and head.
    pub fn new(
        scores: &'a Scores,
        mask: &'a PreparedMask<'a>,
        bias: Option<Tensor<'a, Ix4>>,
        of: QueryHead<'a>,
    ) -> Self {
        ScoreRule {
            scale: scores.scale() as f32,
            softcap: scores.softcap.map(|cap| cap as f32),
            mask,
            bias: bias.map(|bias| pairs_of(bias, of)),
            of,
        }
    }

    /// What the mask allows of a tile.
    pub fn cover(&self, rows: Range<usize>, cols: Range<usize>) -> Cover {
        self.mask.cover(self.of, rows, cols)
    }

    /// 1 for each key of `cols` that query `i` sees, and otherwise 0.
    pub fn visible_row(&self, i: usize, cols: Range<usize>, row: &mut [u8]) {
        self.mask.visible_row(self.of, i, cols, row);
    }
}

/// The pairs of one sequence and head, `[n, m]`, of a tensor with the outer axes of a bias.
pub fn pairs_of<'a>(bias: Tensor<'a, Ix4>, of: QueryHead<'_>) -> Tensor<'a, Ix2> {
    let QueryHead { sequence, head } = of;
    let pick = |axis: usize, index: usize| if bias.shape()[axis] == 1 { 0 } else { index };
    let (batch, head) = (pick(0, sequence.batch), pick(1, head));
    bias.slice(s![batch, head, query_rows(sequence), key_rows(sequence)])
}
