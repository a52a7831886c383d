//! The same problem said in another way: masks as arrays and as biases, keys in another order,
//! heads repeated, sequences alone.

use super::cases::{Case, PASSES, attention_problems, cases};
use super::forward::{examples, forward};
use super::tensors::{Tensors, assert_close, assert_same, operands, run};
use super::visible::{TOLERANCE, allowed, as_array, every, is_dense};
use etalon_problem::{Attention, BiasExtents, Mask, NamedArray, Pass, Problem, Sequences};
use ndarray::{ArrayD, Axis, concatenate};

#[test]
fn a_mask_is_the_array_of_what_it_allows() {
    for Case { name, problem } in cases() {
        let mut other = problem.clone();
        let scores = other.scores_mut().expect("scores");
        let (rows, cols) = every(scores);
        scores.mask = as_array(scores, &rows, &cols);
        for pass in PASSES {
            let x = operands(&problem, pass, 12);
            let expected = run(&problem, pass, &x).expect(&name);
            for (result, found) in run(&other, pass, &x).expect(&name) {
                assert_same(&found, &expected[&result], &format!("{name}: {result}"));
            }
        }
    }
}

/// A forbidden pair is one whose bias is −∞, in every pass. (Without directions of the bias, which
/// would need the other bias' shape.)
#[test]
fn a_mask_is_a_bias_of_minus_infinity() {
    for (name, problem) in attention_problems() {
        let e = problem.scores.extents;
        let shape = vec![e.batch, e.query_heads, e.queries, e.keys];
        let mut blocking = ArrayD::from_elem(shape, f64::NEG_INFINITY);
        allowed(&problem.scores).iter().for_each(|&place| blocking[place] = 0.0);
        let other: Problem = problem.clone().mask(Mask::Full).bias(e.batch, e.query_heads).into();
        let problem: Problem = problem.into();
        for pass in PASSES {
            let mut x = operands(&problem, pass, 13);
            x.retain(|operand, _| !matches!(operand.as_str(), "ddbias" | "tbias"));
            let expected = run(&problem, pass, &x).expect(&name);
            let bias = x.get("bias").map_or(blocking.clone(), |bias| &blocking + bias);
            x.insert("bias".to_string(), bias);
            for (result, found) in run(&other, pass, &x).expect(&name) {
                if !result.ends_with("bias") {
                    assert_same(&found, &expected[&result], &format!("{name}: {result}"));
                }
            }
        }
    }
}

/// Takes these keys (and no others) of every operand that has keys.
fn take_keys(problem: &Attention, x: &Tensors<f64>, keys: &[usize]) -> (Attention, Tensors<f64>) {
    let (mut problem, mut x) = (problem.clone(), x.clone());
    problem.scores.mask = as_array(&problem.scores, &every(&problem.scores).0, keys);
    problem.scores.extents.keys = keys.len();
    for (operand, axis) in [("k", 2), ("v", 2), ("bias", 3)] {
        if let Some(tensor) = x.get_mut(operand) {
            *tensor = tensor.select(Axis(axis), keys);
        }
    }
    (problem, x)
}

#[test]
fn the_order_of_the_keys_does_not_matter() {
    for (name, problem, x, y) in examples() {
        if is_dense(&problem.scores) {
            let reversed: Vec<usize> = (0..problem.scores.extents.keys).rev().collect();
            let (other, changed) = take_keys(&problem, &x, &reversed);
            let found = forward(&other, &changed);
            found
                .iter()
                .for_each(|(result, found)| assert_close(found, &y[result], TOLERANCE, &name));
        }
    }
}

#[test]
fn every_key_twice_adds_ln_2() {
    for (name, problem, x, y) in examples() {
        if is_dense(&problem.scores) && !problem.scores.sinks {
            let keys = problem.scores.extents.keys;
            let (other, changed) =
                take_keys(&problem, &x, &(0..2 * keys).map(|j| j / 2).collect::<Vec<_>>());
            let found = forward(&other, &changed);
            assert_close(&found["o"], &y["o"], TOLERANCE, &name);
            let lse = y["lse"].mapv(|lse| lse + std::f64::consts::LN_2);
            assert_close(&found["lse"], &lse, TOLERANCE, &name);
        }
    }
}

