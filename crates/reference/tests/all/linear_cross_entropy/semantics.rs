//! Ignored tokens, nothing left to average, and numbers that are not finite.

use super::cases::{EVERY_OUTPUT, cases, everything, small};
use super::tensors::{Operands, PASSES, assert_close, operands, run};
use crate::common::tensors::assert_announced;
use etalon_problem::{Error, LinearCrossEntropy, NothingLeft, Pass, Reduction};
use ndarray::{Axis, arr1};

/// Operands and results that belong to tokens lie as h does.
fn by_token(name: &str) -> bool {
    name == "token_weights"
        || !(name.ends_with(['w', 's']) || name == "normaliser") && name != "n_valid"
        || ["loss", "dloss", "gdloss", "cot_loss"].contains(&name)
}

/// No result depends on the row of an ignored token; and its own results are 0 (argmax: −1). The
/// other results have the bits of a problem without it.
#[test]
fn an_ignored_token_is_absent() {
    for (name, problem) in cases() {
        let fewer = |pass| {
            let x = operands(&problem, pass, 61);
            let kept: Vec<usize> =
                (0..problem.tokens).filter(|&i| x.targets[i] != problem.ignore_index).collect();
            let mut part = x.clone();
            for (name, x) in &mut part.floats {
                if by_token(name) && x.ndim() > 0 {
                    *x = x.select(Axis(0), &kept);
                }
            }
            part.targets = x.targets.select(Axis(0), &kept);
            let problem = LinearCrossEntropy { tokens: kept.len(), ..problem.clone() };
            (run(&problem, pass, &part).expect(name), kept)
        };
        for pass in PASSES {
            let clean = operands(&problem, pass, 61);
            let expected = run(&problem, pass, &clean).expect(name);
            for poison in [f64::NAN, f64::INFINITY] {
                let mut x = clean.clone();
                for (operand, tensor) in &mut x.floats {
                    for (i, _) in
                        clean.targets.iter().enumerate().filter(|x| *x.1 == problem.ignore_index)
                    {
                        if by_token(operand) && tensor.ndim() > 0 {
                            tensor.index_axis_mut(Axis(0), i).fill(poison);
                        }
                    }
                }
                assert_close(&run(&problem, pass, &x).expect(name), &expected, 0.0, name);
            }
            let (without, kept) = fewer(pass);
            for (result, all) in &expected {
                if !by_token(result) || all.ndim() == 0 {
                    assert_eq!(all, &without[result], "{name}: {result}");
                    continue;
                }
                assert_eq!(all.select(Axis(0), &kept), without[result], "{name}: {result}");
                let nothing = if result == "argmax" { -1.0 } else { 0.0 };
                for i in (0..problem.tokens).filter(|i| !kept.contains(i)) {
                    let row = all.index_axis(Axis(0), i);
                    assert!(row.iter().all(|&y| y == nothing), "{name}: {result} of {i}");
                }
            }
        }
    }
}

fn all_ignored(problem: &LinearCrossEntropy, pass: Pass) -> Operands<f64> {
    let mut x = operands(problem, pass, 62);
    x.targets.fill(problem.ignore_index);
    x
}

/// Weights whose Z is exactly 0, though tokens count.
fn cancelling(problem: &LinearCrossEntropy, pass: Pass) -> Operands<f64> {
    let mut x = operands(problem, pass, 62);
    x.targets.assign(&arr1(&[0, 1, -100, 0, -100, 1]));
    let weights = arr1(&[1.0, -0.5, 9.0, -1.5, 9.0, 1.0]).into_dyn();
    x.floats.insert("token_weights".to_string(), weights);
    x.floats.insert("class_weights".to_string(), arr1(&[1.0, 1.0, 5.0, 5.0, 5.0]).into_dyn());
    x
}

