//! Identities of the forward pass that need no second implementation.

use crate::cases::{Case, attention_problems, cases};
use crate::tensors::{Tensors, assert_close, assert_same, operands, run};
use etalon_problem::{Attention, AttentionLse, Mask, NamedArray, Pass, Problem, Scores, Sequences};
use ndarray::{ArrayD, Axis, Slice, concatenate};

/// A handful of roundings on sums of a dozen terms.
pub const TOLERANCE: f64 = 1e-14;

fn forward(problem: &Attention, x: &Tensors<f64>) -> Tensors<f64> {
    run(&problem.clone().into(), Pass::Forward, x).expect("the forward pass")
}

/// Every problem of attention with its operands and outputs.
fn examples() -> impl Iterator<Item = (String, Attention, Tensors<f64>, Tensors<f64>)> {
    attention_problems().into_iter().map(|(name, problem)| {
        let x = operands(&problem.clone().into(), Pass::Backward, 11);
        let y = forward(&problem, &x);
        (name, problem, x, y)
    })
}

/// The pairs that sequences and mask allow, as (batch, head, query, key) of the arrays.
pub fn allowed(scores: &Scores) -> Vec<[usize; 4]> {
    let mut pairs = Vec::new();
    for s in scores.sequences() {
        for head in 0..scores.extents.query_heads {
            for (i, j) in (0..s.queries).flat_map(|i| (0..s.keys).map(move |j| (i, j))) {
                if scores.mask.allows(&s, head, i, j) {
                    pairs.push([s.batch, head, s.query_start + i, s.key_start + j]);
                }
            }
        }
    }
    pairs
}

/// 1 where a query sees a key, else 0: `[B, Hq, N]`.
pub fn seeing(scores: &Scores) -> ArrayD<f64> {
    let mut rows = ArrayD::zeros(scores.row_shape().to_vec());
    allowed(scores).iter().for_each(|&[b, h, i, _]| rows[[b, h, i]] = 1.0);
    rows
}

/// The allowed pairs as an array mask, its rows and columns taken from these places.
fn as_array(scores: &Scores, rows: &[usize], cols: &[usize]) -> Mask {
    let e = &scores.extents;
    let mut flags = ArrayD::from_elem(vec![e.batch, e.query_heads, e.queries, e.keys], false);
    allowed(scores).iter().for_each(|&place| flags[place] = true);
    let flags = flags.select(Axis(2), rows).select(Axis(3), cols);
    Mask::Array(NamedArray::new(
        "allowed",
        flags.shape(),
        flags.iter().copied().collect::<Vec<_>>(),
    ))
}

fn every(scores: &Scores) -> (Vec<usize>, Vec<usize>) {
    ((0..scores.extents.queries).collect(), (0..scores.extents.keys).collect())
}

#[test]
fn outputs_lie_in_the_hull_of_the_visible_values() {
    for (name, problem, x, y) in examples() {
        let group = problem.scores.group();
        let sink = if problem.scores.sinks { [0.0].as_slice() } else { &[] };
        let pairs = allowed(&problem.scores);
        for ((place, &o), e) in y["o"].indexed_iter().zip((0..problem.value_dim).cycle()) {
            let [b, h, i] = [place[0], place[1], place[2]];
            let seen = pairs.iter().filter(|pair| pair[..3] == [b, h, i]);
            let values =
                seen.map(|pair| x["v"][[b, h / group, pair[3], e]]).chain(sink.iter().copied());
            let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| {
                (low.min(v), high.max(v))
            });
            let inside = low - TOLERANCE <= o && o <= high + TOLERANCE;
            assert!(inside || (low > high && o == 0.0), "{name}: {o} outside {low}..{high}");
        }
    }
}

/// The weights of a row that sees a key add up to 1, less what the sink takes.
pub fn weights(problem: &Attention, x: &Tensors<f64>, y: &Tensors<f64>) -> ArrayD<f64> {
    let mut sums = seeing(&problem.scores);
    if let Some(sinks) = x.get("sinks") {
        for ((place, sum), lse) in sums.indexed_iter_mut().zip(&y["lse"]) {
            if *sum > 0.0 {
                *sum -= (sinks[[place[1]]] - lse).exp();
            }
        }
    }
    sums
}

