//! The problems that every law is run over: each option alone, and combinations in which they
//! meet.

use super::tensors::Random;
use etalon_problem::{Align, DistanceBias, Extents, LazyAttention, Mask, NamedArray, Sequences};

/// A handful of roundings on sums of a dozen terms of the size of 10.
pub const TOLERANCE: f64 = 1e-13;

/// B, Hq, Hk, N, M, D.
pub fn extents([batch, query_heads, key_heads, queries, keys, dim]: [usize; 6]) -> Extents {
    Extents { batch, query_heads, key_heads, queries, keys, dim }
}

/// An array mask that allows two pairs in three and leaves its first row empty.
fn array(shape: [usize; 4]) -> Mask {
    let mut random = Random(7);
    let (rows, keys) = (shape[2], shape[3]);
    let allows = |n: usize| !(n / keys).is_multiple_of(rows) && random.below(3) > 0;
    let flags: Vec<bool> = (0..shape.iter().product()).map(allows).collect();
    Mask::Array(NamedArray::new("allowed", &shape, flags))
}

/// Two documents side by side, as ids of one batch element.
fn documents(queries: &[i64], keys: &[i64]) -> Mask {
    let ids = |name: &str, ids: &[i64]| NamedArray::new(name, &[1, ids.len()], ids.to_vec());
    Mask::Segments { query: ids("query_ids", queries), key: ids("key_ids", keys) }
}

fn top_left(mut problem: LazyAttention, width: usize) -> LazyAttention {
    problem.bias = Some(DistanceBias { width, align: Align::TopLeft });
    problem
}

/// Every problem with its name.
pub fn cases() -> Vec<(&'static str, LazyAttention)> {
    // Rows of unlike number, so that no axis can stand in for another.
    let wide = || LazyAttention::new(extents([2, 2, 2, 4, 7, 3])).value_dim(5);
    let tall = || LazyAttention::new(extents([1, 3, 1, 7, 4, 3])).value_dim(2);
    let square = || LazyAttention::new(extents([2, 6, 2, 8, 8, 4])).value_dim(3);
    // The second element has no query, the third no key.
    let lengths = Sequences::Lengths { query: vec![5, 0, 3, 4], key: vec![4, 3, 0, 6] };
    let padded = || LazyAttention::new(extents([4, 2, 1, 6, 6, 3])).sequences(lengths.clone());
    // A sequence without keys, one without queries, and rows after the last.
    let packed = Sequences::Packed { cu_query: vec![0, 4, 6, 6, 9], cu_key: vec![0, 5, 5, 7, 10] };
    let joined = || LazyAttention::new(extents([1, 4, 2, 11, 11, 3])).sequences(packed.clone());
    let nothing = Mask::Or(Vec::new());
    vec![
        ("causal", square()),
        ("causal, more keys", wide()),
        ("causal, rows without keys", tall()),
        ("causal top left", tall().mask(Mask::Causal { align: Align::TopLeft }).bias(3)),
        ("full", wide().mask(Mask::Full).bias(3)),
        ("window", square().mask(Mask::window(2, 1)).bias(2)),
        ("chunks", square().mask(Mask::ChunkedCausal { chunk: 3, align: Align::TopLeft })),
        ("documents", tall().mask(documents(&[0, 0, 1, -1, 1, 0, 5], &[0, 1, 0, -1])).bias(9)),
        ("array", wide().mask(array([2, 2, 4, 7])).bias(4)),
        ("causal and array", square().mask(Mask::And(vec![Mask::causal(), array([1, 6, 8, 8])]))),
        ("nothing allowed", wide().mask(nothing).bias(2)),
        ("width 1", square().bias(1)),
        ("width below the length", square().bias(3)),
        ("width of the length", square().bias(8)),
        ("width above the length", square().bias(11)),
        ("bias, more keys", wide().bias(5)),
        ("bias, more queries", tall().bias(2)),
        ("bias at the top left, more keys", top_left(wide(), 3)),
        ("bias at the top left, more queries", top_left(tall(), 6)),
        ("scale", square().softmax_scale(-0.3).bias(2)),
        ("lengths", padded().bias(4)),
        ("packed", joined().bias(3)),
        ("packed, full", joined().mask(Mask::Full)),
        // 11 and 17 elements: more than the eight partial sums of a dot product, and a remainder.
        ("long rows", LazyAttention::new(extents([1, 1, 1, 3, 4, 11])).value_dim(17).bias(2)),
        ("one of each", LazyAttention::new(extents([1, 1, 1, 1, 1, 1])).bias(1)),
        ("no keys", LazyAttention::new(extents([1, 2, 1, 3, 0, 2])).bias(2)),
        ("no queries", LazyAttention::new(extents([1, 2, 1, 0, 3, 2])).bias(2)),
        ("no batch", LazyAttention::new(extents([0, 2, 1, 2, 3, 2])).bias(2)),
        ("no heads", LazyAttention::new(extents([1, 0, 1, 2, 3, 2])).bias(2)),
    ]
}
