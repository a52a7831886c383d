//! A mask, row by row: which keys of a tile a query sees.

use etalon_problem::{Align, Mask, Sequence};
use std::ops::Range;

/// Writes into `row` whether query `i` of `sequence` sees each key of `cols`. It says for a whole
/// row what [`Mask::allows`] says of a pair, by ranges where the mask has them.
pub fn visible_row(
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
        Mask::And(masks) => combine(masks, sequence, head, i, cols, row, true),
        Mask::Or(masks) => combine(masks, sequence, head, i, cols, row, false),
        _ => {
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

fn combine(
    masks: &[Mask],
    sequence: &Sequence,
    head: usize,
    i: usize,
    cols: Range<usize>,
    row: &mut [bool],
    all: bool,
) {
    row.fill(all);
    let mut part = vec![false; row.len()];
    for mask in masks {
        visible_row(mask, sequence, head, i, cols.clone(), &mut part);
        for (visible, &part) in row.iter_mut().zip(&part) {
            *visible = if all { *visible & part } else { *visible | part };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn masks() -> impl Strategy<Value = Mask> {
        let align = prop_oneof![Just(Align::TopLeft), Just(Align::BottomRight)];
        let reach = prop::option::of(prop_oneof![0..6usize, Just(usize::MAX)]);
        let leaf =
            prop_oneof![
                Just(Mask::Full),
                align.clone().prop_map(|align| Mask::Causal { align }),
                (reach.clone(), reach, align.clone())
                    .prop_map(|(left, right, align)| Mask::Window { left, right, align }),
                (1..5usize, align).prop_map(|(chunk, align)| Mask::ChunkedCausal { chunk, align }),
            ];
        leaf.prop_recursive(2, 8, 3, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..3).prop_map(Mask::And),
                prop::collection::vec(inner, 0..3).prop_map(Mask::Or),
            ]
        })
    }

    proptest! {
        #[test]
        fn a_row_says_what_every_pair_says(
            mask in masks(), queries in 1..12usize, keys in 1..12usize, start in 0..12usize,
        ) {
            let sequence = Sequence { batch: 0, query_start: 0, queries, key_start: 0, keys };
            let cols = start.min(keys)..keys;
            let mut row = vec![false; cols.len()];
            for i in 0..queries {
                visible_row(&mask, &sequence, 0, i, cols.clone(), &mut row);
                for (j, &visible) in cols.clone().zip(&row) {
                    prop_assert_eq!(visible, mask.allows(&sequence, 0, i, j), "i {} j {}", i, j);
                }
            }
        }
    }
}
