//! Problems as JSON files. `cargo test --workspace` switches the feature on; alone it is
//! `cargo test -p etalon-problem --features serde`.
#![cfg(feature = "serde")]

use crate::common::{attention, config, primitive, tree};
use etalon_problem::{Attention, AttentionLse, Extents, Mask, NamedArray, Problem, Sequences};
use proptest::prelude::*;
use serde_json::{Value, json};

const EXTENTS: Extents =
    Extents { batch: 1, query_heads: 4, key_heads: 2, queries: 5, keys: 7, dim: 8 };

fn to_json(problem: impl Into<Problem>) -> Value {
    serde_json::to_value(problem.into()).expect("a problem has a JSON form")
}

fn parse(value: Value) -> Result<Problem, String> {
    serde_json::from_str(&value.to_string()).map_err(|error| error.to_string())
}

/// The problem with its arrays reduced to their names, as a file holds it.
fn unbound(mut problem: Problem) -> Problem {
    let strip = |mask: &mut Mask| match mask {
        Mask::Segments { query, key } => {
            *query = NamedArray::unbound(query.name.clone());
            *key = NamedArray::unbound(key.name.clone());
        }
        Mask::Array(array) => *array = NamedArray::unbound(array.name.clone()),
        _ => {}
    };
    if let Some(scores) = problem.scores_mut() {
        scores.mask.visit_mut(&mut { strip });
    }
    problem
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_problem_survives_its_file(
        problem in prop_oneof![attention(primitive).boxed(), attention(tree).boxed()],
        lse in any::<bool>(),
    ) {
        let problem = match lse {
            true => Problem::from(AttentionLse { scores: problem.scores }),
            false => Problem::from(problem),
        };
        let read = parse(to_json(problem.clone()));
        prop_assert_eq!(read, Ok(unbound(problem)));
    }
}

#[test]
fn defaults_are_left_out() {
    let extents =
        json!({"batch": 1, "query_heads": 4, "key_heads": 2, "queries": 5, "keys": 7, "dim": 8});
    let mut expected = extents.clone();
    expected["algorithm"] = json!("attention");
    assert_eq!(to_json(Attention::new(EXTENTS)), expected);
    expected["algorithm"] = json!("attention_lse");
    assert_eq!(to_json(AttentionLse::new(EXTENTS)), expected);
    assert_eq!(parse(expected), Ok(AttentionLse::new(EXTENTS).into()));
}

#[test]
fn options_stand_beside_the_extents() {
    let problem = Attention::new(EXTENTS)
        .value_dim(3)
        .softmax_scale(0.1)
        .softcap(30.0)
        .sinks()
        .bias(1, 4)
        .mask(Mask::window(3, None))
        .sequences(Sequences::Packed { cu_query: vec![0, 2, 5], cu_key: vec![0, 7, 7] });
    let expected = json!({
        "algorithm": "attention",
        "batch": 1, "query_heads": 4, "key_heads": 2, "queries": 5, "keys": 7, "dim": 8,
        "value_dim": 3,
        "softmax_scale": 0.1, "softcap": 30.0, "sinks": true, "bias": {"batch": 1, "heads": 4},
        "mask": {"window": {"left": 3, "align": "bottom_right"}},
        "sequences": {"packed": {"cu_query": [0, 2, 5], "cu_key": [0, 7, 7]}},
    });
    assert_eq!(to_json(problem.clone()), expected);
    assert_eq!(parse(expected), Ok(problem.into()));
}

fn with(key: &str, value: Value) -> Value {
    let mut problem = to_json(Attention::new(EXTENTS));
    problem[key] = value;
    problem
}

fn mask(value: Value) -> Mask {
    parse(with("mask", value)).expect("a mask").scores().expect("scores").mask.clone()
}

#[test]
fn masks_as_people_write_them() {
    assert_eq!(mask(json!("full")), Mask::Full);
    assert_eq!(mask(json!({"causal": {}})), Mask::causal());
    assert_eq!(
        mask(json!({"causal": {"align": "top_left"}})),
        Mask::Causal { align: etalon_problem::Align::TopLeft }
    );
    assert_eq!(mask(json!({"window": {"left": 3, "right": 0}})), Mask::window(3, 0));
    assert_eq!(mask(json!({"window": {"right": null}})), Mask::window(None, None));
    assert_eq!(
        mask(json!({"and": [{"causal": {}}, {"segments": {"query": "doc_q", "key": "doc_k"}}]})),
        Mask::And(vec![
            Mask::causal(),
            Mask::Segments {
                query: NamedArray::unbound("doc_q"),
                key: NamedArray::unbound("doc_k"),
            },
        ])
    );
    assert_eq!(
        mask(json!({"or": ["full", {"array": "allowed"}]})),
        Mask::Or(vec![Mask::Full, Mask::Array(NamedArray::unbound("allowed"))])
    );
}

/// A key that is misspelt must not silently mean its default.
#[test]
fn unknown_keys_are_refused() {
    let wrong = [
        (with("soft_cap", json!(30.0)), "soft_cap"),
        (with("causal", json!(true)), "causal"),
        (with("mask", json!({"window": {"left": 1, "rigth": 0}})), "rigth"),
        (with("mask", json!({"causal": {"offset": 0}})), "offset"),
        (with("mask", json!({"sliding": {"left": 1}})), "sliding"),
        (with("sequences", json!({"lengths": {"query": [5], "key": [7], "kv": [7]}})), "kv"),
        (with("sequences", json!({"varlen": {}})), "varlen"),
        (with("bias", json!({"batch": 1, "heads": 1, "keys": 7})), "keys"),
        (with("algorithm", json!("attention_lsee")), "attention_lsee"),
    ];
    for (file, key) in wrong {
        let error = parse(file).expect_err(key);
        assert!(error.contains(key), "{error:?} does not name {key}");
    }
    // attention_lse has no values.
    let mut lse = to_json(AttentionLse::new(EXTENTS));
    lse["value_dim"] = json!(8);
    assert!(parse(lse).expect_err("no values").contains("value_dim"));
}

#[test]
fn what_is_required_is_named() {
    for key in ["algorithm", "batch", "query_heads", "key_heads", "queries", "keys", "dim"] {
        let mut problem = to_json(Attention::new(EXTENTS));
        problem.as_object_mut().expect("an object").remove(key);
        assert!(parse(problem).expect_err(key).contains(key));
    }
    for value in [json!(-1), json!(1.5), json!("1"), json!(null)] {
        parse(with("batch", value)).expect_err("an extent is a whole number");
    }
}
