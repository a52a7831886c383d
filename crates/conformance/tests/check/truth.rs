//! An explanation leaves nothing beyond the bounds, or says which part it explains; places are those of the
//! elements that are off; and what nobody knows is said to be unknown.

use crate::bench::{Bench, EXTENTS, attention, explained, linear, place};
use etalon_conformance::check::Check;
use etalon_conformance::generate::Stream;
use etalon_problem::{
    Attention, AttentionLse, Dtype, Extents, LinearAttention, LinearCrossEntropy, Mask, Pass,
    Sequences, TokenSequences,
};
use ndarray::{ArrayD, Axis as Along, Dimension};

/// The names of all explanations.
fn ids(check: &Check) -> Vec<&str> {
    check.explanations.iter().map(|x| x.id.as_str()).collect()
}

/// An attention backward in bf16 of 64 queries and keys and 72 elements: the last columns are a tile of 8.
fn wide_heads() -> Bench {
    let extents =
        Extents { batch: 1, query_heads: 2, key_heads: 2, queries: 64, keys: 64, dim: 72 };
    Bench::new(Attention::new(extents), Pass::Backward, Dtype::Bf16)
}

#[test]
fn a_few_stale_zeros_are_no_scale() {
    // Four zeros in each column, at other rows from column to column.
    let check = wide_heads().changed("dq", |mut x| {
        for (at, x) in x.indexed_iter_mut() {
            let at = at.slice();
            if (at[2] + 5 * at[3]) % 16 == 0 {
                *x = 0.0;
            }
        }
        x
    });
    assert_eq!(ids(&check), ["zero"]);
    assert!(
        explained(&check, "zero").contains("elements that are off are 0"),
        "{:?}",
        check.explanations
    );
    assert_eq!(check.explanations[0].left, Some(0.0));
}

#[test]
fn all_zeros_are_zeros_and_no_factor() {
    let bench = Bench::new(attention(), Pass::DoubleBackward, Dtype::F32);
    let mut got = bench.right();
    let zeros = bench.problem.operands(Pass::DoubleBackward).into_iter().filter_map(|operand| {
        let x = got.get(operand.name)?;
        let zeros = ArrayD::zeros(x.shape.clone());
        Some((
            operand.name.to_string(),
            etalon_conformance::tensor::Tensor::store(&zeros, x.stored()?),
        ))
    });
    got = zeros.collect();
    let check = bench.check(&got);
    assert!(check.explanations.iter().all(|x| x.id == "zero"), "{:?}", check.explanations);
    assert!(check.explanations.iter().all(|x| x.text.contains("every element is 0")));
}

/// Results that are not 0 are not said to be 0 because the exact ones are.
#[test]
fn an_absent_cotangent_is_said_to_be_absent() {
    let loss = LinearCrossEntropy { logit_scale: 0.25, ..LinearCrossEntropy::new(48, 32, 57) };
    let mut bench = Bench::new(loss, Pass::ForwardBackward, Dtype::Bf16);
    let one = ndarray::arr0(1.0).into_dyn();
    let one = etalon_conformance::tensor::Tensor::round(&one, Dtype::F32);
    bench.inputs.insert("dloss".to_string(), one);
    let right = bench.right();
    bench.inputs.remove("dloss");
    let check = bench.check(&right);
    let text = explained(&check, "dloss-of-one");
    assert!(
        text.contains("`dloss` is 1; it is absent from the inputs, which counts as 0"),
        "{text}"
    );
    assert!(check.explanations.iter().all(|x| !x.text.contains("is 0:")), "{:?}", ids(&check));
}

#[test]
fn rows_of_two_batch_elements_are_two_places() {
    let bench = Bench::new(attention(), Pass::Forward, Dtype::F32);
    let check = bench.changed("o", |mut x| {
        for (batch, row) in [(0, 3), (1, 20)] {
            x.index_axis_mut(Along(0), batch).index_axis_mut(Along(1), row).fill(7.0);
        }
        x
    });
    let places = &check.outputs.iter().find(|x| x.name == "o").unwrap().places;
    assert!(places[0].starts_with("In batch element 0 of 2: only in row 3 of 37"), "{places:?}");
    assert!(places[1].starts_with("In batch element 1 of 2: only in row 20"), "{places:?}");
}

