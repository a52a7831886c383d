//! `Mask::row_span` and `Mask::cover` against the definition, `Mask::allows`, for every primitive
//! interval mask with small numbers and every pair of small extents.

use etalon_problem::{Cover, Mask, NamedArray, Sequence};
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

/// Every list of three ids that may be negative.
fn ids() -> impl Iterator<Item = [i64; 3]> {
    (0..27).map(|n| [n / 9 - 1, n / 3 % 3 - 1, n % 3 - 1])
}

/// A query sees the keys of its id: one range where these lie side by side. Ids before and behind the sequence do not
/// count.
#[test]
fn spans_of_segments_are_their_keys_where_these_lie_side_by_side() {
    let sequence = Sequence { batch: 0, query_start: 1, queries: 3, key_start: 1, keys: 3 };
    let array = |name: &str, own: [i64; 3]| {
        NamedArray::new(name, &[1, 5], vec![0, own[0], own[1], own[2], 1])
    };
    let mut split = 0;
    for (query, key) in ids().flat_map(|query| ids().map(move |key| (query, key))) {
        let mask = Mask::Segments { query: array("query", query), key: array("key", key) };
        let seen = |i| (0..3).filter(|&j| mask.allows(&sequence, 0, i, j)).collect::<Vec<_>>();
        let is_split = (0..3).any(|i| seen(i) == [0, 2]);
        split += usize::from(is_split);
        let and = Mask::And(vec![mask.clone(), Mask::causal()]);
        let Some(spans) = mask.row_spans(&sequence) else {
            assert!(is_split && and.row_spans(&sequence).is_none(), "{query:?} {key:?}");
            continue;
        };
        assert!(!is_split, "{query:?} {key:?}");
        for (i, span) in spans.into_iter().enumerate() {
            assert_eq!(span.collect::<Vec<_>>(), seen(i), "{query:?} {key:?} {i}");
            let both = and.row_spans(&sequence).unwrap()[i].clone();
            let allowed = (0..3).filter(|&j| and.allows(&sequence, 0, i, j));
            assert!(allowed.eq(both), "{query:?} {key:?} {i}");
        }
    }
    // Keys a, b, a of 2 ids with 2 others between them, seen by one query of 3 at least: 27 − 8 lists of queries.
    assert_eq!(split, 2 * 2 * 19);
}

#[test]
fn spans_of_a_sequence_are_those_of_its_rows() {
    let masks = Mask::intervals(0..4);
    for (mask, sequence) in masks.iter().flat_map(|mask| sequences(4).map(move |s| (mask, s))) {
        let rows = (0..sequence.queries).map(|i| mask.row_span(&sequence, i)).collect();
        assert_eq!(mask.row_spans(&sequence), rows, "{mask:?} {sequence:?}");
    }
    let one = Sequence { batch: 0, query_start: 0, queries: 1, key_start: 0, keys: 1 };
    assert_eq!(Mask::Or(vec![Mask::Full]).row_spans(&one), None);
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
