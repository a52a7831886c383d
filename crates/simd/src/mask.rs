//! A mask in the form that kernels read, tile by tile and row by row.

mod arrays;

use crate::tile::MAX_KEYS;
use crate::workspace::Lists;
use arrays::{Blocks, Runs};
use bumpalo::boxed::Box;
use etalon_problem::{Cover, Error, Mask, Sequence};
use std::ops::Range;

/// A query head of a sequence, of whose pairs a mask allows some.
#[derive(Debug, Clone, Copy)]
pub struct QueryHead<'a> {
    pub sequence: &'a Sequence,
    pub head: usize,
}

/// A mask with an index of its arrays, so that the cover of a tile is found without reading every
/// element.
#[derive(Debug)]
pub enum PreparedMask<'a> {
    /// A mask without arrays, read by its spans; pair by pair if its kind has none.
    Mask(&'a Mask),
    /// [`Mask::Array`].
    Array(Blocks<'a>),
    /// [`Mask::Segments`].
    Segments { query: Runs<'a>, key: Runs<'a> },
    /// [`Mask::And`] with a part that is not an interval mask.
    And(Box<'a, [PreparedMask<'a>]>),
    /// [`Mask::Or`].
    Or(Box<'a, [PreparedMask<'a>]>),
}

impl<'a> PreparedMask<'a> {
    /// Prepares a mask that passed its check, in memory for [`PreparedMask::bytes`].
    pub fn new(mask: &'a Mask, lists: &'a Lists) -> Result<Self, Error> {
        let all = |masks: &'a [Mask]| {
            let mut failure = None;
            let parts = masks.iter().map_while(|mask| match PreparedMask::new(mask, lists) {
                Ok(part) => Some(part),
                Err(error) => {
                    failure = Some(error);
                    None
                }
            });
            let parts = lists.collect(masks.len(), parts, "the parts of a mask")?;
            failure.map_or(Ok(parts), Err)
        };
        Ok(match mask {
            Mask::Segments { query, key } => PreparedMask::Segments {
                query: Runs::new(query, lists)?,
                key: Runs::new(key, lists)?,
            },
            Mask::Array(array) => PreparedMask::Array(Blocks::new(array, lists)?),
            Mask::And(masks) => match all(masks)? {
                parts if parts.iter().all(|part| matches!(part, PreparedMask::Mask(_))) => {
                    PreparedMask::Mask(mask)
                }
                parts => PreparedMask::And(parts),
            },
            Mask::Or(masks) => PreparedMask::Or(all(masks)?),
            _ => PreparedMask::Mask(mask),
        })
    }

    /// The bytes of the lists of a mask.
    pub fn bytes(mask: &Mask) -> usize {
        match mask {
            Mask::Segments { query, key } => {
                (query.data.len().saturating_add(key.data.len())).saturating_mul(size_of::<usize>())
            }
            Mask::Array(array) => Blocks::count(array),
            Mask::And(masks) | Mask::Or(masks) => {
                let parts = masks
                    .iter()
                    .map(|mask| size_of::<PreparedMask<'_>>() + PreparedMask::bytes(mask));
                parts.fold(0, usize::saturating_add)
            }
            _ => 0,
        }
    }

    /// As [`Mask::cover`].
    pub fn cover(&self, of: QueryHead<'_>, rows: Range<usize>, cols: Range<usize>) -> Cover {
        if rows.is_empty() || cols.is_empty() {
            return Cover::None;
        }
        let QueryHead { sequence, head } = of;
        let each = |mask_index: &PreparedMask<'_>| mask_index.cover(of, rows.clone(), cols.clone());
        match self {
            PreparedMask::Mask(mask) => mask.cover(sequence, head, rows, cols),
            PreparedMask::Array(blocks) => blocks.cover(of, rows, cols),
            PreparedMask::Segments { query, key } => Cover::of_segments(
                query.of(sequence.batch, sequence.query_start, rows).map(|(id, _)| id),
                key.of(sequence.batch, sequence.key_start, cols).map(|(id, _)| id),
            ),
            PreparedMask::And(all) => Cover::all(all.iter().map(each)),
            PreparedMask::Or(any) => Cover::any(any.iter().map(each)),
        }
    }

    /// Writes into `row` 1 for each key of `cols`, at most [`MAX_KEYS`] of them, that query `i` of
    /// the sequence sees, and otherwise 0: [`Mask::allows`] for a whole row.
    pub fn visible_row(&self, of: QueryHead<'_>, i: usize, cols: Range<usize>, row: &mut [u8]) {
        let QueryHead { sequence, head } = of;
        let combine = |masks: &[PreparedMask<'_>], row: &mut [u8], all: bool| {
            row.fill(u8::from(all));
            let mut part = [0; MAX_KEYS];
            let part = &mut part[..row.len()];
            for mask in masks {
                mask.visible_row(of, i, cols.clone(), part);
                for (visible, &part) in row.iter_mut().zip(&*part) {
                    *visible = if all { *visible & part } else { *visible | part };
                }
            }
        };
        match self {
            PreparedMask::Mask(mask) => write_row(mask, of, i, cols, row),
            PreparedMask::Array(blocks) => {
                let first = sequence.key_start + cols.start;
                let all = blocks.array.row(sequence, head, i);
                row.copy_from_slice(bytemuck::cast_slice(&all[first..first + cols.len()]));
            }
            PreparedMask::Segments { query, key } => {
                let id = query.array.ids(sequence.batch)[sequence.query_start + i];
                let mut at = 0;
                for (other, len) in key.of(sequence.batch, sequence.key_start, cols) {
                    row[at..at + len].fill(u8::from(id >= 0 && id == other));
                    at += len;
                }
            }
            PreparedMask::And(all) => combine(all, row, true),
            PreparedMask::Or(any) => combine(any, row, false),
        }
    }
}