#[test]
fn what_explains_a_part_says_so() {
    // lse counts no sink, and o does.
    let bench = Bench::new(attention().sinks(), Pass::Forward, Dtype::F32);
    let bare = {
        let mut inputs = bench.inputs.clone();
        let sinks = ArrayD::from_elem(vec![4], f64::NEG_INFINITY);
        inputs
            .insert("sinks".into(), etalon_conformance::tensor::Tensor::round(&sinks, Dtype::F32));
        bench.exact(&bench.problem, &inputs)
    };
    let mut got = bench.right();
    got.insert("lse".into(), bare["lse"].clone());
    let check = bench.check(&got);
    let of_sinks = check.explanations.iter().find(|x| x.id == "sink-not-in-lse");
    assert!(of_sinks.is_some_and(|x| x.part.is_none()), "{:?}", ids(&check));
    // A factor of one head, and something else in another.
    let check = bench.changed("o", |mut x| {
        x.index_axis_mut(Along(1), 0).mapv_inplace(|x| 2.0 * x);
        let stream = Stream::new(3, "noise");
        let mut at = 0;
        x.index_axis_mut(Along(1), 2).mapv_inplace(|x| {
            at += 1;
            x + if at < 90 { stream.normal(at) } else { 0.0 }
        });
        x
    });
    for explanation in check.explanations {
        assert!(explanation.part.is_some(), "{explanation:?}");
    }
}

/// Noise in a few elements has no explanation, whichever they are; the next step is said.
#[test]
fn nothing_is_said_to_explain_noise() {
    let problems: [(Bench, &str); 4] = [
        (Bench::new(attention().softcap(2.0).sinks(), Pass::Forward, Dtype::Bf16), "o"),
        (Bench::new(attention(), Pass::Backward, Dtype::F32), "dk"),
        (Bench::new(linear(), Pass::Forward, Dtype::Bf16), "o"),
        (Bench::new(LinearCrossEntropy::new(23, 16, 29), Pass::Forward, Dtype::F32), "loss"),
    ];
    for (bench, name) in &problems {
        for seed in 0..1 {
            let stream = Stream::new(seed, name);
            let check = bench.changed(name, |mut x| {
                let n = x.len();
                for (at, x) in x.iter_mut().enumerate() {
                    let hit = stream.uniform(at) < 40.0 / n as f64;
                    *x += if hit || n == 1 { 0.5 + stream.normal(at + n).abs() } else { 0.0 };
                }
                x
            });
            assert!(
                !check.passed && check.explanations.is_empty(),
                "{name}: {:?}",
                check.explanations
            );
            let next = check.next.expect("a next step");
            assert!(next.contains("etalon probe"), "{next}");
        }
    }
}

#[test]
fn not_a_number_is_located_by_its_tile() {
    let bench = Bench::new(attention(), Pass::Forward, Dtype::F32);
    let check = bench.changed("o", |mut x| {
        x.slice_axis_mut(Along(2), (32..).into()).fill(f64::NAN);
        x.index_axis_mut(Along(2), 5).mapv_inplace(|x| x + 0.1);
        x
    });
    let text = explained(&check, "nan");
    let tail = "the last 5 of 37 rows, from 32 on: those after the last whole tile of 16";
    assert!(text.contains(tail), "{text}");
    let part = check.explanations.iter().find_map(|x| x.part.as_deref());
    assert!(
        part.is_some_and(|x| x.contains("elements of o that are off")),
        "{:?}",
        check.explanations
    );
}

#[test]
fn padding_and_what_nobody_sees_have_a_name() {
    let lengths = Sequences::Lengths { query: vec![30, 37], key: vec![41, 35] };
    let bench = Bench::new(attention().sequences(lengths), Pass::Forward, Dtype::F32);
    let check = bench.changed("o", |mut x| {
        x.index_axis_mut(Along(0), 0).slice_axis_mut(Along(1), (30..).into()).fill(0.5);
        x
    });
    let places = |check: &Check, name: &str| {
        check.outputs.iter().find(|x| x.name == name).unwrap().places.join(" ")
    };
    assert!(places(&check, "o").contains("All rows that are off are padding"), "{check:?}");
    // Under a mask at the top left 37 queries see 37 of the 41 keys.
    let mask = Mask::Causal { align: etalon_problem::Align::TopLeft };
    let bench = Bench::new(Attention::new(EXTENTS).mask(mask), Pass::Backward, Dtype::F32);
    let check = bench.changed("dk", |mut x| {
        x.slice_axis_mut(Along(2), (37..).into()).fill(0.5);
        x
    });
    let unseen = "All rows that are off are keys that no query sees";
    assert!(places(&check, "dk").contains(unseen), "{}", places(&check, "dk"));
    let tokens = TokenSequences::Lengths { tokens: vec![37, 21] };
    let problem = LinearAttention { sequences: tokens, ..linear() };
    let bench = Bench::new(problem, Pass::Forward, Dtype::F32);
    let check = bench.changed("o", |mut x| {
        x.index_axis_mut(Along(0), 1).slice_axis_mut(Along(1), (21..).into()).fill(0.5);
        x
    });
    assert!(places(&check, "o").contains("are padding"), "{}", place(&check, "o"));
}

