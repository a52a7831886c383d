//! Shares of the work: query heads of one key head in turn, everything else side by side.
//!
//! The formulas know one row of one head. Heads, batch elements and sequences do not meet except
//! in the gradients that they share, and those are summed in an order that the problem alone
//! decides. So the result has the same bits for any number of threads.

use crate::parallel::map;
use crate::scalar::Real;
use crate::tensor::{HeadsMut, MatrixMut};
use etalon_problem::{Scores, Sequence};
use ndarray::{Array, Array4, ArrayViewMut1, Axis, RemoveAxis};

/// A query of one head in one sequence, and where its operands lie.
#[derive(Clone, Copy)]
pub(crate) struct Query<'a> {
    pub sequence: &'a Sequence,
    pub head: usize,
    /// Its number in the sequence.
    pub i: usize,
    /// Its row in q, and in everything that lies as q does.
    pub row: usize,
    first_key: usize,
}

impl<'a> Query<'a> {
    /// Query `i` of a head of a sequence.
    pub fn new(problem: &Scores, sequence: &'a Sequence, head: usize, i: usize) -> Self {
        let &Sequence { batch, query_start, key_start, .. } = sequence;
        let e = &problem.extents;
        let row = (batch * e.query_heads + head) * e.queries + query_start + i;
        let key_head = batch * e.key_heads + head / problem.group();
        Query { sequence, head, i, row, first_key: key_head * e.keys + key_start }
    }

    /// The row of key `j` of the sequence in k, and in everything that lies as k does.
    pub fn key(&self, j: usize) -> usize {
        self.first_key + j
    }
}

