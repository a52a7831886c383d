//! Identities of the forward pass that need no second implementation.

use super::cases::{PASSES, attention_problems};
use super::tensors::{Tensors, assert_close, assert_same, operands, run};
use super::visible::{TOLERANCE, allowed, weights};
use etalon_problem::{Attention, AttentionLse, Mask, Pass, Problem};
use ndarray::{ArrayD, Axis, Slice, concatenate};

pub fn forward(problem: &Attention, x: &Tensors<f64>) -> Tensors<f64> {
    run(&problem.clone().into(), Pass::Forward, x).expect("the forward pass")
}

/// Every problem of attention with its operands and outputs.
pub fn examples() -> impl Iterator<Item = (String, Attention, Tensors<f64>, Tensors<f64>)> {
    attention_problems().into_iter().map(|(name, problem)| {
        let x = operands(&problem.clone().into(), Pass::Backward, 11);
        let y = forward(&problem, &x);
        (name, problem, x, y)
    })
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
    let extents = super::cases::extents([2, 2, 1, 5, 5, 3]);
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
    let problem = Attention::new(super::cases::extents([1, 1, 1, 4, 1, 2])).softcap(0.5);
    let mut x = operands(&problem.clone().into(), Pass::Forward, 16);
    x.get_mut("q").expect("q").mapv_inplace(|q| 1e3 * q);
    // With one key lse is the score itself.
    assert!(forward(&problem, &x)["lse"].iter().all(|lse| lse.abs() <= 0.5));
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
        for pass in PASSES {
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