/// A problem that takes many products is looked at in parts, and explanations take no longer than half of
/// the rest.
#[test]
fn a_large_problem_is_explained_by_its_parts() {
    let extents =
        Extents { batch: 1, query_heads: 2, key_heads: 1, queries: 700, keys: 700, dim: 16 };
    let capped = AttentionLse::new(extents).mask(Mask::causal()).softcap(1.0);
    let bench = Bench::new(capped, Pass::Forward, Dtype::F32);
    assert!(!etalon_conformance::check::explains(&bench.problem));
    let plain = AttentionLse::new(extents).mask(Mask::causal()).into();
    let check = bench.check(&bench.exact(&plain, &bench.inputs));
    explained(&check, "softcap-absent");
    assert!(!check.parts.is_empty(), "{check:?}");
    assert!(check.products.explained <= 0.5 * check.products.judged, "{:?}", check.products);
    // A single element is explained by nothing, and what was not tried has a name.
    let check = bench.changed("lse", |mut x| {
        x[[0, 1, 400]] += 0.25;
        x
    });
    assert!(check.explanations.is_empty() && check.next.is_some(), "{:?}", check.explanations);
    assert!(check.products.explained <= 0.5 * check.products.judged, "{:?}", check.products);
    assert!(bench.check(&bench.right()).products.explained == 0.0);
}

/// An attention backward in bf16, in which one channel of k is far larger than the others, and so are its dq and the
/// bounds of that.
fn massive_channel() -> Bench {
    let extents =
        Extents { batch: 1, query_heads: 2, key_heads: 1, queries: 48, keys: 48, dim: 32 };
    let problem = Attention::new(extents).mask(Mask::causal());
    let mut bench = Bench::new(problem, Pass::Backward, Dtype::Bf16);
    for (name, size) in [("q", 448.0), ("k", -547.0)] {
        let x = bench.inputs.get_mut(name).expect("an input");
        let mut values = x.numbers(name).expect("numbers");
        values.index_axis_mut(Along(3), 3).mapv_inplace(|x| size + 0.25 * x.round());
        *x = etalon_conformance::tensor::Tensor::round(&values, Dtype::Bf16);
    }
    bench
}

/// Bounds may be as wide as results are large. Whatever lies within them explains nothing by itself: an input, another
/// layout, another row.
#[test]
fn within_wide_bounds_only_what_is_near_explains() {
    let bench = massive_channel();
    for (what, factor, id) in [("the other sign", -1.0, "factor"), ("zeros", 0.0, "zero")] {
        let check = bench.changed("dq", |x| x * factor);
        let output = check.outputs.iter().find(|x| x.name == "dq").expect("dq");
        assert!(output.off > 0, "{what}: {output:?}");
        let all: Vec<_> = check.explanations.iter().map(|x| (&x.id, x.left)).collect();
        assert!(all.iter().any(|(name, _)| *name == id), "{what}: {all:?}");
        assert!(all.iter().all(|(_, left)| left.is_none_or(|left| left < 0.05)), "{what}: {all:?}");
    }
}

/// Logits of a deviation of 6, which leave each class to one token: dw of a class is a multiple of one row of h, and
/// a kernel that keeps everything in f32 errs by the rounding of dw alone. Simulated kernels err more than the bound
/// there, all in one direction.
#[test]
fn right_gradients_of_peaked_logits_pass() {
    let mut bench = Bench::new(LinearCrossEntropy::new(64, 64, 400), Pass::Backward, Dtype::Bf16);
    let h = bench.inputs.get_mut("h").expect("h");
    let values = h.numbers("h").expect("numbers").mapv(|x| 0.75 * x);
    *h = etalon_conformance::tensor::Tensor::round(&values, Dtype::Bf16);
    let check = bench.check(&bench.right());
    assert!(check.passed && !check.conspicuous, "{:?}", check.outputs);
}