/// The rows of results that one key head in one sequence writes.
pub(crate) struct Written<'a, T, const Q: usize, const K: usize> {
    /// Of results that lie as q does: those of each query head of the group.
    pub by_query: Vec<[MatrixMut<'a, T>; Q]>,
    /// Of results that lie as k does.
    pub by_key: [MatrixMut<'a, T>; K],
}

/// The rows that every key head of every sequence writes: by sequence, then by head. The results come as the
/// rows of their heads in this order; `group` query heads share a key head.
pub(crate) fn units<'a, T: 'a, S: Copy, const Q: usize, const K: usize>(
    sequences: impl IntoIterator<Item = S>,
    key_heads: usize,
    group: usize,
    mut by_query: [impl Iterator<Item = MatrixMut<'a, T>>; Q],
    mut by_key: [impl Iterator<Item = MatrixMut<'a, T>>; K],
) -> Vec<(S, usize, Written<'a, T, Q, K>)> {
    let mut take_query = || by_query.each_mut().map(|rows| rows.next().expect("one per head"));
    let mut take_key = || by_key.each_mut().map(|rows| rows.next().expect("one per head"));
    let mut units = Vec::new();
    for sequence in sequences {
        for key_head in 0..key_heads {
            let by_query = (0..group).map(|_| take_query()).collect();
            units.push((sequence, key_head, Written { by_query, by_key: take_key() }));
        }
    }
    units
}

/// The elements of a row, or 0 where there is no row: then no tensor vouches for them, and a row of zeros
/// might be of any size.
pub(crate) fn width_of_rows(problem: &Scores, elements: usize) -> usize {
    if problem.row_shape().contains(&0) { 0 } else { elements }
}

/// The sequences of a batch element that hold a row of its arrays, among all in their order: one search
/// where there are many.
fn with_row(sequences: &[Sequence], batch: usize, row: usize) -> impl Iterator<Item = &Sequence> {
    let end = |s: &Sequence| (s.batch, s.query_start + s.queries);
    let first = sequences.partition_point(|s| end(s) <= (batch, row));
    sequences[first..].iter().take_while(move |s| s.batch == batch && s.query_start <= row)
}

/// Visits every query of every head and sequence, with its rows of the results: those that lie as q
/// does are its own, those that lie as k does are shared by the query heads of the group and
/// accumulate. `start` begins what `visit` gathers of one head in one sequence, query by query; they
/// are returned sequence by sequence, head by head.
pub(crate) fn each_query<T: Send, R: Send, const Q: usize, const K: usize>(
    problem: &Scores,
    by_query: [HeadsMut<'_, T>; Q],
    by_key: [HeadsMut<'_, T>; K],
    start: impl Fn(&Sequence, usize) -> R + Sync,
    visit: impl Fn(&mut R, &Query<'_>, [&mut [T]; Q], &mut [MatrixMut<'_, T>; K]) + Sync,
) -> Vec<R> {
    let (key_heads, group) = (problem.extents.key_heads, problem.group());
    let sequences = problem.sequences();
    let rows: Vec<_> = sequences.iter().map(|s| (s.batch, s.query_start, s.queries)).collect();
    let cols: Vec<_> = sequences.iter().map(|s| (s.batch, s.key_start, s.keys)).collect();
    let by_query = by_query.map(|result| result.split(&rows));
    let by_key = by_key.map(|result| result.split(&cols));
    let units = units(&sequences, key_heads, group, by_query, by_key);
    let parts = map(units, |(sequence, key_head, Written { by_query, mut by_key })| {
        let heads = (key_head * group..).zip(by_query).map(|(head, mut rows)| {
            let mut gathered = start(sequence, head);
            for i in 0..sequence.queries {
                let query = Query::new(problem, sequence, head, i);
                visit(&mut gathered, &query, rows.each_mut().map(|rows| rows.row(i)), &mut by_key);
            }
            gathered
        });
        heads.collect::<Vec<R>>()
    });
    parts.into_iter().flatten().collect()
}

/// The gradient of an operand whose outermost axis is the query heads, if it is wanted: adds to it what
/// each sequence adds for a head, as [`each_query`] returns it.
pub(crate) fn sum_by_head<T: Real, D: RemoveAxis>(
    gradient: Option<&mut Array<T, D>>,
    parts: impl IntoIterator<Item = impl AsRef<[T]>>,
) {
    let Some(gradient) = gradient else { return };
    for (part, head) in parts.into_iter().zip((0..gradient.shape()[0]).cycle()) {
        let mut sums = gradient.index_axis_mut(Axis(0), head);
        sums.iter_mut().zip(part.as_ref()).for_each(|(sum, &part)| *sum += part);
    }
}

/// The gradient of the bias, (B9) and (D15), summed over the axes that the bias broadcasts, if it is
/// wanted: `row` returns which keys a query adds to, and what.
pub(crate) fn bias_gradient<T: Real>(
    gradient: Option<&mut Array4<T>>,
    problem: &Scores,
    row: impl Fn(&Query<'_>) -> (Vec<usize>, Vec<T>) + Sync,
) {
    let Some(gradient) = gradient else { return };
    let (batches, heads, rows, _) = gradient.dim();
    let sequences = problem.sequences();
    if sequences.is_empty() {
        return; // no tensor vouches for the number of batch elements, which may be without end
    }
    let lines = gradient.rows_mut().into_iter().enumerate().collect();
    map(lines, |(line, mut elements): (usize, ArrayViewMut1<'_, T>)| {
        let (batch, head, at) = (line / rows / heads, line / rows % heads, line % rows);
        let among = if batches == 1 { 0..problem.extents.batch } else { batch..batch + 1 };
        for sequence in among.flat_map(|batch| with_row(&sequences, batch, at)) {
            let every = 0..problem.extents.query_heads;
            for head in if heads == 1 { every } else { head..head + 1 } {
                let i = at - sequence.query_start;
                let (keys, adds) = row(&Query::new(problem, sequence, head, i));
                for (j, add) in keys.into_iter().zip(adds) {
                    elements[sequence.key_start + j] += add;
                }
            }
        }
    });
}
