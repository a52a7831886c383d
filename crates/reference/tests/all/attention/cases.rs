//! The problems that every law is run over: each option alone, and combinations in which they
//! meet.

use super::tensors::Random;
use etalon_problem::{
    Align, Attention, AttentionLse, Extents, Mask, NamedArray, Pass, Problem, Sequences,
};
use std::sync::Arc;

/// The passes of attention and attention_lse.
pub const PASSES: [Pass; 4] = [Pass::Forward, Pass::Backward, Pass::DoubleBackward, Pass::Jvp];

/// A problem with a name.
pub struct Case {
    pub name: String,
    pub problem: Problem,
}

/// B, Hq, Hk, N, M, D.
pub fn extents([batch, query_heads, key_heads, queries, keys, dim]: [usize; 6]) -> Extents {
    Extents { batch, query_heads, key_heads, queries, keys, dim }
}

pub fn segments(query: &[i64], key: &[i64], batch: usize) -> Mask {
    let ids = |name: &str, ids: &[i64]| {
        NamedArray::new(name, &[batch, ids.len() / batch], Arc::from(ids))
    };
    Mask::Segments { query: ids("query_ids", query), key: ids("key_ids", key) }
}

/// An array mask that allows two pairs in three and leaves its first row empty.
pub fn array(name: &str, shape: [usize; 4]) -> Mask {
    let mut random = Random(7);
    let (rows, keys) = (shape[2], shape[3]);
    let allows = |n: usize| !(n / keys).is_multiple_of(rows) && random.below(3) > 0;
    let flags: Vec<bool> = (0..shape.iter().product()).map(allows).collect();
    Mask::Array(NamedArray::new(name, &shape, flags))
}

/// Both algorithms on every problem.
pub fn cases() -> Vec<Case> {
    let problems = attention_problems();
    let lse = problems.iter().map(|(name, problem)| Case {
        name: format!("attention_lse {name}"),
        problem: AttentionLse { scores: problem.scores.clone() }.into(),
    });
    let attention = problems.iter().map(|(name, problem)| Case {
        name: format!("attention {name}"),
        problem: problem.clone().into(),
    });
    attention.chain(lse).collect()
}

/// Every problem of attention, with a name.
pub fn attention_problems() -> Vec<(String, Attention)> {
    let masks = masks().into_iter().map(|(name, problem)| (name.to_string(), problem));
    let options = options().into_iter().map(|(name, problem)| (name.to_string(), problem));
    masks.chain(biases()).chain(options).collect()
}

/// Rows of unlike number, so that no axis can stand in for another.
fn wide() -> Attention {
    Attention::new(extents([2, 2, 2, 4, 7, 3])).value_dim(5)
}

fn tall() -> Attention {
    Attention::new(extents([1, 2, 1, 7, 4, 3])).value_dim(2)
}

fn masks() -> Vec<(&'static str, Attention)> {
    let top_left = Mask::Causal { align: Align::TopLeft };
    let chunks = |align| Mask::ChunkedCausal { chunk: 3, align };
    // Negative ids are padding; query 3 of the second element has no partner.
    let ids =
        segments(&[0, 0, 1, -1, 2, 3, 3, 9], &[0, 1, 1, 0, -1, 0, 1, 3, 3, 2, 2, 2, -1, 3], 2);
    vec![
        ("full", wide()),
        ("causal, more keys", wide().mask(Mask::causal())),
        ("causal, dead rows", tall().mask(Mask::causal())),
        ("causal top left, more keys", wide().mask(top_left.clone())),
        ("causal top left, more queries", tall().mask(top_left.clone())),
        ("window", wide().mask(Mask::window(2, 1))),
        ("window, left open", tall().mask(Mask::window(None, 0))),
        (
            "window, right open",
            tall().mask(Mask::Window { left: Some(1), right: None, align: Align::TopLeft }),
        ),
        ("chunks", wide().mask(chunks(Align::BottomRight))),
        ("chunks top left", tall().mask(chunks(Align::TopLeft))),
        ("segments", wide().mask(ids.clone())),
        ("array", wide().mask(array("allowed", [2, 2, 4, 7]))),
        ("array, broadcast", wide().mask(array("allowed", [1, 1, 4, 7]))),
        ("segments and causal", wide().mask(Mask::And(vec![ids.clone(), Mask::causal()]))),
        (
            "window or array",
            wide().mask(Mask::Or(vec![Mask::window(1, 0), array("allowed", [1, 2, 4, 7])])),
        ),
        ("nothing allowed", wide().mask(Mask::Or(Vec::new()))),
    ]
}

