//! `Mask::row_span` and `Mask::cover` against the definition, `Mask::allows`, for every primitive
//! interval mask with small numbers and every pair of small extents.

use etalon_problem::{Cover, Mask, Sequence};
use std::ops::Range;

/// Every sequence of at most so many queries and keys, none included.
fn sequences(longest: usize) -> impl Iterator<Item = Sequence> {
    let sequence =
        |queries, keys| Sequence { batch: 0, query_start: 3, queries, key_start: 5, keys };
    (0..=longest).flat_map(move |queries| (0..=longest).map(move |keys| sequence(queries, keys)))
}

/// Fails unless the spans of a mask are the keys that it allows, in one range each whose ends never
/// decrease.
fn check_spans(mask: &Mask, sequence: &Sequence) {
    let mut above = 0..0;
    for i in 0..sequence.queries {
        let at = || format!("{mask:?}, query {i} of {sequence:?}");
        let span = mask.row_span(sequence, i).expect("an interval mask");
        let allowed = (0..sequence.keys).filter(|&j| mask.allows(sequence, 0, i, j));
        assert!(allowed.eq(span.clone()), "{}: {span:?}", at());
        assert!(span.start <= span.end && span.end <= sequence.keys, "{}: {span:?}", at());
        assert!(above.start <= span.start && above.end <= span.end, "{}: {span:?}", at());
        above = span;
    }
}

/// The reaches and chunks go beyond the extents.
#[test]
fn spans_are_the_keys_that_the_mask_allows() {
    let masks = Mask::intervals(0..14);
    for sequence in sequences(12) {
        masks.iter().for_each(|mask| check_spans(mask, &sequence));
    }
}

/// Numbers that no i64 holds, and the longest sequences.
#[test]
fn spans_of_long_sequences_do_not_wrap() {
    let long = 1 << 60;
    for (queries, keys) in [(3, long), (long, 3), (long, long)] {
        let sequence = Sequence { batch: 0, query_start: 0, queries, key_start: 0, keys };
        for mask in Mask::intervals(usize::MAX - 1..usize::MAX) {
            for i in [0, 1, queries / 2, queries - 1] {
                let span = mask.row_span(&sequence, i).expect("an interval mask");
                for j in [0, 1, keys / 2, keys - 1, span.start, span.end, span.end.wrapping_sub(1)]
                {
                    if j < keys {
                        let allowed = mask.allows(&sequence, 0, i, j);
                        assert_eq!(span.contains(&j), allowed, "{mask:?} {i} {j} {sequence:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn spans_of_intersections_are_the_keys_that_every_mask_allows() {
    let masks = Mask::intervals(0..4);
    for sequence in sequences(5) {
        check_spans(&Mask::And(vec![]), &sequence);
        for (a, b) in masks.iter().flat_map(|a| masks.iter().map(move |b| (a, b))) {
            check_spans(&Mask::And(vec![a.clone(), b.clone()]), &sequence);
        }
    }
}

/// A tree that one range does not describe must not claim to have one.
#[test]
fn only_interval_masks_have_spans() {
    let sequence = sequences(2).last().expect("the largest");
    let or = Mask::Or(vec![Mask::causal(), Mask::window(0, 0)]);
    assert_eq!(or.row_span(&sequence, 0), None);
    assert_eq!(Mask::And(vec![Mask::Full, or]).row_span(&sequence, 0), None);
}

/// Every non-empty range within `0..length`.
fn ranges(length: usize) -> impl Iterator<Item = Range<usize>> {
    (0..length).flat_map(move |start| (start + 1..=length).map(move |end| start..end))
}

/// Fails unless the cover of every tile is what `allows` says of its pairs.
fn check_covers(mask: &Mask, sequence: &Sequence) {
    for rows in ranges(sequence.queries) {
        for cols in ranges(sequence.keys) {
            let mut pairs = rows.clone().flat_map(|i| cols.clone().map(move |j| (i, j)));
            let allowed = pairs.clone().filter(|&(i, j)| mask.allows(sequence, 0, i, j)).count();
            let expected = match allowed {
                0 => Cover::None,
                n if n == pairs.by_ref().count() => Cover::All,
                _ => Cover::Some,
            };
            let found = mask.cover(sequence, 0, rows.clone(), cols.clone());
            assert_eq!(found, expected, "{mask:?}, {rows:?} × {cols:?} of {sequence:?}");
        }
    }
}

#[test]
fn covers_of_interval_masks_are_exact() {
    let masks = Mask::intervals(0..6);
    for sequence in sequences(5) {
        masks.iter().for_each(|mask| check_covers(mask, &sequence));
    }
}

/// The parts of an intersection may each allow some of a tile, and no pair of it together.
#[test]
fn covers_of_intersections_of_interval_masks_are_exact() {
    let masks = Mask::intervals(0..3);
    for sequence in sequences(4) {
        for (a, b) in masks.iter().flat_map(|a| masks.iter().map(move |b| (a, b))) {
            check_covers(&Mask::And(vec![a.clone(), b.clone()]), &sequence);
        }
    }
}
