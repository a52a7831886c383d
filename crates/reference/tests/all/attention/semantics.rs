//! Operands that are not visible do not exist; visible ones that are not finite show.

use super::cases::{Case, PASSES, attention_problems, cases, extents};
use super::tensors::{Random, Tensors, assert_same, operands, run};
use super::visible::{allowed, seeing};
use crate::common::tensors::assert_announced;
use etalon_problem::{Attention, Mask, Pass, Problem};
use ndarray::{ArrayD, Axis};

/// Layout of an operand or result: as q, as k, as the bias, or by head alone.
#[derive(PartialEq)]
enum Layout {
    Query,
    Key,
    Bias,
    Head,
}

fn layout(name: &str) -> Layout {
    match name {
        _ if name.ends_with("sinks") => Layout::Head,
        _ if name.ends_with("bias") => Layout::Bias,
        _ if name.ends_with(['k', 'v']) => Layout::Key,
        _ => Layout::Query,
    }
}

fn fill(tensor: &mut ArrayD<f64>, place: &[usize], value: f64) {
    let mut view = tensor.view_mut();
    for &index in place {
        view = view.index_axis_move(Axis(0), index);
    }
    view.fill(value);
}

/// Every operand of a query or key that nothing sees may hold NaN or ∞: no result notices, and
/// the row's own results are those of a row that sees nothing. Covers padding, masked keys and
/// dead rows.
#[test]
fn what_nothing_sees_may_hold_anything() {
    for Case { name, problem } in cases() {
        let scores = problem.scores().expect("scores");
        let (pairs, group) = (allowed(scores), scores.group());
        let rows = seeing(scores);
        let mut keys = ArrayD::from_elem(scores.k_shape()[..3].to_vec(), false);
        pairs.iter().for_each(|&[b, h, _, j]| keys[[b, h / group, j]] = true);
        for pass in PASSES {
            let clean = operands(&problem, pass, 41);
            let expected = run(&problem, pass, &clean).expect(&name);
            for poison in [f64::NAN, f64::INFINITY] {
                let mut x = clean.clone();
                for (operand, tensor) in &mut x {
                    match layout(operand) {
                        // A row with a sink still hands dlse and cot_lse to it.
                        Layout::Query if scores.sinks && operand.ends_with("lse") => {}
                        Layout::Query => {
                            rows.indexed_iter().filter(|(_, seen)| **seen == 0.0).for_each(
                                |(place, _)| fill(tensor, &[place[0], place[1], place[2]], poison),
                            )
                        }
                        Layout::Key => keys.indexed_iter().filter(|(_, seen)| !**seen).for_each(
                            |(place, _)| fill(tensor, &[place[0], place[1], place[2]], poison),
                        ),
                        Layout::Bias | Layout::Head => {}
                    }
                }
                for (result, found) in run(&problem, pass, &x).expect(&name) {
                    assert_same(&found, &expected[&result], &format!("{name}: {result}"));
                }
            }
        }
    }
}

/// The bias of a pair that is not allowed is never read, and its gradient is 0.
#[test]
fn the_bias_of_a_forbidden_pair_is_not_read() {
    for Case { name, problem } in cases() {
        let Some(bias) = problem.scores().expect("scores").bias else { continue };
        let place = |&[b, h, i, j]: &[usize; 4]| {
            [if bias.batch == 1 { 0 } else { b }, if bias.heads == 1 { 0 } else { h }, i, j]
        };
        let read: Vec<_> = allowed(problem.scores().expect("scores")).iter().map(place).collect();
        for pass in PASSES {
            let clean = operands(&problem, pass, 42);
            let mut x = clean.clone();
            for (operand, tensor) in &mut x {
                if layout(operand) == Layout::Bias {
                    for (place, element) in tensor.indexed_iter_mut() {
                        if !read.contains(&[place[0], place[1], place[2], place[3]]) {
                            *element = f64::NAN;
                        }
                    }
                }
            }
            let expected = run(&problem, pass, &clean).expect(&name);
            for (result, found) in run(&problem, pass, &x).expect(&name) {
                assert_same(&found, &expected[&result], &format!("{name}: {result}"));
                if layout(&result) == Layout::Bias {
                    for (place, &gradient) in found.indexed_iter() {
                        let unread = !read.contains(&[place[0], place[1], place[2], place[3]]);
                        assert!(gradient == 0.0 || !unread, "{name}: {result} at {place:?}");
                    }
                }
            }
        }
    }
}

