//! Masks, windows, sequences and tiles that see other keys than they should.

use super::super::{Bug, kernel::made, kernel::visible};
use super::{bf16, forward, masked, scored};
use crate::bench::{Bench, SHORT, short_attention};
use etalon_problem::{Attention, Extents, Mask, NamedArray, Sequences};

/// A window of keys to the left and to the right of the query's own.
fn windowed(left: usize, right: usize) -> Bench {
    bf16(Attention::new(SHORT).mask(Mask::window(left, right)))
}

/// Two packed sequences, the second from row 13 on.
fn packed() -> Bench {
    let extents = Extents { batch: 1, queries: 40, keys: 40, ..SHORT };
    let offsets = vec![0, 13, 40];
    let packed = Sequences::Packed { cu_query: offsets.clone(), cu_key: offsets };
    bf16(Attention::new(extents).sequences(packed))
}

/// No mask, and so many keys.
fn of_keys(keys: usize) -> Bench {
    bf16(Attention::new(Extents { keys, ..SHORT }))
}

pub const BUGS: &[Bug] = &[
    Bug {
        story: "causal at the top left with fewer queries than keys",
        ids: &["mask-top-left", "top-left"],
        make: || masked(bf16(short_attention()), |pair| pair.j <= pair.i),
    },
    Bug {
        story: "a causal mask shows one key too many",
        ids: &["mask-one-more"],
        make: || masked(bf16(short_attention()), |pair| pair.distance() >= -1),
    },
    Bug {
        story: "a causal mask hides the query's own key",
        ids: &["mask-strict"],
        make: || masked(bf16(short_attention()), |pair| pair.distance() > 0),
    },
    Bug {
        story: "the tile on the diagonal is not masked",
        ids: &["mask-any-of-tile-of-16"],
        make: || {
            masked(bf16(short_attention()), |pair| {
                // The last query of the tile sees up to 4 keys beyond its number.
                let last = (pair.i / 16 * 16 + 15).min(20) + 4;
                pair.j / 16 * 16 <= last
            })
        },
    },
    Bug {
        story: "a window counts the query's own key",
        ids: &["window-with-own-key", "window-left-minus-one"],
        make: || masked(windowed(9, 0), |pair| (0..9).contains(&pair.distance())),
    },
    Bug {
        story: "a window lets one future key in",
        ids: &["mask-right-one-more", "window-right-plus-one"],
        make: || masked(windowed(9, 2), |pair| (-3..10).contains(&pair.distance())),
    },
    Bug {
        story: "both ends of a window are exclusive",
        ids: &["mask-one-less"],
        make: || masked(windowed(9, 2), |pair| (-1..9).contains(&pair.distance())),
    },
    Bug {
        story: "the left end of a window is counted from the first query",
        ids: &["mask-left-other-end"],
        make: || masked(windowed(9, 0), |pair| (0..14).contains(&pair.distance())),
    },
    Bug {
        story: "a window is not applied: causal",
        ids: &["mask-left-dropped", "backward-without-window"],
        make: || masked(windowed(9, 0), |pair| pair.distance() >= 0),
    },
    Bug {
        story: "weights are masked after the softmax",
        ids: &["mask-after-softmax", "mask-after-softmax-of-o"],
        make: || {
            made(forward(short_attention()), |kernel| {
                let scores = kernel.scores;
                kernel.score = Box::new(move |_, dot| scores.scale() * dot);
                let mut w = kernel.weights();
                w.p.indexed_iter_mut().for_each(|(at, p)| {
                    *p *= f64::from(u8::from(visible(scores, [at[0], at[1], at[2], at[3]])));
                });
                [("o".to_string(), kernel.output(&w.p)), ("lse".to_string(), w.lse)].into()
            })
        },
    },
    Bug {
        story: "the mask multiplies the scores",
        ids: &["mask-as-zero"],
        make: || {
            scored(forward(short_attention()), |pair| if pair.is_visible() { pair.s } else { 0.0 })
        },
    },
    Bug {
        story: "lengths of keys are ignored",
        ids: &["sequences-keys-ignored"],
        make: || {
            let lengths = Sequences::Lengths { query: vec![21, 21], key: vec![25, 17] };
            masked(bf16(Attention::new(SHORT).sequences(lengths)), |_| true)
        },
    },
    Bug {
        story: "cu_seqlens are ignored: packed sequences see each other",
        ids: &["sequences-ignored", "sequences-padding-counts", "packed-leak"],
        make: || masked(packed(), |_| true),
    },
    Bug {
        story: "cu_seqlens are off by one",
        ids: &["sequences-all-one-less"],
        make: || masked(packed(), |pair| (pair.i < 12) == (pair.j < 12)),
    },
    Bug {
        story: "segment ids are ignored",
        ids: &["mask-part-2-alone", "mask-without-part-1", "mask-part-1-*"],
        make: || {
            let ids = |n: usize| (0..2 * n).map(|at| (at % n / 12) as i64).collect::<Vec<i64>>();
            let segments = Mask::Segments {
                query: NamedArray::new("query", &[2, 21], ids(21)),
                key: NamedArray::new("key", &[2, 25], ids(25)),
            };
            let both = Mask::And(vec![segments, Mask::causal()]);
            masked(bf16(Attention::new(SHORT).mask(both)), |pair| pair.distance() >= 0)
        },
    },
    Bug {
        story: "a shard of the keys is missing",
        ids: &["keys-without-last-quarter"],
        make: || masked(of_keys(40), |pair| pair.j < 30),
    },
    Bug {
        story: "the key after the last whole tile is dropped",
        ids: &[
            "keys-whole-tiles-of-16",
            "keys-without-last",
            "keys-whole-tiles-of-*",
            "key-tail-dropped",
        ],
        make: || masked(of_keys(33), |pair| pair.j < 32),
    },
    Bug {
        story: "loads beyond the end repeat the last key",
        ids: &["keys-repeated-up-to-16"],
        make: || scored(of_keys(41), |pair| pair.s + if pair.j == 40 { 8f64.ln() } else { 0.0 }),
    },
];