/// The halves of the keys combine by their lse.
#[test]
fn halves_combine() {
    for (name, problem, x, y) in examples() {
        let keys = problem.scores.extents.keys;
        if !is_dense(&problem.scores) || problem.scores.sinks || keys == 0 {
            continue;
        }
        let part = |keys: std::ops::Range<usize>| {
            let (problem, x) = take_keys(&problem, &x, &keys.collect::<Vec<_>>());
            forward(&problem, &x)
        };
        let (left, right) = (part(0..keys / 2), part(keys / 2..keys));
        for (place, &lse) in y["lse"].indexed_iter() {
            let (a, b) = (left["lse"][&place], right["lse"][&place]);
            let max = a.max(b);
            let whole =
                if max.is_finite() { max + ((a - max).exp() + (b - max).exp()).ln() } else { max };
            assert!(
                whole == lse || (whole - lse).abs() <= TOLERANCE * 4.0,
                "{name}: {whole} {lse}"
            );
            for e in 0..problem.value_dim {
                let o = [place[0], place[1], place[2], e];
                let weighted = |part: &Tensors<f64>, lse: f64| {
                    if lse == f64::NEG_INFINITY { 0.0 } else { (lse - whole).exp() * part["o"][o] }
                };
                let combined = weighted(&left, a) + weighted(&right, b);
                assert!((combined - y["o"][o]).abs() <= TOLERANCE * 4.0, "{name}: {combined}");
            }
        }
    }
}

/// Each query head on its own copy of the key head: the same, with dk and dv in parts.
#[test]
fn grouped_heads_are_repeated_heads() {
    for (name, problem) in attention_problems() {
        let (mut repeated, group) = (problem.clone(), problem.scores.group());
        if group < 2 {
            continue;
        }
        repeated.scores.extents.key_heads = problem.scores.extents.query_heads;
        let copies: Vec<usize> =
            (0..problem.scores.extents.query_heads).map(|h| h / group).collect();
        for pass in PASSES {
            let mut x = operands(&problem.clone().into(), pass, 17);
            let expected = run(&problem.clone().into(), pass, &x).expect(&name);
            for (_, tensor) in x.iter_mut().filter(|(operand, _)| operand.ends_with(['k', 'v'])) {
                *tensor = tensor.select(Axis(1), &copies);
            }
            for (result, found) in run(&repeated.clone().into(), pass, &x).expect(&name) {
                let what = format!("{name}: {result}");
                if !result.ends_with(['k', 'v']) {
                    assert_same(&found, &expected[&result], &what);
                    continue;
                }
                let sums: Vec<ArrayD<f64>> = found
                    .axis_chunks_iter(Axis(1), group)
                    .map(|heads| heads.sum_axis(Axis(1)).insert_axis(Axis(1)))
                    .collect();
                let sums: Vec<_> = sums.iter().map(|sum| sum.view()).collect();
                let found = concatenate(Axis(1), &sums).expect("equal shapes");
                assert_close(&found, &expected[&result], TOLERANCE, &what);
            }
        }
    }
}

/// Each sequence alone, as a dense problem, gives the same bits.
#[test]
fn sequences_do_not_meet() {
    for (name, problem, x, y) in examples() {
        if is_dense(&problem.scores) || problem.scores.sinks && problem.scores.extents.batch > 1 {
            continue;
        }
        let gradients = run(&problem.clone().into(), Pass::Backward, &x).expect(&name);
        for s in problem.scores.sequences() {
            let (rows, cols): (Vec<_>, Vec<_>) = (
                (s.query_start..s.query_start + s.queries).collect(),
                (s.key_start..s.key_start + s.keys).collect(),
            );
            let take = |operand: &str, tensor: &ArrayD<f64>| {
                let (last, batches) = (operand.ends_with("bias"), tensor.shape()[0]);
                let tensor = match operand {
                    "sinks" | "dsinks" => return tensor.clone(),
                    _ => tensor.select(Axis(0), &[if batches == 1 { 0 } else { s.batch }]),
                };
                let by_key = operand.ends_with(['k', 'v']);
                let tensor = tensor.select(Axis(2), if by_key { &cols } else { &rows });
                if last { tensor.select(Axis(3), &cols) } else { tensor }
            };
            let mut alone = problem.clone().sequences(Sequences::Dense);
            let e = &mut alone.scores.extents;
            (e.batch, e.queries, e.keys) = (1, s.queries, s.keys);
            alone.scores.bias = problem.scores.bias.map(|bias| BiasExtents { batch: 1, ..bias });
            let mask = as_array(&problem.scores, &rows, &cols);
            if let Mask::Array(flags) = &mask {
                let each = flags.data.len() / flags.shape[0];
                let own = flags.data[s.batch * each..][..each].to_vec();
                let shape = [1, flags.shape[1], flags.shape[2], flags.shape[3]];
                alone.scores.mask = Mask::Array(NamedArray::new("allowed", &shape, own));
            }
            let part = x.iter().map(|(operand, x)| (operand.clone(), take(operand, x))).collect();
            for (result, found) in forward(&alone, &part) {
                assert_same(&found, &take(&result, &y[&result]), &format!("{name}: {result}"));
            }
            for (result, found) in run(&alone.into(), Pass::Backward, &part).expect(&name) {
                if !result.ends_with("sinks") && !result.ends_with("bias") {
                    let expected = take(&result, &gradients[&result]);
                    assert_same(&found, &expected, &format!("{name}: {result}"));
                }
            }
        }
    }
}
