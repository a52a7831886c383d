//! Visible pairs: by definition, pair by pair.

use crate::tensor::Tensors;
use etalon_problem::{Mask, NamedArray, Scores};
use ndarray::{Array2, Array3, Array4};
use std::ops::Range;

/// Every visible pair of scores with their inputs.
pub(crate) struct Visible {
    /// `[B, Hq, N, M]`: in the same sequence, allowed by the mask, and not −∞ by its bias.
    pub pairs: Array4<bool>,
    /// `[B, N]`: whether the row lies in a sequence.
    pub rows: Array2<bool>,
    group: usize,
    key_heads: usize,
}

impl Visible {
    pub fn new(scores: &Scores, inputs: &Tensors) -> Self {
        let e = &scores.extents;
        let bias = inputs.get("bias").filter(|bias| bias.shape.len() == 4);
        let bias = bias.and_then(|bias| bias.to_f64("bias").ok());
        let shape = (e.batch, e.query_heads, e.queries, e.keys);
        // Axes of extent 1 are shared.
        let bias = bias.as_ref().and_then(|bias| bias.broadcast(shape));
        let mut pairs = Array4::from_elem(shape, false);
        let mut rows = Array2::from_elem((e.batch, e.queries), false);
        for sequence in scores.sequences() {
            let (b, i0, j0) = (sequence.batch, sequence.query_start, sequence.key_start);
            (0..sequence.queries).for_each(|i| rows[[b, i0 + i]] = true);
            for h in 0..e.query_heads {
                for i in 0..sequence.queries {
                    for j in 0..sequence.keys {
                        pairs[[b, h, i0 + i, j0 + j]] = scores.mask.allows(&sequence, h, i, j)
                            && bias.is_none_or(|x| x[[b, h, i0 + i, j0 + j]] != f64::NEG_INFINITY);
                    }
                }
            }
        }
        Visible { pairs, rows, group: scores.group(), key_heads: e.key_heads }
    }

    /// Query heads per key head, at least 1.
    pub fn group(&self) -> usize {
        self.group.max(1)
    }

    /// The query heads of a key head.
    pub fn heads(&self, h: usize) -> Range<usize> {
        h * self.group..(h + 1) * self.group
    }

    /// The keys that a row (batch, head, position) sees.
    pub fn keys(&self, [b, h, i]: [usize; 3]) -> impl DoubleEndedIterator<Item = usize> + '_ {
        let row = self.pairs.slice(ndarray::s![b, h, i, ..]).into_iter().enumerate();
        row.filter(|(_, seen)| **seen).map(|(j, _)| j)
    }

    /// `[B, Hq, N]`: the number of visible keys.
    pub fn counts(&self) -> Array3<usize> {
        self.pairs.map_axis(ndarray::Axis(3), |row| row.iter().filter(|seen| **seen).count())
    }

    /// `[B, Hk, M]`: whether any row of the group sees the key.
    pub fn seen_keys(&self) -> Array3<bool> {
        let (batch, .., keys) = self.pairs.dim();
        let mut seen = Array3::from_elem((batch, self.key_heads, keys), false);
        for ((b, h, _, j), pair) in self.pairs.indexed_iter() {
            seen[[b, h / self.group(), j]] |= pair;
        }
        seen
    }

    /// The flags as a mask of their own.
    pub fn mask(&self) -> Mask {
        let flags: Vec<bool> = self.pairs.iter().copied().collect();
        Mask::Array(NamedArray::new("visible", self.pairs.shape(), flags))
    }
}

/// Every key head (batch, key head).
pub(crate) fn key_heads(scores: &Scores) -> impl Iterator<Item = [usize; 2]> + use<> {
    let e = scores.extents;
    (0..e.batch).flat_map(move |b| (0..e.key_heads).map(move |h| [b, h]))
}

/// Every key (batch, key head, position).
pub(crate) fn all_keys(scores: &Scores) -> impl Iterator<Item = [usize; 3]> + use<> {
    let keys = scores.extents.keys;
    key_heads(scores).flat_map(move |[b, h]| (0..keys).map(move |j| [b, h, j]))
}
