//! The pairs that a problem allows, by `Mask::allows` alone.

use super::tensors::Tensors;
use etalon_problem::{Attention, Mask, NamedArray, Scores, Sequences};
use ndarray::{ArrayD, Axis};

/// A handful of roundings on sums of a dozen terms.
pub const TOLERANCE: f64 = 1e-14;

/// The pairs that sequences and mask allow, as (batch, head, query, key) of the arrays.
pub fn allowed(scores: &Scores) -> Vec<[usize; 4]> {
    let mut pairs = Vec::new();
    for s in scores.sequences() {
        for head in 0..scores.extents.query_heads {
            for (i, j) in (0..s.queries).flat_map(|i| (0..s.keys).map(move |j| (i, j))) {
                if scores.mask.allows(&s, head, i, j) {
                    pairs.push([s.batch, head, s.query_start + i, s.key_start + j]);
                }
            }
        }
    }
    pairs
}

/// 1 where a query sees a key, else 0: `[B, Hq, N]`.
pub fn seeing(scores: &Scores) -> ArrayD<f64> {
    let mut rows = ArrayD::zeros(scores.row_shape().to_vec());
    allowed(scores).iter().for_each(|&[b, h, i, _]| rows[[b, h, i]] = 1.0);
    rows
}

/// The weights of a row that sees a key add up to 1, less what the sink takes.
pub fn weights(problem: &Attention, x: &Tensors<f64>, y: &Tensors<f64>) -> ArrayD<f64> {
    let mut sums = seeing(&problem.scores);
    if let Some(sinks) = x.get("sinks") {
        for ((place, sum), lse) in sums.indexed_iter_mut().zip(&y["lse"]) {
            if *sum > 0.0 {
                *sum -= (sinks[[place[1]]] - lse).exp();
            }
        }
    }
    sums
}

/// The allowed pairs as an array mask, its rows and columns taken from these places.
pub fn as_array(scores: &Scores, rows: &[usize], cols: &[usize]) -> Mask {
    let e = &scores.extents;
    let mut flags = ArrayD::from_elem(vec![e.batch, e.query_heads, e.queries, e.keys], false);
    allowed(scores).iter().for_each(|&place| flags[place] = true);
    let flags = flags.select(Axis(2), rows).select(Axis(3), cols);
    Mask::Array(NamedArray::new(
        "allowed",
        flags.shape(),
        flags.iter().copied().collect::<Vec<_>>(),
    ))
}

pub fn every(scores: &Scores) -> (Vec<usize>, Vec<usize>) {
    ((0..scores.extents.queries).collect(), (0..scores.extents.keys).collect())
}

pub fn is_dense(scores: &Scores) -> bool {
    scores.sequences == Sequences::Dense
}