/// NaN in one key reaches the rows that see it and no other; NaN in one query reaches the keys
/// that it sees and no other.
#[test]
fn nan_reaches_exactly_what_sees_it() {
    for Case { name, problem } in cases() {
        let scores = problem.scores().expect("scores");
        let (pairs, group) = (allowed(scores), scores.group());
        if pairs.is_empty() {
            continue;
        }
        let [b, h, i, j] = pairs[Random(43).below(pairs.len())];
        for pass in PASSES {
            let clean = operands(&problem, pass, 44);
            let expected = run(&problem, pass, &clean).expect(&name);
            for by_key in [true, false] {
                let mut x = clean.clone();
                let (operand, place) =
                    if by_key { ("k", [b, h / group, j]) } else { ("q", [b, h, i]) };
                fill(x.get_mut(operand).expect(operand), &place, f64::NAN);
                // The rows that the poisoned scores make NaN, and the keys that these rows see.
                let struck = |&&[pb, ph, pi, pj]: &&[usize; 4]| {
                    pb == b
                        && if by_key {
                            ph / group == h / group && pj == j
                        } else {
                            ph == h && pi == i
                        }
                };
                let rows: Vec<_> =
                    pairs.iter().filter(struck).map(|p| [p[0], p[1], p[2]]).collect();
                let sees = |p: &&[usize; 4]| rows.contains(&[p[0], p[1], p[2]]);
                let keys: Vec<_> =
                    pairs.iter().filter(sees).map(|p| [p[0], p[1] / group, p[3]]).collect();
                let found = run(&problem, pass, &x).expect(&name);
                for (result, found) in &found {
                    let reached = match layout(result) {
                        Layout::Query => &rows,
                        Layout::Key => &keys,
                        Layout::Bias | Layout::Head => continue,
                    };
                    for ((place, &found), &expected) in found.indexed_iter().zip(&expected[result])
                    {
                        let hit = reached.contains(&[place[0], place[1], place[2]]);
                        let right = if hit { found.is_nan() } else { found == expected };
                        assert!(right, "{name}: {result} at {place:?} is {found}");
                    }
                }
            }
        }
    }
}

fn forward(problem: &Attention, x: &Tensors<f64>) -> Tensors<f64> {
    run(&problem.clone().into(), Pass::Forward, x).expect("the forward pass")
}

/// o = 0; lse = −∞, or the sink, whose gradient is dlse.
#[test]
fn a_row_that_sees_nothing() {
    let nothing = Attention::new(extents([2, 2, 1, 3, 4, 2])).mask(Mask::Or(Vec::new()));
    let x = operands(&nothing.clone().into(), Pass::Forward, 45);
    let y = forward(&nothing, &x);
    assert!(y["o"].iter().all(|&o| o == 0.0));
    assert!(y["lse"].iter().all(|&lse| lse == f64::NEG_INFINITY));

    let nothing: Problem = nothing.sinks().into();
    let x = operands(&nothing, Pass::DoubleBackward, 46);
    let y = run(&nothing, Pass::Forward, &x).expect("forward");
    assert!(y["o"].iter().all(|&o| o == 0.0));
    for (place, &lse) in y["lse"].indexed_iter() {
        assert_eq!(lse, x["sinks"][[place[1]]]);
    }
    let y = run(&nothing, Pass::Backward, &x).expect("backward");
    let dlse = x["dlse"].sum_axis(Axis(2)).sum_axis(Axis(0));
    super::tensors::assert_close(&y["dsinks"], &dlse, 1e-15, "dsinks");
    let y = run(&nothing, Pass::DoubleBackward, &x).expect("double backward");
    for (place, &gdlse) in y["gdlse"].indexed_iter() {
        assert_eq!(gdlse, x["ddsinks"][[place[1]]]);
    }
    let cot_lse = x["cot_lse"].sum_axis(Axis(2)).sum_axis(Axis(0));
    super::tensors::assert_close(&y["gsinks"], &cot_lse, 1e-15, "gsinks");

    // Its o is 0 and stays 0, even where its lse moves without bound.
    for (pass, direction, result) in
        [(Pass::DoubleBackward, "ddsinks", "gdout"), (Pass::Jvp, "tsinks", "to")]
    {
        let mut x = operands(&nothing, pass, 46);
        x.get_mut(direction).expect(direction).fill(f64::INFINITY);
        let y = run(&nothing, pass, &x).expect(result);
        assert!(y[result].iter().all(|&y| y == 0.0), "{result}: {}", y[result]);
    }
}

/// A row of no sequence: o = 0 and lse = −∞, with a sink too; its gradients are 0.
#[test]
fn padding_is_written_as_nothing() {
    for Case { name, problem } in cases() {
        let scores = problem.scores().expect("scores");
        let mut within = ArrayD::from_elem(scores.row_shape().to_vec(), false);
        for s in scores.sequences() {
            let mut element = within.index_axis_mut(Axis(0), s.batch);
            element
                .slice_axis_mut(Axis(1), (s.query_start..s.query_start + s.queries).into())
                .fill(true);
        }
        for pass in PASSES {
            let x = operands(&problem, pass, 47);
            for (result, found) in run(&problem, pass, &x).expect(&name) {
                let nothing = if result == "lse" { f64::NEG_INFINITY } else { 0.0 };
                if layout(&result) == Layout::Query {
                    for (place, &y) in found.indexed_iter() {
                        let inside = within[[place[0], place[1], place[2]]];
                        assert!(inside || y == nothing, "{name}: {result} at {place:?} is {y}");
                    }
                }
            }
        }
    }
}