#[test]
fn nothing_left_to_average() {
    for policy in [NothingLeft::Zero, NothingLeft::Nan] {
        let problem = everything().nothing_left(policy);
        for operands in [all_ignored, cancelling] {
            let y = run(&problem, Pass::Forward, &operands(&problem, Pass::Forward)).expect("y");
            assert_eq!(y["normaliser"][[]], 0.0);
            let loss = y["loss"][[]];
            assert!(if policy == NothingLeft::Zero { loss == 0.0 } else { loss.is_nan() });
            assert!(y["lse"].iter().chain(&y["entropy"]).all(|y| y.is_finite()));

            // Gradients through the loss alone.
            let mut x = operands(&problem, Pass::Backward);
            x.floats.retain(|name, _| !["dlse", "dlogprob", "dentropy"].contains(&name.as_str()));
            let y = run(&problem, Pass::Backward, &x).expect("gradients");
            let counted = x.targets.iter().any(|&y| y != problem.ignore_index);
            let nan = policy == NothingLeft::Nan && counted;
            let as_said = |y: f64| if nan { y.is_nan() } else { y == 0.0 };
            assert!(y["dw"].iter().chain(&y["dbias"]).all(|&y| as_said(y)), "{policy:?}");
            for (dh, &target) in y["dh"].axis_iter(Axis(0)).zip(&x.targets) {
                let ignored = target == problem.ignore_index;
                assert!(dh.iter().all(|&y| if ignored { y == 0.0 } else { as_said(y) }));
            }
            let x = operands(&problem, Pass::DoubleBackward);
            let second = run(&problem, Pass::DoubleBackward, &x).expect("second");
            let gdloss = second["gdloss"][[]];
            assert!(if policy == NothingLeft::Zero { gdloss == 0.0 } else { gdloss.is_nan() });
        }
    }
    // The other outputs keep their gradients.
    let problem = everything();
    let x = cancelling(&problem, Pass::Backward);
    let y = run(&problem, Pass::Backward, &x).expect("gradients");
    let mut without = x.clone();
    without.floats.remove("dloss");
    assert_eq!(run(&problem, Pass::Backward, &without), Ok(y.clone()));
    assert!(y["dbias"].iter().all(|&y| y != 0.0));
}

#[test]
fn nothing_left_may_be_an_error() {
    let problem = everything().nothing_left(NothingLeft::Error);
    for pass in PASSES {
        for operands in [all_ignored, cancelling] {
            let error = run(&problem, pass, &operands(&problem, pass)).expect_err("nothing left");
            assert!(matches!(error, Error::Value { name, .. } if name == "normaliser"));
        }
        assert!(run(&problem, pass, &operands(&problem, pass, 63)).is_ok());
        // Other reductions have a sum even of nothing.
        for reduction in [Reduction::Sum, Reduction::None, Reduction::By { normaliser: 2.0 }] {
            let problem = problem.clone().reduction(reduction);
            let y = run(&problem, pass, &all_ignored(&problem, pass)).expect("a sum");
            assert!(y.get("loss").is_none_or(|loss| loss.iter().all(|&y| y == 0.0)));
        }
    }
}

/// V classes, and one more with the bias −∞: the results are those of the other classes, its own gradients 0.
#[test]
fn a_logit_of_minus_infinity_weighs_nothing() {
    // Without smoothing: α/V would see one class more.
    let mut every = everything().label_smoothing(0.0);
    every.softcap = None; // it would make −∞ finite
    for problem in [every, small().bias(), small().bias().class_weights()] {
        let hidden = problem.vocab;
        let more = LinearCrossEntropy { vocab: hidden + 1, ..problem.clone() };
        for pass in PASSES {
            let wide = operands(&more, pass, 64);
            let mut x = wide.clone();
            x.floats.get_mut("bias").expect("bias")[[hidden]] = f64::NEG_INFINITY;
            if let Some(weights) = x.floats.get_mut("class_weights") {
                weights[[hidden]] = 0.0;
            }
            x.targets.iter_mut().filter(|y| **y == hidden as i64).for_each(|y| *y = 0);
            let mut narrow = x.clone();
            for (name, tensor) in &mut narrow.floats {
                if ["w", "bias", "class_weights", "ddw", "ddbias"].contains(&name.as_str()) {
                    tensor.slice_axis_inplace(Axis(0), (..hidden).into());
                }
            }
            let expected = run(&problem, pass, &narrow).expect("without it");
            for (result, found) in run(&more, pass, &x).expect("with it") {
                if ["dw", "dbias", "gw", "gbias"].contains(&result.as_str()) {
                    let (rest, own) = found.view().split_at(Axis(0), hidden);
                    assert_eq!(rest, expected[&result], "{result}");
                    assert!(own.iter().all(|&y| y == 0.0), "{result}");
                } else {
                    assert_eq!(found, expected[&result], "{result}");
                }
            }
        }
    }
}