#[test]
fn outputs_are_affine_in_the_values() {
    for (name, problem, x, y) in examples() {
        let mut changed = x.clone();
        changed.insert("v".to_string(), x["v"].mapv(|v| -2.0 * v));
        assert_same(&forward(&problem, &changed)["o"], &y["o"].mapv(|o| -2.0 * o), &name);
        changed.insert("v".to_string(), x["v"].mapv(|v| v + 3.0));
        let shift = weights(&problem, &x, &y).insert_axis(Axis(3)) * 3.0;
        assert_close(&forward(&problem, &changed)["o"], &(&y["o"] + &shift), TOLERANCE, &name);
    }
}

#[test]
fn a_mask_is_the_array_of_what_it_allows() {
    for Case { name, problem } in cases() {
        let mut other = problem.clone();
        let scores = match &mut other {
            Problem::Attention(problem) => &mut problem.scores,
            Problem::AttentionLse(problem) => &mut problem.scores,
        };
        let (rows, cols) = every(scores);
        scores.mask = as_array(scores, &rows, &cols);
        for pass in Pass::ALL {
            let x = operands(&problem, pass, 12);
            let expected = run(&problem, pass, &x).expect(&name);
            for (result, found) in run(&other, pass, &x).expect(&name) {
                assert_same(&found, &expected[&result], &format!("{name}: {result}"));
            }
        }
    }
}

/// A forbidden pair is one whose bias is −∞, in every pass.
#[test]
fn a_mask_is_a_bias_of_minus_infinity() {
    for (name, problem) in attention_problems() {
        let e = problem.scores.extents;
        let mut blocking =
            ArrayD::from_elem(vec![e.batch, e.query_heads, e.queries, e.keys], f64::NEG_INFINITY);
        allowed(&problem.scores).iter().for_each(|&place| blocking[place] = 0.0);
        let other = problem.clone().mask(Mask::Full).bias(e.batch, e.query_heads);
        for pass in Pass::ALL {
            let mut x = operands(&problem.clone().into(), pass, 13);
            let expected = run(&problem.clone().into(), pass, &x).expect(&name);
            // Directions and gradients of the bias have another shape now.
            x.retain(|operand, _| !matches!(operand.as_str(), "ddbias" | "tbias"));
            let whole =
                problem.scores.bias.is_none() || pass != Pass::DoubleBackward && pass != Pass::Jvp;
            let bias = x.get("bias").map_or(blocking.clone(), |bias| &blocking + bias);
            x.insert("bias".to_string(), bias);
            for (result, found) in run(&other.clone().into(), pass, &x).expect(&name) {
                if whole && !result.ends_with("bias") {
                    assert_same(&found, &expected[&result], &format!("{name}: {result}"));
                }
            }
        }
    }
}

#[test]
fn scale_and_signs_move_between_q_and_k() {
    for (name, problem, x, y) in examples() {
        let scale = problem.scores.scale();
        let mut changed = x.clone();
        changed.insert("q".to_string(), x["q"].mapv(|q| -2.0 * q));
        changed.insert("k".to_string(), x["k"].mapv(|k| -k));
        let found = forward(&problem.softmax_scale(scale / 2.0), &changed);
        found.iter().for_each(|(result, found)| assert_same(found, &y[result], &name));
    }
}

/// k + w moves every score of a row by σ q·w: o stays, lse moves with it.
#[test]
fn shifting_every_key_shifts_lse_alone() {
    for (name, problem, x, y) in examples() {
        if problem.scores.softcap.is_some() || problem.scores.sinks {
            continue;
        }
        let shift = |d: usize| 0.25 * (d as f64 - 1.0);
        let mut changed = x.clone();
        for (place, k) in changed.get_mut("k").expect("k").indexed_iter_mut() {
            *k += shift(place[3]);
        }
        let mut lse = y["lse"].clone();
        for (place, q) in x["q"].indexed_iter() {
            lse[[place[0], place[1], place[2]]] += problem.scores.scale() * q * shift(place[3]);
        }
        let found = forward(&problem, &changed);
        assert_close(&found["o"], &y["o"], TOLERANCE, &name);
        assert_close(&found["lse"], &lse, TOLERANCE, &name);
    }
}