/// As [`PreparedMask::visible_row`], by a mask without arrays.
fn write_row(mask: &Mask, of: QueryHead<'_>, i: usize, cols: Range<usize>, row: &mut [u8]) {
    match mask.row_span(of.sequence, i) {
        Some(span) => {
            let place = |key: usize| key.clamp(cols.start, cols.end) - cols.start;
            row.fill(0);
            row[place(span.start)..place(span.end)].fill(1);
        }
        None => {
            for (visible, j) in row.iter_mut().zip(cols) {
                *visible = u8::from(mask.allows(of.sequence, of.head, i, j));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Workspace;
    use etalon_problem::{Align, NamedArray};
    use proptest::prelude::*;

    /// Rows of the arrays, for each of two batch elements: more than one block, and more rows than a
    /// sequence has.
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
        fn a_row_agrees_with_every_pair(
            mask in masks(), sequence in sequences(), start in 0..36usize,
        ) {
            let cols = start.min(sequence.keys)..sequence.keys;
            let workspace = Workspace::new();
            let lists = workspace.lists(PreparedMask::bytes(&mask), "test").expect("memory for small arrays");
            let mask_index = PreparedMask::new(&mask, &lists).expect("memory for small arrays");
            let mut row = vec![9; cols.len()];
            for i in 0..sequence.queries {
                let of = QueryHead { sequence: &sequence, head: 0 };
                mask_index.visible_row(of, i, cols.clone(), &mut row);
                for (j, &visible) in cols.clone().zip(&row) {
                    let allowed = mask.allows(&sequence, 0, i, j);
                    prop_assert_eq!(visible, u8::from(allowed), "i {} j {}", i, j);
                }
            }
        }

        #[test]
        fn a_tile_has_the_cover_of_the_mask(
            mask in masks(), sequence in sequences(), ends in [0..36usize, 0..36, 0..36, 0..36],
        ) {
            let range = |a: usize, b: usize, len: usize| a.min(b).min(len)..a.max(b).min(len);
            let rows = range(ends[0], ends[1], sequence.queries);
            let cols = range(ends[2], ends[3], sequence.keys);
            let workspace = Workspace::new();
            let lists = workspace.lists(PreparedMask::bytes(&mask), "test").expect("memory for small arrays");
            let mask_index = PreparedMask::new(&mask, &lists).expect("memory for small arrays");
            prop_assert_eq!(
                mask_index.cover(QueryHead { sequence: &sequence, head: 0 }, rows.clone(), cols.clone()),
                mask.cover(&sequence, 0, rows, cols)
            );
        }
    }
}