/// A class without weight is not smoothed over, however unlikely; one with weight makes the loss
/// infinite, as an impossible target does; but not if that has no weight.
#[test]
fn impossible_classes_cost_what_they_weigh() {
    let problem = small().bias().class_weights().token_weights().reduction(Reduction::None);
    let mut x = operands(&problem, Pass::Backward, 65);
    x.targets.fill(1);
    x.floats.get_mut("class_weights").expect("weights").fill(1.0);
    x.floats.get_mut("token_weights").expect("weights").fill(1.0);
    x.floats.get_mut("bias").expect("bias")[[3]] = f64::NEG_INFINITY;
    let loss = |problem: &LinearCrossEntropy, x: &Operands<f64>| {
        run(problem, Pass::Forward, x).expect("forward")["loss"].clone()
    };
    let smooth = problem.clone().label_smoothing(0.1);
    assert!(loss(&problem, &x).iter().all(|y| y.is_finite()));
    assert!(loss(&smooth, &x).iter().all(|&y| y == f64::INFINITY));
    x.floats.get_mut("class_weights").expect("weights")[[3]] = 0.0;
    assert!(loss(&smooth, &x).iter().all(|y| y.is_finite()));
    x.targets.fill(3);
    assert!(loss(&problem, &x).iter().all(|&y| y == 0.0));
    x.floats.get_mut("class_weights").expect("weights")[[3]] = 1.0;
    assert!(loss(&problem, &x).iter().all(|&y| y == f64::INFINITY));
    let all = problem.clone().label_smoothing(1.0);
    x.floats.get_mut("bias").expect("bias")[[3]] = 0.0;
    x.floats.get_mut("bias").expect("bias")[[2]] = f64::NEG_INFINITY;
    x.floats.get_mut("class_weights").expect("weights")[[2]] = 0.0;
    x.targets.fill(2);
    assert!(loss(&all, &x).iter().all(|y| y.is_finite()), "the target itself has no part in it");
    x.floats.get_mut("class_weights").expect("weights")[[2]] = 1.0;
    assert!(loss(&all, &x).iter().all(|&y| y == f64::INFINITY), "smoothing has, and no NaN");
    x.floats.get_mut("class_weights").expect("weights")[[2]] = 0.0;
    // The gradient of an impossible target is that of any other: the row keeps p − 1.
    let x = Operands { targets: x.targets, ..x };
    let y = run(&problem, Pass::Backward, &x).expect("backward");
    assert!(y["dh"].iter().all(|y| y.is_finite()));
    // A token without weight has no loss, even an infinite one.
    let mut x = x;
    x.floats.get_mut("class_weights").expect("weights").fill(1.0);
    x.floats.get_mut("token_weights").expect("weights").fill(0.0);
    assert!(loss(&problem, &x).iter().all(|&y| y == 0.0));
    // But NaN is no number that a weight of 0 would make 0.
    x.floats.get_mut("h").expect("h").fill(f64::NAN);
    assert!(loss(&problem, &x).iter().all(|y| y.is_nan()));
}

