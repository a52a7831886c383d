//! A part of a problem with its inputs: some batch elements, some key heads with their groups, a
//! stretch of rows. What a part computes alone must be what the whole computes there.

use super::tensors::take;
use crate::tensor::{Data, Tensor, Tensors};
use etalon_problem::{Mask, NamedArray, Problem, Scores, Sequences};
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

    /// The selected part of a tensor of the whole problem.
    pub fn tensor(&self, scores: &Scores, name: &str, tensor: &Tensor) -> Tensor {
        let shared = scores.bias.unwrap_or(etalon_problem::BiasExtents { batch: 1, heads: 1 });
        let (queries, keys) = self.rows.clone().unzip();
        let row = |axis: usize, rows: Option<Range<usize>>| (axis, rows.map(Vec::from_iter));
        let heads = Some(self.query_heads(scores));
        let batch = Some(self.batch.clone());
        let picks = match name {
            "sinks" | "dsinks" | "tau" | "dtau" => vec![(0, heads)],
            "bias" | "dbias" if scores.bias.is_none() => vec![(0, heads)], // by distance
            "k" | "v" | "dk" | "dv" => {
                vec![(0, batch), (1, Some(self.key_heads.clone())), row(2, keys)]
            }
            "bias" | "dbias" => vec![
                // An axis of extent 1 in a problem that has more is shared by all parts.
                (0, batch.filter(|_| shared.batch == scores.extents.batch)),
                (1, heads.filter(|_| shared.heads == scores.extents.query_heads)),
                row(2, queries),
                row(3, keys),
            ],
            _ => vec![(0, batch), (1, heads), row(2, queries)],
        };
        picks.into_iter().fold(tensor.clone(), |part, (axis, picks)| match picks {
            Some(picks) => take(&part, axis, &picks),
            None => part,
        })
    }

    /// The selected part of the tensors.
    pub fn tensors(&self, scores: &Scores, tensors: &Tensors) -> Tensors {
        let part = |(name, x): (&String, &Tensor)| (name.clone(), self.tensor(scores, name, x));
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