/// A score of −∞ is no pair at all, wherever the −∞ comes from, and whatever else the key holds.
#[test]
fn a_score_of_minus_infinity_is_no_pair() {
    let problem = Attention::new(extents([1, 1, 1, 3, 4, 2])).sinks();
    let hidden = Mask::Array(etalon_problem::NamedArray::new(
        "allowed",
        &[1, 1, 3, 4],
        [true, true, false, true].repeat(3),
    ));
    for pass in PASSES {
        let mut x = operands(&problem.clone().into(), pass, 48);
        let q = x.get_mut("q").expect("q");
        q.mapv_inplace(f64::abs); // so that its product with −∞ is −∞
        for operand in ["k", "v"] {
            fill(x.get_mut(operand).expect(operand), &[0, 0, 2], f64::NEG_INFINITY);
        }
        let expected = run(&problem.clone().mask(hidden.clone()).into(), pass, &x).expect("masked");
        for (result, found) in run(&problem.clone().into(), pass, &x).expect("−∞") {
            assert_same(&found, &expected[&result], &result);
        }
    }
}

#[test]
fn infinite_scores_make_their_row_nan_unless_they_are_capped() {
    let problem = Attention::new(extents([1, 1, 1, 2, 3, 1]));
    let mut x = operands(&problem.clone().into(), Pass::Forward, 49);
    x.get_mut("q")
        .expect("q")
        .assign(&ndarray::arr1(&[1.0, 0.5]).into_shape_with_order((1, 1, 2, 1)).expect("q"));
    x.get_mut("k").expect("k")[[0, 0, 1, 0]] = f64::INFINITY;
    let y = forward(&problem, &x);
    assert!(y["o"].iter().chain(&y["lse"]).all(|y| y.is_nan()));
    let y = forward(&problem.clone().softcap(2.0), &x);
    assert!(y["o"].iter().chain(&y["lse"]).all(|y| y.is_finite()));

    // Without any other score too.
    let problem = problem.mask(Mask::window(0, 0));
    for value in [f64::NAN, f64::INFINITY] {
        x.get_mut("k").expect("k")[[0, 0, 1, 0]] = value;
        let y = forward(&problem, &x);
        assert!(y["lse"][[0, 0, 0]].is_nan() && y["o"][[0, 0, 0, 0]].is_nan());
        assert!(y["lse"][[0, 0, 1]].is_finite() && y["o"][[0, 0, 1, 0]].is_finite());
    }
}

#[test]
fn a_sink_of_minus_infinity_is_none_and_one_of_nan_shows() {
    for (name, problem) in attention_problems() {
        if !problem.scores.sinks {
            continue;
        }
        let mut without = problem.clone();
        without.scores.sinks = false;
        for pass in PASSES {
            let mut x = operands(&problem.clone().into(), pass, 50);
            let sinks = x.get_mut("sinks").expect("sinks");
            sinks.fill(f64::NEG_INFINITY);
            let found = run(&problem.clone().into(), pass, &x).expect(&name);
            let mut rest = x.clone();
            rest.retain(|operand, _| !operand.ends_with("sinks"));
            for (result, expected) in run(&without.clone().into(), pass, &rest).expect(&name) {
                assert_same(&found[&result], &expected, &format!("{name}: {result}"));
            }
            for sinks in ["dsinks", "gsinks"] {
                assert!(found.get(sinks).is_none_or(|y| y.iter().all(|&y| y == 0.0)), "{name}");
            }
            for value in [f64::NAN, f64::INFINITY] {
                x.get_mut("sinks").expect("sinks").fill(value);
                if pass == Pass::Forward {
                    let found = run(&problem.clone().into(), pass, &x).expect(&name);
                    let seen = seeing(&problem.scores);
                    for (lse, seen) in found["lse"].iter().zip(&seen) {
                        // A masked row has the sink, be it infinite, as its lse; padding has −∞.
                        let alone = *lse == value || *lse == f64::NEG_INFINITY;
                        assert!(lse.is_nan() || (*seen == 0.0 && alone), "{name}: {lse}");
                        let shows = value.is_nan() || *seen > 0.0;
                        assert!(shows || alone, "{name}: {lse} in a masked row");
                    }
                }
            }
        }
    }
}

/// Every result that the problem announces comes, in its shape, and no other.
#[test]
fn results_are_those_that_the_problem_announces() {
    for Case { name, problem } in cases() {
        for pass in PASSES {
            let y = run(&problem, pass, &operands(&problem, pass, 51)).expect(&name);
            assert_announced(problem.operands(pass), &y, &format!("{name}: {pass}"));
        }
    }
}
