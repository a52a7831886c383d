//! Which pairs are visible: by definition, pair by pair.

use crate::tensor::Tensors;
use etalon_problem::{Mask, NamedArray, Scores};
use ndarray::{Array3, Array4, ArrayD, IxDyn};

/// Every visible pair of scores with their inputs.
pub(crate) struct Visible {
    /// `[B, Hq, N, M]`: in the same sequence, allowed by the mask, and not −∞ by its bias.
    pub pairs: Array4<bool>,
    /// `[B, N]` and `[B, M]`: whether the row lies in a sequence.
    pub rows: [ndarray::Array2<bool>; 2],
    group: usize,
}

impl Visible {
    pub fn new(scores: &Scores, inputs: &Tensors) -> Self {
        let e = &scores.extents;
        let bias = inputs.get("bias").filter(|bias| bias.shape.len() == 4);
        let bias = bias.and_then(|bias| bias.to_f64("bias").ok());
        let mut pairs = Array4::from_elem((e.batch, e.query_heads, e.queries, e.keys), false);
        let mut rows = [e.queries, e.keys].map(|n| ndarray::Array2::from_elem((e.batch, n), false));
        for sequence in scores.sequences() {
            let (b, i0, j0) = (sequence.batch, sequence.query_start, sequence.key_start);
            (0..sequence.queries).for_each(|i| rows[0][[b, i0 + i]] = true);
            (0..sequence.keys).for_each(|j| rows[1][[b, j0 + j]] = true);
            for h in 0..e.query_heads {
                for i in 0..sequence.queries {
                    for j in 0..sequence.keys {
                        pairs[[b, h, i0 + i, j0 + j]] = scores.mask.allows(&sequence, h, i, j)
                            && !hidden(bias.as_ref(), [b, h, i0 + i, j0 + j]);
                    }
                }
            }
        }
        Visible { pairs, rows, group: scores.group() }
    }

    /// Query heads per key head, at least 1.
    pub fn group(&self) -> usize {
        self.group.max(1)
    }

    /// `[B, Hq, N]`: the number of visible keys.
    pub fn counts(&self) -> Array3<usize> {
        self.pairs.map_axis(ndarray::Axis(3), |row| row.iter().filter(|seen| **seen).count())
    }

    /// Whether any query head of key head `h` has a row of batch element `b` that sees key `j`.
    pub fn seen(&self, b: usize, h: usize, j: usize) -> bool {
        (h * self.group..(h + 1) * self.group)
            .any(|head| self.pairs.slice(ndarray::s![b, head, .., j]).iter().any(|seen| *seen))
    }

    /// The flags as a mask of their own.
    pub fn mask(&self) -> Mask {
        let flags: Vec<bool> = self.pairs.iter().copied().collect();
        Mask::Array(NamedArray::new("visible", self.pairs.shape(), flags))
    }
}

/// Whether the bias takes the pair away. Axes of extent 1 are shared.
fn hidden(bias: Option<&ArrayD<f64>>, pair: [usize; 4]) -> bool {
    bias.is_some_and(|bias| {
        let at: Vec<usize> = pair.iter().zip(bias.shape()).map(|(&i, &n)| i.min(n - 1)).collect();
        bias[IxDyn(&at)] == f64::NEG_INFINITY
    })
}
