//! Pairs that are not visible do not exist, pairs that are not active have no value; visible operands that
//! are not finite show.

use super::cases::{cases, extents};
use super::naive;
use super::tensors::{PASSES, Tensors, assert_all_close, assert_same, operands, run};
use crate::common::tensors::assert_announced;
use etalon_problem::{LazyAttention, Mask, NamedArray, Pass};
use ndarray::{ArrayD, Axis, Dimension};

/// Fills the rows of `tensor` `[.., .., rows, ..]` at which `keep` is false.
fn spoil(tensor: &mut ArrayD<f64>, keep: &ArrayD<bool>, poison: f64) {
    for (place, _) in keep.indexed_iter().filter(|(_, keep)| !**keep) {
        let mut view = tensor.view_mut();
        for axis in [place[0], place[1], place[2]] {
            view = view.index_axis_move(Axis(0), axis);
        }
        view.fill(poison);
    }
}

/// Every operand of a query or key that nothing sees may hold NaN or ∞, and every value that
/// nothing attends to; so may the cotangent of o in a dead row. No result notices.
#[test]
fn what_nothing_sees_or_attends_to_may_hold_anything() {
    let mut spoilt = 0;
    for (name, problem) in cases() {
        let scores = &problem.scores;
        let clean = operands(&problem, Pass::DoubleBackward, 41);
        let none = |shape: &[usize]| ArrayD::from_elem(shape.to_vec(), false);
        let (mut seen_rows, mut live_rows) = (none(&scores.row_shape()), none(&scores.row_shape()));
        let (mut seen_keys, mut live_keys) =
            (none(&scores.k_shape()[..3]), none(&scores.k_shape()[..3]));
        for pair in naive::rows(&problem, &clean).into_iter().flat_map(|(_, row)| row) {
            let key = [pair.b, pair.kh, pair.j];
            (seen_rows[pair.row()], seen_keys[key]) = (true, true);
            if pair.is_active() {
                (live_rows[pair.row()], live_keys[key]) = (true, true);
            }
        }
        spoilt += live_rows.iter().zip(&seen_rows).filter(|(live, seen)| live != seen).count();
        spoilt += live_keys.iter().zip(&seen_keys).filter(|(live, seen)| live != seen).count();
        for pass in PASSES {
            let expected = run(&problem, pass, &clean).expect(name);
            for poison in [f64::NAN, f64::INFINITY] {
                let mut x = clean.clone();
                for (operand, tensor) in &mut x {
                    match operand.as_str() {
                        "q" | "ddq" | "dlse" | "cot_lse" => spoil(tensor, &seen_rows, poison),
                        "dout" | "cot_o" => spoil(tensor, &live_rows, poison),
                        "k" | "ddk" => spoil(tensor, &seen_keys, poison),
                        "v" | "ddv" => spoil(tensor, &live_keys, poison),
                        _ => {}
                    }
                }
                assert_all_close(&run(&problem, pass, &x).expect(name), &expected, 0.0, name);
            }
        }
    }
    assert!(spoilt > 20, "{spoilt} visible rows are dead, or keys without attention");
}

/// NaN in one key reaches the rows that see it and no other; NaN in a value the rows that attend
/// to it.
#[test]
fn nan_reaches_exactly_what_sees_it() {
    for (name, problem) in cases() {
        let clean = operands(&problem, Pass::Forward, 42);
        let rows = naive::rows(&problem, &clean);
        let pairs: Vec<_> = rows.iter().flat_map(|(_, row)| row).collect();
        let Some(struck) = pairs.get(pairs.len() / 2) else { continue };
        let expected = run(&problem, Pass::Forward, &clean).expect(name);
        for (operand, results) in [("k", ["o", "lse"].as_slice()), ("v", &["o"])] {
            let mut x = clean.clone();
            x.get_mut(operand).expect(operand)[[struck.b, struck.kh, struck.j, 0]] = f64::NAN;
            let found = run(&problem, Pass::Forward, &x).expect(name);
            // The rows that see the key, or attend to it.
            let reached = |pair: &&&naive::Pair| {
                let key = [pair.b, pair.kh, pair.j] == [struck.b, struck.kh, struck.j];
                key && (operand == "k" || pair.is_active())
            };
            let rows: Vec<_> = pairs.iter().filter(reached).map(|pair| pair.row()).collect();
            for &result in results {
                for ((place, &y), &expected) in found[result].indexed_iter().zip(&expected[result])
                {
                    let place = place.slice();
                    let element = operand == "k" || place[3] == 0;
                    let hit = element && rows.iter().any(|row| place[..3] == *row);
                    let right = if hit { y.is_nan() } else { y == expected };
                    assert!(right, "{name}: {result} at {place:?} is {y}");
                }
            }
        }
    }
}

/// A score of −∞, from its key or from the bias at its distance, is no pair at all: it does not
/// count in n, and what its key holds is not read.
#[test]
fn a_score_of_minus_infinity_is_no_pair() {
    let hidden: Vec<bool> = (0..36).map(|at| at % 6 <= at / 6 && at / 6 - at % 6 != 2).collect();
    let problem = LazyAttention::new(extents([1, 1, 1, 6, 6, 2])).bias(4);
    let masked =
        problem.clone().mask(Mask::Array(NamedArray::new("allowed", &[1, 1, 6, 6], hidden)));
    for pass in PASSES {
        let mut x = operands(&problem, pass, 43);
        let expected = run(&masked, pass, &x).expect("masked");
        x.get_mut("bias").expect("bias")[[0, 2]] = f64::NEG_INFINITY;
        assert_all_close(&run(&problem, pass, &x).expect("−∞"), &expected, 0.0, "by the bias");
    }

    let hidden: Vec<bool> = (0..36).map(|at| at % 6 <= at / 6 && at % 6 != 1).collect();
    let masked =
        problem.clone().mask(Mask::Array(NamedArray::new("allowed", &[1, 1, 6, 6], hidden)));
    for pass in PASSES {
        let mut x = operands(&problem, pass, 44);
        x.get_mut("q").expect("q").mapv_inplace(f64::abs); // so that its product with −∞ is −∞
        for operand in ["k", "v"] {
            let key = x.get_mut(operand).expect(operand);
            key.slice_axis_mut(Axis(2), (1..2).into()).fill(f64::NEG_INFINITY);
        }
        let expected = run(&masked, pass, &x).expect("masked");
        assert_all_close(&run(&problem, pass, &x).expect("−∞"), &expected, 0.0, "by the key");
    }
}

