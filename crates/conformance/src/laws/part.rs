//! A part of a problem with its inputs: some batch elements, some key heads with their groups, a
//! stretch of rows. What a part computes alone must be what the whole computes there.

use super::tensors::{entries, take};
use crate::tensor::{Tensor, Tensors};
use etalon_problem::{
    Axis, Mask, NamedArray, Problem, Scores, Sequence, Sequences, TokenSequence, TokenSequences,
};
use ndarray::{ArrayD, ArrayViewMutD};

/// Some entries of some axes; the other axes are whole.
#[derive(Debug, Clone, Default)]
pub(crate) struct Part(Vec<(Axis, Vec<usize>)>);

impl Part {
    /// Some entries of an axis, in this order; entries may repeat.
    pub fn of(axis: Axis, entries: impl IntoIterator<Item = usize>) -> Self {
        Part::default().and(axis, entries)
    }

    /// A key head with its query heads.
    pub fn key_head(h: usize, group: usize) -> Self {
        Part::of(Axis::KeyHeads, [h]).and(Axis::QueryHeads, h * group..(h + 1) * group)
    }

    /// Of these only the ones that have some entries of another axis.
    pub fn and(mut self, axis: Axis, entries: impl IntoIterator<Item = usize>) -> Self {
        self.0.push((axis, entries.into_iter().collect()));
        self
    }

    /// The rows of a sequence.
    pub fn sequence(s: &Sequence) -> Self {
        Part::of(Axis::Batch, [s.batch])
            .and(Axis::Queries, s.query_start..s.query_start + s.queries)
            .and(Axis::Keys, s.key_start..s.key_start + s.keys)
    }

    /// The tokens of a sequence, and its states.
    pub fn token_sequence(s: &TokenSequence) -> Self {
        Part::of(Axis::Batch, [s.batch])
            .and(Axis::Tokens, s.start..s.start + s.tokens)
            .and(Axis::Sequences, [s.index])
    }

    fn entries(&self, axis: Axis) -> Option<&[usize]> {
        self.0.iter().find(|(other, _)| *other == axis).map(|(_, entries)| &entries[..])
    }