/// The four ways of broadcasting a bias.
fn biases() -> Vec<(String, Attention)> {
    let grouped = || Attention::new(extents([2, 4, 2, 3, 5, 2])).value_dim(3);
    let outer = [(2, 4), (2, 1), (1, 4), (1, 1)];
    outer
        .into_iter()
        .map(|(batch, heads)| (format!("bias {batch}×{heads}"), grouped().bias(batch, heads)))
        .collect()
}

fn options() -> Vec<(&'static str, Attention)> {
    let grouped = || Attention::new(extents([2, 6, 2, 5, 6, 4])).value_dim(3);
    // The second element has no query, the third no key.
    let lengths = Sequences::Lengths { query: vec![4, 0, 3], key: vec![2, 3, 0] };
    let padded = || Attention::new(extents([3, 2, 1, 5, 4, 3])).sequences(lengths.clone());
    // A sequence without keys, one without queries, and rows after the last.
    let packed = Sequences::Packed { cu_query: vec![0, 4, 6, 6, 8], cu_key: vec![0, 3, 3, 5, 9] };
    let joined = || Attention::new(extents([1, 2, 2, 10, 10, 3])).sequences(packed.clone());
    let packed_ids = segments(&[1, 1, 0, 0, 5, 5, 2, 2, 2, 2], &[1, 0, 0, 4, 4, 2, 7, 2, 2, 2], 1);
    // 11 and 17 elements: more than the eight partial sums of a dot product, and a remainder.
    let long_rows = Attention::new(extents([1, 1, 1, 3, 4, 11])).value_dim(17);
    vec![
        ("scale", wide().softmax_scale(-0.3)),
        ("softcap", wide().softcap(0.8)),
        ("sinks", wide().sinks()),
        ("sinks, dead rows", tall().sinks().mask(Mask::causal())),
        ("softcap and sinks, causal", tall().softcap(1.5).sinks().mask(Mask::causal())),
        ("grouped", grouped().mask(Mask::window(3, 1))),
        ("grouped, all options", grouped().softcap(2.0).sinks().bias(2, 1).mask(Mask::causal())),
        ("one key head", Attention::new(extents([1, 3, 1, 4, 4, 2])).mask(Mask::causal())),
        ("lengths", padded().mask(Mask::causal())),
        ("lengths, all options", padded().softcap(1.0).sinks().bias(1, 2).value_dim(2)),
        ("packed", joined().mask(Mask::causal())),
        ("packed, segments", joined().mask(packed_ids)),
        ("packed, all options", joined().softcap(1.0).sinks().bias(1, 1).mask(Mask::window(2, 2))),
        ("one of each", Attention::new(extents([1, 1, 1, 1, 1, 1])).sinks().softcap(3.0)),
        ("no keys", Attention::new(extents([1, 2, 1, 3, 0, 2])).sinks()),
        ("no queries", Attention::new(extents([1, 2, 1, 0, 3, 2])).sinks().bias(1, 1)),
        ("no batch", Attention::new(extents([0, 2, 1, 2, 3, 2]))),
        ("no heads", Attention::new(extents([1, 0, 1, 2, 3, 2])).sinks()),
        ("long rows", long_rows.softcap(4.0)),
    ]
}
