//! A mask as the kernels read it: tile by tile and row by row.

mod arrays;

use crate::tile::MAX_KEYS;
use arrays::{Blocks, Runs};
use etalon_problem::{Align, Cover, Error, Mask, Sequence};
use std::ops::Range;

/// A mask, and what is noted of its arrays, so that what it allows of a tile is known without a look at
/// every element.
#[derive(Debug)]
pub enum Sight<'a> {
    /// A mask without arrays.
    Mask(&'a Mask),
    /// [`Mask::Array`].
    Array(Blocks<'a>),
    /// [`Mask::Segments`].
    Segments { query: Runs<'a>, key: Runs<'a> },
    /// [`Mask::And`].
    And(Vec<Sight<'a>>),
    /// [`Mask::Or`].
    Or(Vec<Sight<'a>>),
}

impl<'a> Sight<'a> {
    /// Prepares a mask that passed its check.
    pub fn new(mask: &'a Mask) -> Result<Self, Error> {
        let all = |masks: &'a [Mask]| masks.iter().map(Sight::new).collect::<Result<_, _>>();
        Ok(match mask {
            Mask::Segments { query, key } => {
                Sight::Segments { query: Runs::new(query)?, key: Runs::new(key)? }
            }
            Mask::Array(array) => Sight::Array(Blocks::new(array)?),
            Mask::And(masks) => Sight::And(all(masks)?),
            Mask::Or(masks) => Sight::Or(all(masks)?),
            _ => Sight::Mask(mask),
        })
    }

    /// Bytes of what is noted.
    pub fn bytes(mask: &Mask) -> usize {
        match mask {
            Mask::Segments { query, key } => {
                (query.data.len().saturating_add(key.data.len())).saturating_mul(size_of::<usize>())
            }
            Mask::Array(array) => Blocks::count(array),
            Mask::And(masks) | Mask::Or(masks) => {
                masks.iter().map(Sight::bytes).fold(0, usize::saturating_add)
            }
            _ => 0,
        }
    }

    /// As [`Mask::cover`].
    pub fn cover(
        &self,
        sequence: &Sequence,
        head: usize,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Cover {
        if rows.is_empty() || cols.is_empty() {
            return Cover::None;
        }
        let each = |sight: &Sight<'_>| sight.cover(sequence, head, rows.clone(), cols.clone());
        match self {
            Sight::Mask(mask) => mask.cover(sequence, head, rows, cols),
            Sight::Array(blocks) => blocks.cover(sequence, head, rows, cols),
            Sight::Segments { query, key } => Cover::of_segments(
                query.of(sequence.batch, sequence.query_start, rows).map(|(id, _)| id),
                key.of(sequence.batch, sequence.key_start, cols).map(|(id, _)| id),
            ),
            Sight::And(all) => Cover::all(all.iter().map(each)),
            Sight::Or(any) => Cover::any(any.iter().map(each)),
        }
    }

    /// Writes into `row` whether query `i` of `sequence` sees each key of `cols`, at most
    /// [`MAX_KEYS`]: for a whole row what [`Mask::allows`] says of a pair.
    pub fn visible_row(
        &self,
        sequence: &Sequence,
        head: usize,
        i: usize,
        cols: Range<usize>,
        row: &mut [bool],
    ) {
        let combine = |masks: &[Sight<'_>], row: &mut [bool], all: bool| {
            row.fill(all);
            let mut part = [false; MAX_KEYS];
            let part = &mut part[..row.len()];
            for mask in masks {
                mask.visible_row(sequence, head, i, cols.clone(), part);
                for (visible, &part) in row.iter_mut().zip(&*part) {
                    *visible = if all { *visible & part } else { *visible | part };
                }
            }
        };
        match self {
            Sight::Mask(mask) => mask_row(mask, sequence, head, i, cols, row),
            Sight::Array(blocks) => {
                let first = sequence.key_start + cols.start;
                let all = blocks.array.row(sequence, head, i);
                row.copy_from_slice(&all[first..first + cols.len()]);
            }
            Sight::Segments { query, key } => {
                let id = query.array.ids(sequence.batch)[sequence.query_start + i];
                let mut at = 0;
                for (other, len) in key.of(sequence.batch, sequence.key_start, cols) {
                    row[at..at + len].fill(id >= 0 && id == other);
                    at += len;
                }
            }
            Sight::And(all) => combine(all, row, true),
            Sight::Or(any) => combine(any, row, false),
        }
    }
}

fn mask_row(
    mask: &Mask,
    sequence: &Sequence,
    head: usize,
    i: usize,
    cols: Range<usize>,
    row: &mut [bool],
) {
    match mask {
        Mask::Full => row.fill(true),
        Mask::Causal { align } => band(row, &cols, None, Some(aligned(sequence, *align, i))),
        Mask::Window { left, right, align } => {
            let i = aligned(sequence, *align, i);
            let reach = |distance: usize| distance.min(1 << 62) as i64;
            band(row, &cols, left.map(|left| i - reach(left)), right.map(|right| i + reach(right)));
        }
        Mask::ChunkedCausal { chunk, align } => {
            let i = aligned(sequence, *align, i);
            let within = i.rem_euclid((*chunk).min(1 << 62) as i64);
            band(row, &cols, Some(i - within), Some(i));
        }
        Mask::Segments { .. } | Mask::Array(_) | Mask::And(_) | Mask::Or(_) => {
            for (visible, j) in row.iter_mut().zip(cols) {
                *visible = mask.allows(sequence, head, i, j);
            }
        }
    }
}

fn aligned(sequence: &Sequence, align: Align, i: usize) -> i64 {
    match align {
        Align::TopLeft => i as i64,
        Align::BottomRight => i as i64 + sequence.keys as i64 - sequence.queries as i64,
    }
}

/// True from key `first` to key `last`, both inclusive.
fn band(row: &mut [bool], cols: &Range<usize>, first: Option<i64>, last: Option<i64>) {
    let place =
        |key: i64| (key.saturating_sub(cols.start as i64)).clamp(0, row.len() as i64) as usize;
    let start = first.map_or(0, place);
    let end = last.map_or(row.len(), |last| place(last.saturating_add(1)));
    row.fill(false);
    if start < end {
        row[start..end].fill(true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use etalon_problem::NamedArray;
    use proptest::prelude::*;

    /// Rows of the arrays: of two batch elements, with others before and after the sequence, and of
    /// more than one block.
    const ROWS: usize = 40;

    /// Ids in runs, with padding among them.
    fn ids() -> impl Strategy<Value = NamedArray<i64>> {
        prop::collection::vec((-1..3i64, 1..9usize), 2 * ROWS).prop_map(|runs| {
            let ids = runs.into_iter().flat_map(|(id, len)| std::iter::repeat_n(id, len));
            NamedArray::new("ids", &[2, ROWS], ids.take(2 * ROWS).collect::<Vec<_>>())
        })
    }

    fn masks() -> impl Strategy<Value = Mask> {
        let align = prop_oneof![Just(Align::TopLeft), Just(Align::BottomRight)];
        let reach = prop::option::of(prop_oneof![0..20usize, Just(usize::MAX)]);
        let chunk = prop_oneof![4 => 1..20usize, 1 => Just(usize::MAX)];
        // Mostly as their left neighbours, so that tiles of one value occur.
        let turns = prop::collection::vec(prop::bool::weighted(0.005), 2 * ROWS * ROWS);
        let flags = turns.prop_map(|turns| {
            let mut flag = false;
            turns
                .iter()
                .map(|turn| {
                    flag ^= turn;
                    flag
                })
                .collect::<Vec<_>>()
        });
        let leaf =
            prop_oneof![
                Just(Mask::Full),
                align.clone().prop_map(|align| Mask::Causal { align }),
                (reach.clone(), reach, align.clone())
                    .prop_map(|(left, right, align)| Mask::Window { left, right, align }),
                (chunk, align).prop_map(|(chunk, align)| Mask::ChunkedCausal { chunk, align }),
                (ids(), ids()).prop_map(|(query, key)| Mask::Segments { query, key }),
                flags.prop_map(|flags| Mask::Array(NamedArray::new(
                    "seen",
                    &[2, 1, ROWS, ROWS],
                    flags
                ))),
            ];
        leaf.prop_recursive(2, 8, 3, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..3).prop_map(Mask::And),
                prop::collection::vec(inner, 0..3).prop_map(Mask::Or),
            ]
        })
    }

    fn sequences() -> impl Strategy<Value = Sequence> {
        (0..2usize, 0..5usize, 1..36usize, 0..5usize, 1..36usize).prop_map(
            |(batch, query_start, queries, key_start, keys)| Sequence {
                batch,
                query_start,
                queries,
                key_start,
                keys,
            },
        )
    }

    proptest! {
        #[test]
        fn a_row_says_what_every_pair_says(
            mask in masks(), sequence in sequences(), start in 0..36usize,
        ) {
            let cols = start.min(sequence.keys)..sequence.keys;
            let sight = Sight::new(&mask).expect("memory for small arrays");
            let mut row = vec![false; cols.len()];
            for i in 0..sequence.queries {
                sight.visible_row(&sequence, 0, i, cols.clone(), &mut row);
                for (j, &visible) in cols.clone().zip(&row) {
                    prop_assert_eq!(visible, mask.allows(&sequence, 0, i, j), "i {} j {}", i, j);
                }
            }
        }

        #[test]
        fn a_tile_is_covered_as_the_mask_covers_it(
            mask in masks(), sequence in sequences(), ends in [0..36usize, 0..36, 0..36, 0..36],
        ) {
            let range = |a: usize, b: usize, len: usize| a.min(b).min(len)..a.max(b).min(len);
            let rows = range(ends[0], ends[1], sequence.queries);
            let cols = range(ends[2], ends[3], sequence.keys);
            let sight = Sight::new(&mask).expect("memory for small arrays");
            prop_assert_eq!(
                sight.cover(&sequence, 0, rows.clone(), cols.clone()),
                mask.cover(&sequence, 0, rows, cols)
            );
        }
    }
}
