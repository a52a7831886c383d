//! Rows of sequences, and results cut into tiles of them.

use crate::element::TensorMut;
use etalon_problem::{Error, Sequence};
use ndarray::{Dimension, Ix3, Ix4};
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

/// What is cut into tiles.
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

    /// What it cuts of a sequence.
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
}

/// What is left of a view after parts of it were taken; it begins at `from`.
pub struct Rest<'o, D: Dimension> {
    view: Option<TensorMut<'o, D>>,
    from: usize,
}

impl<'o, D: Dimension> Rest<'o, D> {
    /// All of a view.
    pub fn of(view: Option<TensorMut<'o, D>>) -> Self {
        Rest { view, from: 0 }
    }

    /// Takes a range of an axis, behind all that were taken before.
    pub fn take(&mut self, axis: usize, range: Range<usize>) -> Option<TensorMut<'o, D>> {
        let (_, rest) = self.view.take()?.split_at(axis, range.start - self.from);
        let (part, rest) = rest.split_at(axis, range.len());
        *self = Rest { view: Some(rest), from: range.end };
        Some(part)
    }
}

/// A result `[batch, heads, …]` from which the tiles of [`Side::places`] are taken, in their order. Where
/// there is no result, there are no tiles.
pub struct Cutting<'o> {
    side: Side,
    /// Heads of the result to a head of the places.
    group: usize,
    batches: Rest<'o, Ix4>,
    /// The rest of a batch element, of a sequence in it, and of a head of that.
    rows: Rest<'o, Ix3>,
    heads: Rest<'o, Ix3>,
    tiles: Rest<'o, Ix3>,
    /// The batch element, the sequence and the head that the last tile was of.
    last: [Option<usize>; 3],
}

impl<'o> Cutting<'o> {
    /// Rows that belong to no sequence become `nothing`.
    pub fn new(
        side: Side,
        group: usize,
        sequences: &[Sequence],
        mut result: Option<TensorMut<'o, Ix4>>,
        nothing: f32,
    ) -> Self {
        let covered = sequences.iter().map(|sequence| side.rows(sequence).len()).sum::<usize>();
        result.iter_mut().for_each(|result| clear(result, covered, nothing));
        let [rows, heads, tiles] = [(); 3].map(|()| Rest::of(None));
        Cutting { side, group, batches: Rest::of(result), rows, heads, tiles, last: [None; 3] }
    }

    /// The next tile, `[group, rows, …]`; or of pairs `[group, queries, keys]`.
    pub fn take(&mut self, sequence: &Sequence, place: &Place) -> Option<TensorMut<'o, Ix3>> {
        let Place { number, head, rows } = place;
        let [batch, last_number, last_head] = &mut self.last;
        if batch.replace(sequence.batch) != Some(sequence.batch) {
            let batch = self.batches.take(0, sequence.batch..sequence.batch + 1);
            self.rows = Rest::of(batch.map(|batch| batch.outer(0)));
        }
        if last_number.replace(*number) != Some(*number) {
            self.heads = Rest::of(self.rows.take(1, self.side.rows(sequence)));
            *last_head = None;
        }
        if last_head.replace(*head) != Some(*head) {
            let heads = head * self.group..(head + 1) * self.group;
            self.tiles = Rest::of(self.heads.take(0, heads));
        }
        match self.side {
            Side::Queries | Side::Keys => self.tiles.take(1, rows.clone()),
            Side::Pairs => {
                let start = sequence.key_start;
                self.tiles.take(2, start + rows.start..start + rows.end)
            }
        }
    }
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
    let mut rest = Rest::of(Some(result));
    spans.map_while(move |span| rest.take(axis, span))
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
        let mut cutting = Cutting::new(side, group, &sequences, view, 0.0);
        for (number, place) in side.places(&sequences, heads, 2).enumerate() {
            let sequence = &sequences[place.number];
            cutting.take(sequence, &place).unwrap().fill(number as f32);
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
