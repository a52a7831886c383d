//! Small random problems: what the tests of masks and of files draw from.

use etalon_problem::{Align, Attention, BiasExtents, Extents, Mask, NamedArray, Sequences};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::FileFailurePersistence;

/// Rows and keys go up to here: a tile of two rows then still has neighbours on every side, and
/// all tiles of a sequence (45 × 45 of them) can be tried.
pub const LONGEST: usize = 9;

/// Keeps failing cases in `*.regressions` files. `PROPTEST_CASES` sets the number of cases, otherwise 256.
pub fn config() -> ProptestConfig {
    ProptestConfig {
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        ..ProptestConfig::default()
    }
}

fn align() -> impl Strategy<Value = Align> {
    select(vec![Align::TopLeft, Align::BottomRight])
}

/// The reach of a window: open, within the sequence, beyond it, and beyond every integer.
fn reach() -> impl Strategy<Value = Option<usize>> {
    prop_oneof![
        2 => Just(None),
        6 => (0..LONGEST + 2).prop_map(Some),
        1 => select(vec![Some(1 << 62), Some(usize::MAX - 1), Some(usize::MAX)]),
    ]
}

fn chunk() -> impl Strategy<Value = usize> {
    prop_oneof![6 => 1..LONGEST + 2, 1 => select(vec![1 << 62, usize::MAX])]
}

/// Ids that come in runs, as those of packed documents do, with padding among them.
fn ids(name: &'static str, shape: [usize; 2]) -> impl Strategy<Value = NamedArray<i64>> {
    let run = (-1i64..3, 1..5usize);
    prop::collection::vec(run, shape[0] * shape[1]).prop_map(move |runs| {
        let ids = runs.into_iter().flat_map(|(id, length)| std::iter::repeat_n(id, length));
        NamedArray::new(name, &shape, ids.take(shape[0] * shape[1]).collect::<Vec<_>>())
    })
}

/// Flags that are mostly equal to their left neighbour, so that tiles of one value occur.
fn flags(extents: Extents) -> impl Strategy<Value = NamedArray<bool>> {
    let outer = (any::<bool>(), any::<bool>());
    outer.prop_flat_map(move |(per_batch, per_head)| {
        let batch = if per_batch { extents.batch } else { 1 };
        let heads = if per_head { extents.query_heads } else { 1 };
        let shape = [batch, heads, extents.queries, extents.keys];
        let turns =
            prop::collection::vec(prop::bool::weighted(0.1), shape.iter().product::<usize>());
        (any::<bool>(), turns).prop_map(move |(mut flag, turns)| {
            let data: Vec<bool> = turns
                .into_iter()
                .map(|turn| {
                    flag ^= turn;
                    flag
                })
                .collect();
            NamedArray::new("allowed", &shape, data)
        })
    })
}

/// One mask that is not made of others.
pub fn primitive(extents: Extents) -> BoxedStrategy<Mask> {
    let Extents { batch, queries, keys, .. } = extents;
    prop_oneof![
        Just(Mask::Full),
        align().prop_map(|align| Mask::Causal { align }),
        (reach(), reach(), align()).prop_map(|(left, right, align)| Mask::Window {
            left,
            right,
            align
        }),
        (chunk(), align()).prop_map(|(chunk, align)| Mask::ChunkedCausal { chunk, align }),
        (ids("query_ids", [batch, queries]), ids("key_ids", [batch, keys]))
            .prop_map(|(query, key)| Mask::Segments { query, key }),
        flags(extents).prop_map(Mask::Array),
    ]
    .boxed()
}

/// A mask that is made of others: up to three levels of And and Or.
pub fn tree(extents: Extents) -> impl Strategy<Value = Mask> {
    let node = |inner: BoxedStrategy<Mask>| {
        let list = prop::collection::vec(inner, 0..4);
        (any::<bool>(), list)
            .prop_map(|(and, masks)| if and { Mask::And(masks) } else { Mask::Or(masks) })
            .boxed()
    };
    node(primitive(extents).prop_recursive(2, 8, 3, move |inner| node(inner.boxed())).boxed())
}

/// Increasing offsets of `count` sequences within `rows` rows; rows may be left over.
fn offsets(count: usize, rows: usize) -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(0..=rows, count).prop_map(|mut offsets| {
        offsets.sort_unstable();
        offsets.insert(0, 0);
        offsets
    })
}

/// Divisions of the rows of arrays of these extents into sequences.
fn sequences(extents: Extents) -> BoxedStrategy<Sequences> {
    let Extents { batch, queries, keys, .. } = extents;
    let lengths =
        (prop::collection::vec(0..=queries, batch), prop::collection::vec(0..=keys, batch))
            .prop_map(|(query, key)| Sequences::Lengths { query, key });
    if batch != 1 {
        return prop_oneof![Just(Sequences::Dense), lengths].boxed();
    }
    let packed = (0..4usize)
        .prop_flat_map(move |count| (offsets(count, queries), offsets(count, keys)))
        .prop_map(|(cu_query, cu_key)| Sequences::Packed { cu_query, cu_key });
    prop_oneof![Just(Sequences::Dense), lengths, packed].boxed()
}

/// The extents of a small problem, queries and keys of different number.
fn extents() -> impl Strategy<Value = Extents> {
    (1..3usize, 1..3usize, 1..3usize, 0..=LONGEST, 0..=LONGEST, 1..5usize).prop_map(
        |(batch, group, key_heads, queries, keys, dim)| Extents {
            batch,
            query_heads: group * key_heads,
            key_heads,
            queries,
            keys,
            dim,
        },
    )
}

/// A small problem whose mask is drawn from `mask`.
pub fn attention<S>(mask: impl Fn(Extents) -> S) -> impl Strategy<Value = Attention>
where
    S: Strategy<Value = Mask> + 'static,
{
    extents().prop_flat_map(move |extents| {
        let options = (
            prop::option::of(-2.0..2.0f64),
            prop::option::of(1e-3..50.0f64),
            any::<bool>(),
            prop::option::of((any::<bool>(), any::<bool>())),
            1..6usize,
        );
        (mask(extents), sequences(extents), options).prop_map(
            move |(mask, sequences, (scale, cap, sinks, bias, value_dim))| {
                let mut problem = Attention::new(extents).value_dim(value_dim);
                problem.scores.softmax_scale = scale;
                problem.scores.softcap = cap;
                problem.scores.sinks = sinks;
                problem.scores.bias = bias.map(|(per_batch, per_head)| BiasExtents {
                    batch: if per_batch { extents.batch } else { 1 },
                    heads: if per_head { extents.query_heads } else { 1 },
                });
                problem.mask(mask).sequences(sequences)
            },
        )
    })
}
