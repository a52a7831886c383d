//! Rows of sequences, and results cut into tiles of them.

use crate::element::TensorMut;
use etalon_problem::{Error, Sequence};
use ndarray::{Dimension, Ix3, Ix4};
use std::iter::repeat_with;
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

/// The keys of a sequence in the rows of the arrays.
pub fn key_rows(sequence: &Sequence) -> Range<usize> {
    sequence.key_start..sequence.key_start + sequence.keys
}

/// The queries of a sequence in the rows of the arrays.
pub fn query_rows(sequence: &Sequence) -> Range<usize> {
    sequence.query_start..sequence.query_start + sequence.queries
}

/// A tile of queries or of keys: of which sequence and head, and which rows within the sequence.
#[derive(Debug, Clone)]
pub struct Place {
    /// The number of the sequence.
    pub number: usize,
    /// The query head, or the key head.
    pub head: usize,
    /// The rows.
    pub rows: Range<usize>,
}

/// Things that are cut into tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Rows of queries.
    Queries,
    /// Rows of keys.
    Keys,
    /// Columns of keys, in rows of queries.
    Pairs,
}

impl Side {
    /// The rows of a result that belong to a sequence.
    fn rows(self, sequence: &Sequence) -> Range<usize> {
        if self == Side::Keys { key_rows(sequence) } else { query_rows(sequence) }
    }

    /// The rows or columns of a sequence that it cuts.
    fn len(self, sequence: &Sequence) -> usize {
        if self == Side::Queries { sequence.queries } else { sequence.keys }
    }

    /// Tiles of `size` of the sequences and `heads` heads, in the order of sequences, heads and rows.
    pub fn places(
        self,
        sequences: &[Sequence],
        heads: usize,
        size: usize,
    ) -> impl Iterator<Item = Place> + Send {
        sequences.iter().enumerate().flat_map(move |(number, sequence)| {
            let tiles = move |head| {
                let tiles = tiles(0..self.len(sequence), size);
                tiles.map(move |rows| Place { number, head, rows })
            };
            (0..heads).flat_map(tiles)
        })
    }

    /// A result `[batch, heads, …]`, of `group` heads to each of `heads`, cut into the tiles of
    /// [`Side::places`], in their order: `[group, rows, …]`, or of pairs `[group, queries, keys]`.
    pub fn pieces<'o>(
        self,
        result: Option<TensorMut<'o, Ix4>>,
        sequences: &[Sequence],
        (heads, group): (usize, usize),
        size: usize,
        nothing: f32,
    ) -> impl Iterator<Item = Option<TensorMut<'o, Ix3>>> {
        let rows = move |sequence: &Sequence| (sequence.batch, self.rows(sequence));
        let of_pairs = self == Side::Pairs;
        let spans = move |sequence: &Sequence| {
            let start = if of_pairs { sequence.key_start } else { 0 };
            tiles(start..start + self.len(sequence), size)
        };
        let axis = if of_pairs { 2 } else { 1 };
        pieces(result, sequences, rows, (heads, group), (axis, spans), nothing)
    }
}

/// Cuts a result `[batch, heads, rows, …]` into pieces `[group, …]`, in the order of sequences, groups of
/// heads and `spans`, which lie along `axis` of a piece: of a sequence the batch element and the rows in
/// `rows`. Rows that belong to no sequence become `nothing`. Where there is no result, there are no pieces.
pub fn pieces<'o, S, I: Iterator<Item = Range<usize>>>(
    result: Option<TensorMut<'o, Ix4>>,
    sequences: &[S],
    rows: impl Fn(&S) -> (usize, Range<usize>) + Copy,
    (groups, group): (usize, usize),
    (axis, spans): (usize, impl Fn(&S) -> I + Copy),
    nothing: f32,
) -> impl Iterator<Item = Option<TensorMut<'o, Ix3>>> {
    let mut pieces = result.map(|mut result| {
        clear(&mut result, sequences.iter().map(|s| rows(s).1.len()).sum(), nothing);
        let elements = move || sequences.chunk_by(move |a, b| rows(a).0 == rows(b).0);
        let batches = elements().map(move |here| rows(&here[0]).0).map(|batch| batch..batch + 1);
        cut_along(result, 0, batches).zip(elements()).flat_map(move |(batch, here)| {
            let every = here.iter().map(move |s| rows(s).1);
            cut_along(batch.outer(0), 1, every).zip(here).flat_map(move |(heads, sequence)| {
                let groups = (0..groups).map(move |head| head * group..(head + 1) * group);
                cut_along(heads, 0, groups)
                    .flat_map(move |rows| cut_along(rows, axis, spans(sequence)))
            })
        })
    });
    repeat_with(move || pieces.as_mut().and_then(Iterator::next))
}

/// Fills a result `[batch, heads, rows, …]` with `nothing` if some of its rows belong to no sequence;
/// `covered` rows belong to one, and will be written.
fn clear(result: &mut TensorMut<'_, Ix4>, covered: usize, nothing: f32) {
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
    let (mut rest, mut from) = (Some(result), 0);
    spans.map_while(move |span| {
        let (_, here) = rest.take()?.split_at(axis, span.start - from);
        let (part, behind) = here.split_at(axis, span.len());
        (rest, from) = (Some(behind), span.end);
        Some(part)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array4, s};

    /// Fills every tile with its number, and expects it where its place is.
    fn fills(side: Side, heads: usize, group: usize) {
        let sequence = |batch, query_start, queries, key_start, keys| Sequence {
            batch,
            query_start,
            queries,
            key_start,
            keys,
        };
        let sequences = [sequence(0, 1, 5, 0, 4), sequence(0, 7, 3, 4, 6), sequence(1, 0, 2, 1, 9)];
        let mut result = Array4::<f32>::from_elem((2, heads * group, 11, 10), 9.0);
        let mut wanted = Array4::<f32>::zeros(result.dim());
        let view = Some(result.view_mut().into());
        let places = side.places(&sequences, heads, 2);
        let pieces = side.pieces(view, &sequences, (heads, group), 2, 0.0);
        for (number, (place, piece)) in places.zip(pieces).enumerate() {
            let sequence = &sequences[place.number];
            piece.unwrap().fill(number as f32);
            let heads = place.head * group..(place.head + 1) * group;
            let of = |start: usize| start + place.rows.start..start + place.rows.end;
            let mut here = match side {
                Side::Queries => {
                    wanted.slice_mut(s![sequence.batch, heads, of(sequence.query_start), ..])
                }
                Side::Keys => {
                    wanted.slice_mut(s![sequence.batch, heads, of(sequence.key_start), ..])
                }
                Side::Pairs => {
                    let (rows, cols) = (query_rows(sequence), of(sequence.key_start));
                    wanted.slice_mut(s![sequence.batch, heads, rows, cols])
                }
            };
            here.fill(number as f32);
        }
        assert_eq!(result, wanted);
    }

    #[test]
    fn tiles_are_where_their_places_are() {
        fills(Side::Queries, 2, 1);
        fills(Side::Keys, 3, 1);
        fills(Side::Pairs, 2, 3);
    }
}
