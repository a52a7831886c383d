//! Who computes what: query heads of one key head in turn, everything else side by side.
//!
//! The formulas know one row of one head. Heads, batch elements and sequences do not meet except
//! in the gradients that they share, and those are summed in an order that the problem alone
//! decides. So the result has the same bits for any number of threads.

use crate::parallel::map;
use crate::scalar::Real;
use crate::tensor::{MatrixMut, Output};
use etalon_problem::{Error, Scores, Sequence};
use ndarray::{Array1, Array4};

/// Lines of the gradient of a bias that are computed with one workspace.
const LINES: usize = 16;

/// The sequences, unless there is no row to compute. (A problem without rows may count batch
/// elements without end.)
fn sequences(problem: &Scores) -> Vec<Sequence> {
    if problem.row_shape().contains(&0) { Vec::new() } else { problem.sequences() }
}

/// Calls `work` for every query head of every sequence, with its rows of the results: those that
/// lie as q does are its own, those that lie as k does are shared by the query heads of the group
/// and accumulate. Returns what `work` returns, sequence by sequence and head by head.
pub(crate) fn each_head<T: Send, R: Send, const Q: usize, const K: usize>(
    problem: &Scores,
    by_query: [&mut Output<T>; Q],
    by_key: [&mut Output<T>; K],
    work: impl Fn(&Sequence, usize, [MatrixMut<'_, T>; Q], &mut [MatrixMut<'_, T>; K]) -> R + Sync,
) -> Vec<R> {
    let group = problem.group();
    let sequences = sequences(problem);
    let rows: Vec<_> = sequences.iter().map(|s| (s.batch, s.query_start, s.queries)).collect();
    let cols: Vec<_> = sequences.iter().map(|s| (s.batch, s.key_start, s.keys)).collect();
    let mut by_query = by_query.map(|output| output.split(&rows));
    let mut by_key = by_key.map(|output| output.split(&cols));
    let mut take_query = || by_query.each_mut().map(|rows| rows.next().expect("one per head"));
    let mut take_key = || by_key.each_mut().map(|rows| rows.next().expect("one per head"));

    let mut units = Vec::new();
    for sequence in &sequences {
        for key_head in 0..problem.extents.key_heads {
            let queries: Vec<_> = (0..group).map(|_| take_query()).collect();
            units.push((sequence, key_head * group, queries, take_key()));
        }
    }
    let parts = map(units, |(sequence, first_head, queries, mut keys)| {
        let heads = queries.into_iter().enumerate();
        let parts = heads.map(|(h, queries)| work(sequence, first_head + h, queries, &mut keys));
        parts.collect::<Vec<R>>()
    });
    parts.into_iter().flatten().collect()
}

/// As [`each_head`]; what `work` returns, the head's gradient of its sink, is summed over the
/// sequences if the problem has sinks.
pub(crate) fn for_each_head<T: Real, const Q: usize, const K: usize>(
    problem: &Scores,
    by_query: [&mut Output<T>; Q],
    by_key: [&mut Output<T>; K],
    work: impl Fn(&Sequence, usize, [MatrixMut<'_, T>; Q], &mut [MatrixMut<'_, T>; K]) -> T + Sync,
) -> Result<Option<Array1<T>>, Error> {
    let parts = each_head(problem, by_query, by_key, work);
    if !problem.sinks {
        return Ok(None);
    }
    let heads = problem.extents.query_heads;
    let mut sinks = Output::zeros("gradient of sinks", &[heads])?;
    for (part, h) in parts.into_iter().zip((0..heads).cycle()) {
        sinks.elements()[h] += part;
    }
    sinks.finish().map(Some)
}

/// The gradient of the bias, (B9) and (D15), summed over the axes that the bias broadcasts:
/// `add_row` adds what row `i` of one query head in one sequence contributes, key by key of the
/// sequence. `W` is its workspace.
pub(crate) fn bias_gradient<T: Real, W: Default>(
    name: &'static str,
    problem: &Scores,
    add_row: impl Fn(&Sequence, usize, usize, &mut W, &mut [T]) + Sync,
) -> Result<Option<Array4<T>>, Error> {
    let Some(shape @ [batches, heads, rows, width]) = problem.bias_shape() else {
        return Ok(None);
    };
    let mut gradient = Output::zeros(name, &shape)?;
    let sequences = sequences(problem);
    // The lines of a block share a workspace.
    let blocks = gradient.elements().chunks_mut((LINES * width).max(1)).enumerate().collect();
    map(blocks, |(block, elements): (usize, &mut [T])| {
        let mut workspace = W::default();
        for (line, elements) in elements.chunks_mut(width).enumerate() {
            let line = block * LINES + line;
            let (batch, head, row) = (line / rows / heads, line / rows % heads, line % rows);
            for sequence in &sequences {
                let own = batches == 1 || batch == sequence.batch;
                let rows = sequence.query_start..sequence.query_start + sequence.queries;
                if !own || !rows.contains(&row) {
                    continue;
                }
                let i = row - sequence.query_start;
                let seen = &mut elements[sequence.key_start..][..sequence.keys];
                let every = 0..problem.extents.query_heads;
                for head in if heads == 1 { every } else { head..head + 1 } {
                    add_row(sequence, head, i, &mut workspace, seen);
                }
            }
        }
    });
    gradient.finish().map(Some)
}
