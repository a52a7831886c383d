//! Unit tests of `src/softmax/rows.rs`.

use crate::softmax::counts::{Counts, SIDE};
use crate::softmax::rows::Rows;
use etalon_problem::{Align, BiasExtents, Extents, Mask, NamedArray, Scores, Sequences};

fn scores(mask: Mask, sequences: Sequences) -> Scores {
    let extents = Extents { batch: 1, query_heads: 2, key_heads: 1, queries: 150, keys: 140, dim: 8 };
    Scores { mask, sequences, ..Scores::new(extents) }
}

/// Pairs that a kernel finds by the tables must be those that the mask allows: a pair outside its tile's
/// or row's range, or without its flag, is never computed.
fn agrees(scores: &Scores) {
    let rows = Rows::new(scores).unwrap();
    let e = scores.extents;
    for (n, s) in scores.sequences().iter().enumerate() {
        for (i, j) in (0..s.queries).flat_map(|i| (0..s.keys).map(move |j| (i, j))) {
            for head in 0..e.query_heads {
                let inside = |[begin, end]: [i32; 2]| begin <= j as i32 && (j as i32) < end;
                let span = rows.spans[s.batch * e.queries + s.query_start + i];
                let tile = rows.tiles[rows.sequences[n][5] as usize + i / SIDE];
                let flag = rows.allowed.as_ref().is_none_or(|flags| {
                    let heads = Counts::of_scores(scores).flags.unwrap();
                    let head = if heads == 1 { 0 } else { head };
                    let row = (s.batch * heads + head) * e.queries + s.query_start + i;
                    flags[row * e.keys + s.key_start + j] == 1
                });
                let seen = inside(span) && inside(tile) && flag;
                assert_eq!(seen, scores.mask.allows(s, head, i, j), "{:?}", scores.mask);
            }
        }
    }
}

#[test]
fn tables_say_what_the_mask_says() {
    let packed = Sequences::Packed { cu_query: vec![0, 70, 70, 149], cu_key: vec![0, 0, 66, 130] };
    let lengths = Sequences::Lengths { query: vec![130], key: vec![65] };
    for sequences in [Sequences::Dense, packed, lengths] {
        agrees(&scores(Mask::Full, sequences.clone()));
        agrees(&scores(Mask::causal(), sequences.clone()));
        agrees(&scores(Mask::Causal { align: Align::TopLeft }, sequences.clone()));
        agrees(&scores(Mask::window(20, 3), sequences.clone()));
        let chunks = Mask::ChunkedCausal { chunk: 50, align: Align::TopLeft };
        agrees(&scores(Mask::And(vec![chunks, segments(30)]), sequences.clone()));
        agrees(&scores(segments(1), sequences.clone()));
        let either = vec![Mask::window(2, 0), Mask::window(None, 0)];
        agrees(&scores(Mask::Or(either), sequences.clone()));
        agrees(&scores(Mask::Or(vec![]), sequences));
    }
}

/// Segments of so many rows, whose ids come back after 7 of them.
fn segments(rows: i64) -> Mask {
    let ids = |name: &str, count: i64| {
        let list: Vec<i64> = (0..count).map(|i| i / rows % 7).collect();
        NamedArray::new(name, &[1, count as usize], list)
    };
    Mask::Segments { query: ids("query", 150), key: ids("key", 140) }
}

#[test]
fn masks_of_ranges_have_no_flags() {
    let chunks = Mask::ChunkedCausal { chunk: 50, align: Align::TopLeft };
    let counts = |mask: &Mask| Counts::of_scores(&scores(mask.clone(), Sequences::Dense));
    let found = |mask: &Mask| (counts(mask).flags, counts(mask).by_spans);
    assert_eq!(found(&Mask::causal()), (None, false));
    let both = Mask::And(vec![chunks.clone(), segments(20)]);
    for mask in [&chunks, &segments(20), &both] {
        assert_eq!(found(mask), (None, true));
    }
    // 7 · 19 < 140: the first id comes back among the keys.
    assert_eq!(found(&segments(19)), (Some(1), false));
    // Of ids on the device nobody knows that yet.
    let most = |mask| Counts::most(&scores(mask, Sequences::Dense)).unwrap();
    assert_eq!((most(segments(20)).flags, most(segments(20)).by_spans), (Some(1), false));
    assert_eq!((most(chunks.clone()).flags, most(chunks).by_spans), (None, true));
}