/// NaN and +∞ make NaN of their row, of every gradient that it adds to, and of nothing else.
#[test]
fn what_is_not_finite_shows() {
    let problem = small().bias().reduction(Reduction::None).outputs(EVERY_OUTPUT);
    let clean = operands(&problem, Pass::Backward, 66);
    let bad = 1;
    let expected = run(&problem, Pass::Forward, &clean).expect("forward");
    let gradients = run(&problem, Pass::Backward, &clean).expect("backward");
    for value in [f64::NAN, f64::INFINITY] {
        let mut x = clean.clone();
        x.floats.get_mut("h").expect("h")[[bad, 0]] = value;
        let y = run(&problem, Pass::Forward, &x).expect("forward");
        for name in ["loss", "lse", "logprob", "entropy"] {
            for (i, (&found, &expected)) in y[name].iter().zip(&expected[name]).enumerate() {
                assert!(if i == bad { found.is_nan() } else { found == expected }, "{name} of {i}");
            }
        }
        // The largest, which NaN is, the first of equals.
        let largest = match value.is_nan() {
            true => 0,
            false => x.floats["w"].column(0).iter().position(|&w| w > 0.0).expect("one"),
        };
        assert_eq!(y["argmax"][[bad]], largest as f64);
        let y = run(&problem, Pass::Backward, &x).expect("backward");
        assert!(y["dw"].iter().chain(&y["dbias"]).all(|y| y.is_nan()));
        for (i, row) in y["dh"].axis_iter(Axis(0)).enumerate() {
            let same = row == gradients["dh"].index_axis(Axis(0), i);
            assert!(if i == bad { row.iter().all(|y| y.is_nan()) } else { same });
        }
    }
}

trait Column {
    fn column(&self, j: usize) -> ndarray::ArrayView1<'_, f64>;
}

impl Column for ndarray::ArrayD<f64> {
    fn column(&self, j: usize) -> ndarray::ArrayView1<'_, f64> {
        self.index_axis(Axis(1), j).into_dimensionality().expect("a matrix")
    }
}

/// No class is possible: there are no probabilities.
#[test]
fn a_row_of_minus_infinity() {
    for alpha in [0.0, 0.5, 1.0] {
        let problem = small().bias().label_smoothing(alpha);
        let mut x = operands(&problem, Pass::Backward, 67);
        x.floats.get_mut("bias").expect("bias").fill(f64::NEG_INFINITY);
        let y = run(&problem, Pass::Forward, &x).expect("forward");
        assert!(y["loss"][[]].is_nan());
        for (i, &target) in x.targets.iter().enumerate() {
            let counted = target != problem.ignore_index;
            assert_eq!(y["lse"][[i]], if counted { f64::NEG_INFINITY } else { 0.0 });
            assert_eq!(y["logprob"][[i]].is_nan(), counted);
            assert_eq!(y["entropy"][[i]].is_nan(), counted);
            assert_eq!(y["argmax"][[i]], if counted { 0.0 } else { -1.0 });
        }
        let y = run(&problem, Pass::Backward, &x).expect("backward");
        assert!(y["dw"].iter().chain(&y["dbias"]).all(|y| y.is_nan()));
    }
}

/// Every result that the problem announces comes, in its shape, and no other.
#[test]
fn results_are_those_that_the_problem_announces() {
    for (name, problem) in cases() {
        for pass in PASSES {
            let y = run(&problem, pass, &operands(&problem, pass, 68)).expect(name);
            assert_announced(problem.operands(pass), &y, &format!("{name}: {pass}"));
        }
    }
}

/// n counts tokens, whatever their weights; Z is what the reduction says.
#[test]
fn the_normaliser_is_returned() {
    let problem = everything();
    let x = operands(&problem, Pass::Forward, 69);
    let (kappa, weights) = (&x.floats["token_weights"], &x.floats["class_weights"]);
    let counted = x.targets.iter().enumerate().filter(|(_, y)| **y != problem.ignore_index);
    let z: f64 = counted.map(|(i, &y)| kappa[[i]] * weights[[y as usize]]).sum();
    for (reduction, z) in [
        (Reduction::Mean, z),
        (Reduction::Sum, 1.0),
        (Reduction::None, 1.0),
        (Reduction::By { normaliser: -3.0 }, -3.0),
    ] {
        let y = run(&problem.clone().reduction(reduction), Pass::Forward, &x).expect("forward");
        assert!((y["normaliser"][[]] - z).abs() <= 1e-15 * z.abs());
        assert_eq!(y["n_valid"][[]], 5.0); // of six tokens every fourth is ignored
    }
}
