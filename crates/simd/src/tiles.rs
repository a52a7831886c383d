//! Rows of sequences, and results cut into tiles of them.

use crate::element::TensorMut;
use etalon_problem::{Error, Scores, Sequence};
use ndarray::{Dimension, RemoveAxis};
use std::ops::Range;

/// The most batch elements, and the most heads: lists are made of them even where every tensor is
/// empty.
const MOST: usize = 1 << 24;

/// Fails if there are more batch elements or heads than lists are made of.
pub fn check_counts(batch: usize, query_heads: usize) -> Result<(), Error> {
    for (name, extent) in [("batch", batch), ("query_heads", query_heads)] {
        if extent > MOST {
            return Err(Error::value(name, format!("at most {MOST} in the simd tier"), extent));
        }
    }
    Ok(())
}

/// `range` in tiles of `size`.
pub fn tiles(
    range: Range<usize>,
    size: usize,
) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator {
    let tiles = range.len().div_ceil(size);
    (0..tiles).map(move |t| {
        let start = range.start + t * size;
        start..range.end.min(start + size)
    })
}

/// The queries of all sequences.
pub fn all_queries(sequences: &[Sequence]) -> usize {
    sequences.iter().map(|sequence| sequence.queries).sum()
}

/// The keys of a sequence in the rows of the arrays.
pub fn key_rows(sequence: &Sequence) -> Range<usize> {
    sequence.key_start..sequence.key_start + sequence.keys
}

/// The queries of a sequence in the rows of the arrays.
pub fn query_rows(sequence: &Sequence) -> Range<usize> {
    sequence.query_start..sequence.query_start + sequence.queries
}

/// A tile of queries: of which sequence and head, and which rows within the sequence.
#[derive(Debug, Clone)]
pub struct Place {
    /// The number of the sequence.
    pub number: usize,
    /// The query head.
    pub head: usize,
    /// The rows.
    pub rows: Range<usize>,
}

impl Place {
    /// The number of its sequence and key head together.
    pub fn slot(&self, scores: &Scores) -> usize {
        self.number * scores.extents.key_heads + self.head / scores.group()
    }
}

/// The tiles of the queries of all sequences and `heads` heads, `size` rows in each of a sequence.
pub fn places(
    sequences: &[Sequence],
    heads: usize,
    size: impl Fn(&Sequence) -> usize,
) -> Vec<Place> {
    let (mut places, mut first) = (Vec::new(), 0);
    for here in sequences.chunk_by(|a, b| a.batch == b.batch) {
        for head in 0..heads {
            for (number, sequence) in here.iter().enumerate() {
                let tiles = tiles(0..sequence.queries, size(sequence));
                places.extend(tiles.map(|rows| Place { number: first + number, head, rows }));
            }
        }
        first += here.len();
    }
    places
}

/// Fills a result `[batch, heads, rows, …]` with `nothing` if some of its rows belong to no sequence;
/// `covered` rows belong to one, and will be written.
pub fn clear<D: Dimension>(result: &mut TensorMut<'_, D>, covered: usize, nothing: f32) {
    if covered < result.shape()[0] * result.shape()[2] {
        result.fill(nothing);
    }
}

/// Cuts a result along an axis into the given spans, which ascend and do not overlap.
pub fn cut_along<'o, D: Dimension>(
    result: TensorMut<'o, D>,
    axis: usize,
    spans: impl Iterator<Item = Range<usize>>,
) -> impl Iterator<Item = TensorMut<'o, D>> {
    let (mut rest, mut start) = (Some(result), 0);
    spans.map_while(move |span| {
        let (_, tail) = rest.take()?.split_at(axis, span.start - start);
        let (piece, tail) = tail.split_at(axis, span.len());
        (rest, start) = (Some(tail), span.end);
        Some(piece)
    })
}

/// The same along its first axis, as a list.
pub fn cut_rows<'o, D: Dimension>(
    result: TensorMut<'o, D>,
    spans: &[Range<usize>],
) -> Vec<TensorMut<'o, D>> {
    cut_along(result, 0, spans.iter().cloned()).collect()
}

/// The parts of a result along its first axis.
pub fn outer<D: RemoveAxis>(result: TensorMut<'_, D>) -> Vec<TensorMut<'_, D::Smaller>> {
    let spans = (0..result.shape()[0]).map(|i| i..i + 1);
    cut_along(result, 0, spans).map(|row| row.outer(0)).collect()
}

/// A part of a result within one batch element and head.
pub type Piece<'o, D> = TensorMut<'o, <<D as Dimension>::Smaller as Dimension>::Smaller>;

/// The rows of a result `[batch, query heads, queries, …]` in the tiles of [`places`], in their
/// order. Rows of no sequence are in no tile.
pub fn query_tiles<'o, D>(
    result: TensorMut<'o, D>,
    sequences: &[Sequence],
    size: impl Fn(&Sequence) -> usize,
) -> Vec<Piece<'o, D>>
where
    D: RemoveAxis<Smaller: RemoveAxis>,
{
    let mut pieces = Vec::new();
    for (batch, result) in outer(result).into_iter().enumerate() {
        let here = sequences.iter().filter(|sequence| sequence.batch == batch);
        let spans = here.flat_map(|sequence| tiles(query_rows(sequence), size(sequence)));
        let spans: Vec<Range<usize>> = spans.collect();
        for result in outer(result) {
            pieces.extend(cut_rows(result, &spans));
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::Array4;

    #[test]
    fn tiles_of_queries_are_in_the_order_of_their_places() {
        let sequence = |batch, query_start, queries| Sequence {
            batch,
            query_start,
            queries,
            key_start: 0,
            keys: 1,
        };
        let sequences = [sequence(0, 1, 5), sequence(0, 7, 3), sequence(1, 0, 2)];
        let mut result = Array4::<f32>::zeros((2, 2, 11, 1));
        let places = places(&sequences, 2, |_| 2);
        let tiles = query_tiles(result.view_mut().into(), &sequences, |_| 2);
        assert_eq!(places.len(), tiles.len());
        for (number, mut tile) in tiles.into_iter().enumerate() {
            tile.fill(1.0 + number as f32);
        }
        for (number, Place { number: s, head, rows }) in places.into_iter().enumerate() {
            let Sequence { batch, query_start, .. } = sequences[s];
            for row in rows {
                let found = result[[batch, head, query_start + row, 0]];
                assert_eq!(found, 1.0 + number as f32, "{number}");
            }
        }
        assert_eq!(result.iter().filter(|&&x| x != 0.0).count(), 2 * (5 + 3 + 2));
    }
}