/// A row of the bias may move by a constant: o stays, lse moves by it.
#[test]
fn shifting_a_row_of_the_bias_shifts_lse_alone() {
    for (name, problem, x, y) in examples() {
        if !x.contains_key("bias") || problem.scores.sinks {
            continue;
        }
        let mut changed = x.clone();
        for (place, bias) in changed.get_mut("bias").expect("bias").indexed_iter_mut() {
            *bias += place[2] as f64;
        }
        let mut lse = y["lse"].clone();
        lse.indexed_iter_mut().for_each(|(place, lse)| *lse += place[2] as f64);
        let found = forward(&problem, &changed);
        assert_close(&found["o"], &y["o"], TOLERANCE, &name);
        assert_close(&found["lse"], &lse, TOLERANCE, &name);
    }
}

fn is_dense(scores: &Scores) -> bool {
    scores.sequences == Sequences::Dense
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
                let weigh = |part: &Tensors<f64>, lse: f64| {
                    if lse == f64::NEG_INFINITY { 0.0 } else { (lse - whole).exp() * part["o"][o] }
                };
                let combined = weigh(&left, a) + weigh(&right, b);
                assert!((combined - y["o"][o]).abs() <= TOLERANCE * 4.0, "{name}: {combined}");
            }
        }
    }
}

/// max ≤ lse ≤ max + ln n over the visible scores, here without softcap, sinks and bias.
#[test]
fn lse_lies_between_the_maximum_and_ln_n_above_it() {
    for (name, problem, x, y) in examples() {
        if problem.scores.softcap.is_some() || problem.scores.sinks || x.contains_key("bias") {
            continue;
        }
        let mut rows = y["lse"].mapv(|_| (f64::NEG_INFINITY, 0f64));
        for [b, h, i, j] in allowed(&problem.scores) {
            let (q, k) = (
                x["q"].slice_each_axis(|a| at(a.axis, &[b, h, i])),
                x["k"].slice_each_axis(|a| at(a.axis, &[b, h / problem.scores.group(), j])),
            );
            let s = problem.scores.scale() * q.iter().zip(&k).map(|(q, k)| q * k).sum::<f64>();
            let (max, n) = &mut rows[[b, h, i]];
            (*max, *n) = (f64::max(*max, s), *n + 1.0);
        }
        for (&(max, n), &lse) in rows.iter().zip(&y["lse"]) {
            let inside = max - TOLERANCE <= lse && lse <= max + n.ln() + TOLERANCE;
            assert!(inside || (n == 0.0 && lse == f64::NEG_INFINITY), "{name}: {max} {lse} {n}");
        }
    }
}

/// One place of the leading axes, all of the last.
fn at(axis: Axis, place: &[usize]) -> Slice {
    place.get(axis.0).map_or(Slice::from(..), |&x| Slice::from(x..x + 1))
}

#[test]
fn a_single_visible_key_is_returned_exactly() {
    let extents = crate::cases::extents([2, 2, 1, 5, 5, 3]);
    let problem = Attention::new(extents).mask(Mask::window(0, 0)).value_dim(4);
    let x = operands(&problem.clone().into(), Pass::Forward, 14);
    let y = forward(&problem, &x);
    for ((place, &o), e) in y["o"].indexed_iter().zip((0..4).cycle()) {
        assert_eq!(o, x["v"][[place[0], 0, place[2], e]]);
    }
    // And under a softcap that does not bind lse is the bias, with q = 0.
    let problem = problem.bias(1, 1).softcap(1.0);
    let mut x = operands(&problem.clone().into(), Pass::Forward, 15);
    x.get_mut("q").expect("q").fill(0.0);
    for (place, &lse) in forward(&problem, &x)["lse"].indexed_iter() {
        assert_eq!(lse, x["bias"][[0, 0, place[2], place[2]]]);
    }
}

