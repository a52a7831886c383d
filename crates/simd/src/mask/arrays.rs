//! Indices of the arrays of masks: runs of ids, and covers of blocks of pairs.

use super::QueryHead;
use crate::workspace::Lists;
use etalon_problem::{Cover, Error, NamedArray};
use rayon::prelude::*;
use std::ops::Range;

/// Ids of segments, with the ends of their runs.
#[derive(Debug)]
pub struct Runs<'a> {
    pub array: &'a NamedArray<i64>,
    /// For every id, the index of the first different id after it, within its batch element.
    ends: &'a [usize],
}

impl<'a> Runs<'a> {
    pub fn new(array: &'a NamedArray<i64>, lists: &'a Lists) -> Result<Self, Error> {
        let ends = lists.repeat(array.data.len(), 0, "the ends of segments")?;
        let mut rest = &mut *ends;
        for batch in 0..array.shape[0] {
            let mut end = 0;
            for run in array.ids(batch).chunk_by(|a, b| a == b) {
                end += run.len();
                let (here, later) = rest.split_at_mut(run.len());
                here.fill(end);
                rest = later;
            }
        }
        Ok(Runs { array, ends })
    }

    /// The runs in `range`, counted from row `start` of a batch element: their ids and lengths.
    pub fn of(
        &self,
        batch: usize,
        start: usize,
        range: Range<usize>,
    ) -> impl Iterator<Item = (i64, usize)> + Clone {
        let length = self.array.shape[1];
        let (ids, ends) = (self.array.ids(batch), &self.ends[batch * length..]);
        let (mut at, last) = (start + range.start, start + range.end);
        std::iter::from_fn(move || {
            let id = (at < last).then(|| ids[at])?;
            let end = ends[at].min(last);
            let len = end - at;
            at = end;
            Some((id, len))
        })
    }
}

/// The number of queries and of keys in a block of [`Blocks`].
const SIDE: usize = 16;

/// An array of pairs, with the cover of each block of [`SIDE`] × [`SIDE`] pairs.
#[derive(Debug)]
pub struct Blocks<'a> {
    pub array: &'a NamedArray<bool>,
    /// For each batch element and head of the array, row by row.
    covers: &'a [Cover],
}

impl<'a> Blocks<'a> {
    /// Finds the covers of all blocks, on all threads.
    pub fn new(array: &'a NamedArray<bool>, lists: &'a Lists) -> Result<Self, Error> {
        let covers = lists.repeat(Blocks::count(array), Cover::None, "the blocks of a mask")?;
        let [queries, keys] = [2, 3].map(|axis| array.shape[axis]);
        let bands = queries.div_ceil(SIDE);
        let band = |(number, covers): (usize, &mut [Cover])| {
            let (head, band) = (number / bands, number % bands);
            let rows = band * SIDE..queries.min((band + 1) * SIDE);
            let rows = &array.data[(head * queries + rows.start) * keys..][..rows.len() * keys];
            cover_band(rows, keys, covers);
        };
        covers.par_chunks_mut(keys.div_ceil(SIDE).max(1)).enumerate().for_each(band);
        Ok(Blocks { array, covers })
    }

    /// The number of blocks of an array.
    pub fn count(array: &NamedArray<bool>) -> usize {
        let [batches, heads, queries, keys] = [0, 1, 2, 3].map(|axis| array.shape[axis]);
        batches * heads * queries.div_ceil(SIDE) * keys.div_ceil(SIDE)
    }

    /// As [`NamedArray::cover`].
    pub fn cover(&self, of: QueryHead<'_>, rows: Range<usize>, cols: Range<usize>) -> Cover {
        let QueryHead { sequence, head } = of;
        let [batches, heads, queries, keys] = [0, 1, 2, 3].map(|axis| self.array.shape[axis]);
        let blocks = |start: usize, range: &Range<usize>| {
            (start + range.start) / SIDE..(start + range.end).div_ceil(SIDE)
        };
        let batch = if batches == 1 { 0 } else { sequence.batch };
        let head_here = if heads == 1 { 0 } else { head };
        let (bands, across) = (queries.div_ceil(SIDE), keys.div_ceil(SIDE));
        let first = (batch * heads + head_here) * bands;
        let seen = blocks(sequence.key_start, &cols);
        let bands = blocks(sequence.query_start, &rows);
        let parts = bands.flat_map(|band| &self.covers[(first + band) * across..][seen.clone()]);
        match Cover::of_parts(parts.copied()) {
            // A block that reaches beyond the tile does not decide it: look at the pairs of the tile.
            Cover::Some => self.array.cover(sequence, head, rows, cols),
            cover => cover,
        }
    }
}

/// The covers of the blocks of a band of rows, each of `keys` pairs.
fn cover_band(rows: &[bool], keys: usize, covers: &mut [Cover]) {
    for (number, cover) in covers.iter_mut().enumerate() {
        let cols = number * SIDE..keys.min((number + 1) * SIDE);
        // A count of true pairs in each column: vectors, where any() and all() are branches.
        let mut counts = [0u8; SIDE];
        for row in rows.chunks_exact(keys) {
            for (count, &seen) in counts.iter_mut().zip(&row[cols.clone()]) {
                *count += u8::from(seen);
            }
        }
        let count: usize = counts.iter().map(|&count| usize::from(count)).sum();
        *cover = match count {
            0 => Cover::None,
            count if count == rows.len() / keys * cols.len() => Cover::All,
            _ => Cover::Some,
        };
    }
}