/// Infinite and NaN τ; a NaN where no pair lies is not read.
#[test]
fn tau_and_bias_that_are_not_finite() {
    let problem = LazyAttention::new(extents([2, 2, 1, 5, 4, 2])).bias(9);
    let rows_that_see = |place: &[usize]| place[2] > 0; // the last four queries of five see a key
    let mut x = operands(&problem, Pass::Backward, 45);
    let set = |x: &mut Tensors<f64>, tau: f64| x.get_mut("tau").expect("tau").fill(tau);

    set(&mut x, f64::NEG_INFINITY);
    assert!(run(&problem, Pass::Forward, &x).expect("−∞")["o"].iter().all(|&o| o == 0.0));
    let d = run(&problem, Pass::Backward, &x).expect("−∞");
    assert!(d.values().flatten().all(|d| d.is_finite()));
    assert!(d["dtau"].iter().all(|&d| d == 0.0));

    for tau in [f64::NAN, f64::INFINITY] {
        set(&mut x, tau);
        for (place, o) in run(&problem, Pass::Forward, &x).expect("τ")["o"].indexed_iter() {
            assert_eq!(!o.is_finite(), rows_that_see(place.slice()), "τ = {tau} at {place:?}");
        }
    }
    set(&mut x, f64::NAN);
    let y = run(&problem, Pass::Forward, &x).expect("NaN");
    assert!(y["o"].iter().any(|o| o.is_nan()));

    // Distances of 4 and more do not occur with four keys.
    set(&mut x, -0.9);
    let expected = run(&problem, Pass::Backward, &x).expect("finite");
    x.get_mut("bias").expect("bias").slice_axis_mut(Axis(1), (4..).into()).fill(f64::NAN);
    let found = run(&problem, Pass::Backward, &x).expect("NaN");
    assert_all_close(&found, &expected, 0.0, "distances that do not occur");

    // A score of NaN or +∞ makes its row NaN, also under a τ that filters all.
    set(&mut x, -100.0);
    for score in [f64::NAN, f64::INFINITY] {
        x.get_mut("bias").expect("bias").fill(0.0);
        x.get_mut("bias").expect("bias")[[0, 3]] = score;
        let y = run(&problem, Pass::Forward, &x).expect("NaN");
        for (place, o) in y["o"].indexed_iter() {
            // The last query of head 0 is three away from the first key.
            let hit = place[1] == 0 && place[2] == 4;
            assert_eq!(o.is_nan(), hit, "{score} at {place:?}");
            assert_eq!(y["lse"][[place[0], place[1], place[2]]].is_nan(), hit);
        }
    }
}

/// Rows that see nothing and rows of no sequence: o = 0, lse = −∞ and gradients of 0.
#[test]
fn rows_that_see_nothing_are_written_as_nothing() {
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::DoubleBackward, 46);
        let mut seeing = ArrayD::from_elem(problem.scores.row_shape().to_vec(), false);
        for (_, row) in naive::rows(&problem, &x) {
            seeing[row[0].row()] = true;
        }
        for pass in PASSES {
            let y = run(&problem, pass, &x).expect(name);
            for result in ["o", "lse", "dq", "gq", "gdout", "gdlse"] {
                let Some(y) = y.get(result) else { continue };
                let nothing = if result == "lse" { f64::NEG_INFINITY } else { 0.0 };
                for (place, &y) in y.indexed_iter() {
                    let sees = seeing[[place[0], place[1], place[2]]];
                    assert!(sees || y == nothing, "{name}: {result} at {place:?} is {y}");
                    assert!(!sees || y != f64::NEG_INFINITY, "{name}: {result} at {place:?}");
                }
            }
        }
    }
}

/// Every result that the problem announces comes, in its shape, and no other.
#[test]
fn results_are_those_that_the_problem_announces() {
    for (name, problem) in cases() {
        for pass in PASSES {
            let y = run(&problem, pass, &operands(&problem, pass, 47)).expect(name);
            assert_announced(problem.operands(pass), &y, &format!("{name}: {pass}"));
        }
    }
}

/// Nothing leaks from later keys into earlier rows, also for τ > 0, which raises every weight.
#[test]
fn later_keys_do_not_reach_earlier_rows() {
    let problem = LazyAttention::new(extents([1, 6, 2, 6, 6, 3])).bias(4);
    let x = operands(&problem, Pass::Forward, 48);
    let y = run(&problem, Pass::Forward, &x).expect("forward");
    let mut changed = x.clone();
    for operand in ["k", "v"] {
        let later = changed.get_mut(operand).expect(operand);
        later.slice_axis_mut(Axis(2), (4..).into()).fill(1e3);
    }
    let found = run(&problem, Pass::Forward, &changed).expect("forward");
    for result in ["o", "lse"] {
        let early = |y: &Tensors<f64>| y[result].slice_axis(Axis(2), (..4).into()).to_owned();
        assert_same(&early(&found), &early(&y), result);
    }
}