#[test]
fn a_row_of_no_sequence_is_marked() {
    let lengths = Sequences::Lengths { query: vec![130], key: vec![65] };
    let rows = Rows::new(&scores(Mask::Full, lengths)).unwrap();
    assert_eq!(rows.spans[129], [0, 65]);
    assert_eq!(rows.spans[130], [-1, -1]);
    assert_eq!((rows.by_queries.len(), rows.by_keys.len()), (3, 2));
}

/// The counts of the tables themselves.
fn of_rows(rows: &Rows, e: &Extents) -> Counts {
    let pairs = e.batch * e.queries * e.keys;
    Counts {
        by_queries: rows.by_queries.len(),
        by_keys: rows.by_keys.len(),
        by_pairs: rows.by_pairs.len(),
        longest: rows.by_keys.iter().map(|task| task[3] as usize + 1).max().unwrap_or(0),
        sequences: rows.sequences.len(),
        tiles: rows.tiles.len(),
        flags: rows.allowed.as_ref().map(|flags| flags.len() / pairs),
        by_spans: !rows.common.is_empty(),
    }
}

/// Problems of lengths, offsets and masks.
fn cases() -> Vec<Scores> {
    let extents = Extents { batch: 2, query_heads: 2, key_heads: 1, queries: 150, keys: 200, dim: 8 };
    let one = Extents { batch: 1, ..extents };
    let lengths = |query: [usize; 2], key: [usize; 2]| Sequences::Lengths { query: query.into(), key: key.into() };
    let packed = |cu_query: Vec<usize>, cu_key: Vec<usize>| Sequences::Packed { cu_query, cu_key };
    let sequences = [
        (extents, Sequences::Dense),
        (extents, lengths([130, 0], [65, 200])),
        (extents, lengths([0, 0], [0, 0])),
        (one, packed(vec![0, 1, 66, 131, 150], vec![0, 1, 66, 131, 200])),
        (one, packed(vec![0, 0, 150], vec![0, 200, 200])),
        (one, packed((0..=150).collect(), (0..=150).collect())),
    ];
    let either = Mask::Or(vec![Mask::window(2, 0), Mask::window(None, 0)]);
    let masks = [Mask::Full, Mask::causal(), either];
    let biases = [None, Some(BiasExtents { batch: 1, heads: 1 }), Some(BiasExtents { batch: 2, heads: 1 })];
    let mut all = Vec::new();
    for (extents, sequences) in sequences {
        for (mask, bias) in masks.iter().flat_map(|mask| biases.map(|bias| (mask, bias))) {
            let bias = bias.filter(|bias| bias.batch <= extents.batch);
            let plain = Scores { mask: mask.clone(), bias, ..Scores::new(extents) };
            all.push(Scores { sequences: sequences.clone(), ..plain });
        }
    }
    all
}

#[test]
fn tiles_are_counted_without_their_tables() {
    for scores in cases() {
        let rows = Rows::new(&scores).unwrap();
        assert_eq!(Counts::of_scores(&scores), of_rows(&rows, &scores.extents), "{scores:?}");
    }
}

#[test]
fn no_lengths_have_more_tiles_than_the_most() {
    for scores in cases() {
        let (own, most) = (Counts::of_scores(&scores), Counts::most(&scores).unwrap());
        let pairs = [
            (own.by_queries, most.by_queries),
            (own.by_keys, most.by_keys),
            (own.by_pairs, most.by_pairs),
            (own.longest, most.longest),
        ];
        assert!(pairs.iter().all(|(own, most)| own <= most), "{pairs:?} {scores:?}");
    }
    // Nor more than these by far.
    let longest = cases().iter().map(|x| Counts::most(x).unwrap().by_queries).max();
    assert_eq!(longest, Some((150 + 63 * 150) / 64));
}