#[test]
fn a_sink_is_one_more_logit_without_a_value() {
    for (name, problem, x, y) in examples() {
        let Some(sinks) = x.get("sinks") else { continue };
        let mut without = problem.clone();
        without.scores.sinks = false;
        let mut rest = x.clone();
        rest.remove("sinks");
        let bare = forward(&without, &rest);
        let real: Vec<_> = problem.scores.sequences();
        for (place, &lse) in y["lse"].indexed_iter() {
            let (bare_lse, sink) = (bare["lse"][&place], sinks[[place[1]]]);
            let within = real.iter().any(|s| {
                s.batch == place[0]
                    && (s.query_start..s.query_start + s.queries).contains(&place[2])
            });
            let max = bare_lse.max(sink);
            let expected = if within {
                max + ((bare_lse - max).exp() + (sink - max).exp()).ln()
            } else {
                f64::NEG_INFINITY
            };
            assert!(
                lse == expected || (lse - expected).abs() <= TOLERANCE,
                "{name}: {lse} {expected}"
            );
            let keep = if bare_lse.is_finite() { (bare_lse - lse).exp() } else { 0.0 };
            for e in 0..problem.value_dim {
                let o = [place[0], place[1], place[2], e];
                assert!((y["o"][o] - keep * bare["o"][o]).abs() <= TOLERANCE, "{name}");
            }
        }
    }
}

#[test]
fn a_softcap_bounds_the_scores_and_a_huge_one_is_none() {
    for (name, problem, x, y) in examples() {
        if problem.scores.softcap.is_none() && !problem.scores.sinks {
            // c tanh(s/c) = s (1 − s²/3c² …): 10⁻¹⁶ for |s| < 10.
            let found = forward(&problem.clone().softcap(1e9), &x);
            found
                .iter()
                .for_each(|(result, found)| assert_close(found, &y[result], TOLERANCE, &name));
        }
    }
    let problem = Attention::new(crate::cases::extents([1, 1, 1, 4, 1, 2])).softcap(0.5);
    let mut x = operands(&problem.clone().into(), Pass::Forward, 16);
    x.get_mut("q").expect("q").mapv_inplace(|q| 1e3 * q);
    // With one key lse is the score itself.
    assert!(forward(&problem, &x)["lse"].iter().all(|lse| lse.abs() <= 0.5));
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
        for pass in Pass::ALL {
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
            alone.scores.bias =
                problem.scores.bias.map(|bias| etalon_problem::BiasExtents { batch: 1, ..bias });
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

/// Further elements that are 0 change nothing.
#[test]
fn padding_with_zeros_changes_nothing() {
    for (name, problem, x, y) in examples() {
        let mut padded = problem.clone().softmax_scale(problem.scores.scale());
        padded.scores.extents.dim += 3;
        padded.value_dim += 2;
        let mut changed = x.clone();
        for (operand, more) in [("q", 3), ("k", 3), ("v", 2)] {
            let tensor = changed.get_mut(operand).expect(operand);
            let mut shape = tensor.shape().to_vec();
            shape[3] = more;
            *tensor =
                concatenate(Axis(3), &[tensor.view(), ArrayD::zeros(shape).view()]).expect(operand);
        }
        let found = forward(&padded, &changed);
        // The sum of a dot product may take another order with another number of elements.
        assert_close(&found["lse"], &y["lse"], TOLERANCE, &name);
        let (kept, zeros) = found["o"].view().split_at(Axis(3), problem.value_dim);
        assert_close(&kept.to_owned(), &y["o"], TOLERANCE, &name);
        assert!(zeros.iter().all(|&o| o == 0.0), "{name}");
    }
}

/// Attention without values: all passes of attention_lse are those of attention with dout = 0.
#[test]
fn attention_lse_is_attention_without_values() {
    for (name, problem) in attention_problems() {
        let lse: Problem = AttentionLse { scores: problem.scores.clone() }.into();
        let attention: Problem = problem.into();
        for pass in Pass::ALL {
            let mut x = operands(&attention, pass, 18);
            for operand in ["dout", "ddv", "cot_o"] {
                x.entry(operand.to_string()).and_modify(|x| x.fill(0.0));
            }
            let expected = run(&attention, pass, &x).expect(&name);
            for (result, found) in run(&lse, pass, &x).expect(&name) {
                assert_same(&found, &expected[&result], &format!("{name}: {result}"));
            }
        }
    }
}
