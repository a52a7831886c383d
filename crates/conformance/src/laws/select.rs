//! A part of a problem with its inputs: some batch elements, some key heads with their groups, a
//! stretch of rows. What a part computes alone must be what the whole computes there.

use super::tensors::take;
use crate::tensor::{Data, Tensor, Tensors};
use etalon_problem::{Axis, Mask, NamedArray, Problem, Scores, Sequences};
use std::ops::Range;

/// Which part.
#[derive(Debug, Clone)]
pub(crate) struct Selection {
    /// Batch elements.
    pub batch: Vec<usize>,
    /// Key heads; their query heads follow.
    pub key_heads: Vec<usize>,
    /// Rows of the queries, and of the keys.
    pub rows: Option<(Range<usize>, Range<usize>)>,
}

impl Selection {
    /// Everything, to be narrowed.
    pub fn all(scores: &Scores) -> Self {
        let e = &scores.extents;
        Selection {
            batch: (0..e.batch).collect(),
            key_heads: (0..e.key_heads).collect(),
            rows: None,
        }
    }

    fn query_heads(&self, scores: &Scores) -> Vec<usize> {
        let group = scores.group();
        self.key_heads.iter().flat_map(|h| h * group..(h + 1) * group).collect()
    }

    /// The entries of an axis that belong to the part; none where all do.
    fn picks(&self, scores: &Scores, axis: Axis) -> Option<Vec<usize>> {
        let (queries, keys) = self.rows.clone().unzip();
        match axis {
            Axis::Batch => Some(self.batch.clone()),
            Axis::KeyHeads => Some(self.key_heads.clone()),
            Axis::QueryHeads => Some(self.query_heads(scores)),
            Axis::Queries => queries.map(Vec::from_iter),
            Axis::Keys => keys.map(Vec::from_iter),
            _ => None,
        }
    }

    /// The selected part of a tensor of the whole problem.
    pub fn tensor(&self, problem: &Problem, name: &str, tensor: &Tensor) -> Tensor {
        let Some(scores) = problem.scores() else { return tensor.clone() };
        part_of(problem, name, tensor, |axis| self.picks(scores, axis))
    }

    /// The selected part of the tensors.
    pub fn tensors(&self, problem: &Problem, tensors: &Tensors) -> Tensors {
        let part = |(name, x): (&String, &Tensor)| (name.clone(), self.tensor(problem, name, x));
        tensors.iter().map(part).collect()
    }

    /// The part as a problem of its own; a stretch of rows becomes one dense sequence.
    pub fn problem(&self, whole: &Problem, scores: &Scores) -> Problem {
        let query_heads = self.query_heads(scores);
        let mut part = scores.clone();
        part.extents.batch = self.batch.len();
        part.extents.key_heads = self.key_heads.len();
        part.extents.query_heads = query_heads.len();
        if let (Some(bias), Some(full)) = (&mut part.bias, scores.bias) {
            if full.batch == scores.extents.batch {
                bias.batch = self.batch.len();
            }
            if full.heads == scores.extents.query_heads {
                bias.heads = query_heads.len();
            }
        }
        part.sequences = match (&self.rows, &scores.sequences) {
            (None, Sequences::Lengths { query, key }) => Sequences::Lengths {
                query: self.batch.iter().map(|&b| query[b]).collect(),
                key: self.batch.iter().map(|&b| key[b]).collect(),
            },
            (None, sequences) => sequences.clone(),
            (Some(_), _) => Sequences::Dense,
        };
        if let Some((queries, keys)) = &self.rows {
            (part.extents.queries, part.extents.keys) = (queries.len(), keys.len());
        }
        part.mask.visit_mut(&mut |mask| match mask {
            Mask::Segments { query, key } => {
                let (queries, keys) = self.rows.clone().unzip();
                *query = ids(query, &self.batch, queries.map(Vec::from_iter));
                *key = ids(key, &self.batch, keys.map(Vec::from_iter));
            }
            Mask::Array(array) => *array = self.flags(scores, array),
            _ => {}
        });
        with_scores(whole, part)
    }

    fn flags(&self, scores: &Scores, array: &NamedArray<bool>) -> NamedArray<bool> {
        let mut tensor =
            Tensor { shape: array.shape.clone(), data: Data::Bool(array.data.to_vec()) };
        if array.shape[0] == scores.extents.batch {
            tensor = take(&tensor, 0, &self.batch);
        }
        if array.shape[1] == scores.extents.query_heads {
            tensor = take(&tensor, 1, &self.query_heads(scores));
        }
        if let Some((queries, keys)) = &self.rows {
            tensor = take(&tensor, 2, &Vec::from_iter(queries.clone()));
            tensor = take(&tensor, 3, &Vec::from_iter(keys.clone()));
        }
        let data = match tensor.data {
            Data::Bool(flags) => flags,
            _ => Vec::new(),
        };
        NamedArray::new(array.name.clone(), &tensor.shape, data)
    }
}

/// The entries of a tensor that `picks` names of each axis; an axis without picks stays whole, and so
/// does an axis of extent 1 that all batch elements or heads share.
pub(crate) fn part_of(
    problem: &Problem,
    name: &str,
    tensor: &Tensor,
    picks: impl Fn(Axis) -> Option<Vec<usize>>,
) -> Tensor {
    let axes = problem.operand(name).map(|operand| operand.axes).unwrap_or_default();
    axes.into_iter().enumerate().fold(tensor.clone(), |part, (at, axis)| {
        let own = match axis {
            Axis::BatchOr1 => Axis::Batch,
            Axis::QueryHeadsOr1 => Axis::QueryHeads,
            other => other,
        };
        let whole = tensor.shape[at] == problem.extent(own);
        match picks(own).filter(|_| whole) {
            Some(picks) => take(&part, at, &picks),
            None => part,
        }
    })
}

/// Whether a tensor has one of these axes.
pub(crate) fn has_axis(problem: &Problem, name: &str, axes: &[Axis]) -> bool {
    let operand = problem.operand(name);
    operand.is_some_and(|operand| axes.iter().any(|&axis| operand.has(axis)))
}

fn ids(array: &NamedArray<i64>, batch: &[usize], rows: Option<Vec<usize>>) -> NamedArray<i64> {
    let length = array.shape[1];
    let rows = rows.unwrap_or_else(|| (0..length).collect());
    let data: Vec<i64> =
        batch.iter().flat_map(|b| rows.iter().map(move |i| array.data[b * length + i])).collect();
    NamedArray::new(array.name.clone(), &[batch.len(), rows.len()], data)
}

/// The same problem with other scores, if it has any.
pub(crate) fn with_scores(problem: &Problem, scores: Scores) -> Problem {
    let mut problem = problem.clone();
    if let Some(old) = problem.scores_mut() {
        *old = scores;
    }
    problem
}