    /// Axes along which an array is cut, and the entries that are kept. An axis of extent 1 that all batch elements or
    /// heads share is not cut.
    fn cuts(&self, problem: &Problem, axes: &[Axis], shape: &[usize]) -> Vec<Cut<'_>> {
        let cut = |(at, axis): (usize, &Axis)| {
            let axis = match axis {
                Axis::BatchOr1 => Axis::Batch,
                Axis::QueryHeadsOr1 => Axis::QueryHeads,
                other => *other,
            };
            let entries = self.entries(axis).filter(|_| shape[at] == problem.extent(axis))?;
            Some(Cut { axis, at, entries })
        };
        axes.iter().enumerate().filter_map(cut).collect()
    }

    /// The cuts of a tensor of the problem.
    fn cuts_of(&self, problem: &Problem, name: &str) -> Vec<Cut<'_>> {
        let operand = problem.operand(name);
        operand.map_or(Vec::new(), |x| self.cuts(problem, &x.axes, &x.shape))
    }

    /// True if a tensor of the problem is cut along one of these axes.
    pub fn cuts_along(&self, problem: &Problem, name: &str, axes: &[Axis]) -> bool {
        self.cuts_of(problem, name).iter().any(|cut| axes.contains(&cut.axis))
    }

    /// The part of each tensor of the problem.
    pub fn tensors(&self, problem: &Problem, tensors: &Tensors) -> Tensors {
        let part = |(name, whole): (&String, &Tensor)| {
            let cuts = self.cuts_of(problem, name).into_iter();
            (name.clone(), cuts.fold(whole.clone(), |x, cut| take(&x, cut.at, cut.entries)))
        };
        tensors.iter().map(part).collect()
    }

    /// The part of an array that belongs to a tensor of the problem.
    pub fn array(&self, problem: &Problem, name: &str, array: &ArrayD<f64>) -> ArrayD<f64> {
        let cuts = self.cuts_of(problem, name).into_iter();
        cuts.fold(array.clone(), |part, cut| part.select(ndarray::Axis(cut.at), cut.entries))
    }

    /// The place of the part in an array that belongs to a tensor of the problem. Entries lie side by side.
    pub fn place<'a>(
        &self,
        problem: &Problem,
        name: &str,
        array: &'a mut ArrayD<f64>,
    ) -> ArrayViewMutD<'a, f64> {
        let cuts = self.cuts_of(problem, name);
        array.slice_each_axis_mut(|axis| {
            let cut = cuts.iter().find(|cut| cut.at == axis.axis.index());
            cut.map_or((..).into(), |Cut { entries, .. }| {
                let first = entries.first().map_or(0, |&first| first);
                (first..first + entries.len()).into()
            })
        })
    }

    /// The part of an array that a mask holds.
    fn mask_array<T: Copy>(
        &self,
        problem: &Problem,
        axes: &[Axis],
        array: &NamedArray<T>,
    ) -> NamedArray<T> {
        let (mut shape, mut data) = (array.shape.clone(), array.data.to_vec());
        for cut in self.cuts(problem, axes, &array.shape) {
            data = entries(&shape, &data, cut.at, cut.entries);
            shape[cut.at] = cut.entries.len();
        }
        NamedArray::new(array.name.clone(), &shape, data)
    }

    /// The part as a problem of its own; a stretch of rows becomes one dense sequence.
    pub fn problem(&self, whole: &Problem) -> Problem {
        let mut part = whole.clone();
        let count = |axis| self.entries(axis).map_or(whole.extent(axis), <[usize]>::len);
        if let Some(scores) = part.scores_mut() {
            self.cut_scores(whole, scores, count);
        } else if let Problem::LinearAttention(part) = &mut part {
            let e = &mut part.extents;
            (e.batch, e.tokens) = (count(Axis::Batch), count(Axis::Tokens));
            (e.query_heads, e.key_heads) = (count(Axis::QueryHeads), count(Axis::KeyHeads));
            if self.entries(Axis::Tokens).is_some() {
                part.sequences = TokenSequences::Dense;
            }
        } else if let Problem::LinearCrossEntropy(part) = &mut part {
            part.tokens = count(Axis::Targets);
        }
        part
    }

    fn cut_scores(&self, whole: &Problem, scores: &mut Scores, count: impl Fn(Axis) -> usize) {
        let full = scores.extents;
        let e = &mut scores.extents;
        (e.batch, e.queries, e.keys) =
            (count(Axis::Batch), count(Axis::Queries), count(Axis::Keys));
        (e.query_heads, e.key_heads) = (count(Axis::QueryHeads), count(Axis::KeyHeads));
        if let Some(bias) = &mut scores.bias {
            bias.batch = if bias.batch == full.batch { e.batch } else { bias.batch };
            bias.heads = if bias.heads == full.query_heads { e.query_heads } else { bias.heads };
        }
        match (&mut scores.sequences, self.entries(Axis::Batch)) {
            (sequences, _) if self.entries(Axis::Queries).is_some() => {
                *sequences = Sequences::Dense;
            }
            (Sequences::Lengths { query, key }, Some(batch)) => {
                *query = batch.iter().map(|&b| query[b]).collect();
                *key = batch.iter().map(|&b| key[b]).collect();
            }
            _ => {}
        }
        scores.mask.visit_mut(&mut |mask| match mask {
            Mask::Segments { query, key } => {
                *query = self.mask_array(whole, &[Axis::Batch, Axis::Queries], query);
                *key = self.mask_array(whole, &[Axis::Batch, Axis::Keys], key);
            }
            Mask::Array(array) => {
                let axes = [Axis::Batch, Axis::QueryHeads, Axis::Queries, Axis::Keys];
                *array = self.mask_array(whole, &axes, array);
            }
            _ => {}
        });
    }
}

/// One axis of an array of which some entries are wanted.
struct Cut<'a> {
    axis: Axis,
    at: usize,
    entries: &'a [usize],
}

/// The same problem with other scores, if it has any.
pub(crate) fn with_scores(problem: &Problem, scores: Scores) -> Problem {
    let mut problem = problem.clone();
    if let Some(old) = problem.scores_mut() {
        *old = scores;
    }
    problem
}
