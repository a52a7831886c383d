//! Identities that hold between results, whatever they are.

use super::cases::{EVERY_OUTPUT, cases, everything, small};
use super::tensors::{Operands, Sum, assert_close, assert_near, operands, run};
use etalon_problem::{LinearCrossEntropy, Pass, Reduction};
use ndarray::{Array1, Axis};

/// A few roundings of each term.
const TOLERANCE: f64 = 1e-14;

/// Equal logits: every class has the probability 1/V, exactly if V is a power of two.
#[test]
fn uniform_logits_lose_ln_v() {
    for vocab in [1, 2, 5, 256, 300, 1024] {
        let problem = LinearCrossEntropy { vocab, ..small() };
        let mut x = operands(&problem, Pass::Backward, 21);
        let row = x.floats["w"].index_axis(Axis(0), 0).to_owned();
        for mut w in x.floats.get_mut("w").expect("w").axis_iter_mut(Axis(0)) {
            w.assign(&row);
        }
        let y = run(&problem, Pass::Forward, &x).expect("forward");
        let expected = (vocab as f64).ln();
        assert!((y["loss"][[]] - expected).abs() <= 4.0 * f64::EPSILON * expected, "{vocab}");
        for (i, &target) in x.targets.iter().enumerate() {
            let counted = target != problem.ignore_index;
            let expected = if counted { expected } else { 0.0 };
            assert_eq!(y["entropy"][[i]], expected, "V = {vocab}");
            assert_eq!(y["logprob"][[i]], -expected, "V = {vocab}");
            assert_eq!(y["argmax"][[i]], if counted { 0.0 } else { -1.0 }, "the first of equals");
        }
    }
}

/// Probabilities sum to 1, whatever moves them: Σ_v dz = 0 without a cotangent that reaches lse
/// itself; with r = 1, Σ_v dw_v = 0 and Σ_v dbias_v = 0.
#[test]
fn gradients_by_the_logits_sum_to_zero() {
    let problem = small().bias().class_weights().token_weights().label_smoothing(0.2);
    for problem in [problem.clone(), LinearCrossEntropy { vocab: 600, ..problem }] {
        let mut x = operands(&problem, Pass::Backward, 22);
        x.floats.remove("dlse");
        let y = run(&problem, Pass::Backward, &x).expect("backward");
        for column in y["dw"].axis_iter(Axis(1)).chain([y["dbias"].view()]) {
            let mut sum = Sum::default();
            column.iter().for_each(|&x| sum.add(x));
            // With a cotangent of lse it is far from 0.
            assert!(sum.value.abs() <= TOLERANCE * sum.magnitude, "{sum:?}");
        }
        let with = operands(&problem, Pass::Backward, 22);
        let y = run(&problem, Pass::Backward, &with).expect("backward");
        let dlse = with.floats["dlse"].iter().zip(&x.targets);
        let counted: f64 = dlse.filter(|(_, y)| **y != problem.ignore_index).map(|x| x.0).sum();
        assert!((y["dbias"].sum() - counted).abs() < 1e-12, "{}", y["dbias"].sum());
    }
}

/// Without a bias the logits depend on h·w alone: <dh, h> = <dw, w>.
#[test]
fn h_and_w_are_interchangeable_in_scale() {
    for (name, problem) in cases() {
        let problem = LinearCrossEntropy { bias: false, ..problem };
        let x = operands(&problem, Pass::Backward, 23);
        let y = run(&problem, Pass::Backward, &x).expect(name);
        let (mut by_h, mut by_w) = (Sum::default(), Sum::default());
        by_h.add_product(y.get("dh"), x.floats.get("h"));
        by_w.add_product(y.get("dw"), x.floats.get("w"));
        by_h.assert_equals(&by_w, TOLERANCE, name);
    }
}

/// The same shift of every logit changes lse by itself and nothing else, however large.
#[test]
fn a_shift_of_all_logits_changes_lse_alone() {
    let problem = small().bias().class_weights().token_weights().label_smoothing(0.2);
    for shift in [1e4, -1e4] {
        let mut x = operands(&problem, Pass::Backward, 24);
        let h = x.floats.get_mut("h").expect("h");
        // Logits of few digits, so that the shift rounds none of them.
        h.mapv_inplace(|x| (x * 16.0).round() / 16.0);
        x.floats.get_mut("w").expect("w").mapv_inplace(|x| (x * 16.0).round() / 16.0);
        let bias = x.floats.get_mut("bias").expect("bias");
        bias.mapv_inplace(|x| (x * 256.0).round() / 256.0);
        let mut shifted = x.clone();
        shifted.floats.get_mut("bias").expect("bias").mapv_inplace(|b| b + shift);
        for pass in [Pass::Forward, Pass::Backward] {
            let mut expected = run(&problem, pass, &x).expect("here");
            let found = run(&problem, pass, &shifted).expect("there");
            if let Some(lse) = expected.get_mut("lse") {
                let counted = x.targets.iter().map(|&y| y != problem.ignore_index);
                lse.iter_mut().zip(counted).filter(|x| x.1).for_each(|(lse, _)| *lse += shift);
            }
            assert_close(&found, &expected, TOLERANCE, &format!("shifted by {shift}"));
        }
    }
}

/// Mean · Z = Sum, and Sum / n = By n, to the last roundings; None sums to Sum.
#[test]
fn reductions_are_related() {
    let problem = everything();
    let with = |reduction| {
        let problem = problem.clone().reduction(reduction);
        let x = operands(&problem, Pass::Forward, 25);
        run(&problem, Pass::Forward, &x).expect("forward")
    };
    // A z-loss that is divided by the number of tokens is no part of the relation.
    let plain = |mut problem: LinearCrossEntropy, reduction| {
        problem = problem.lse_square_scale(0.0).reduction(reduction);
        let x = operands(&problem, Pass::Forward, 25);
        run(&problem, Pass::Forward, &x).expect("forward")
    };
    let mean = plain(problem.clone(), Reduction::Mean);
    let sum = plain(problem.clone(), Reduction::Sum)["loss"][[]];
    let near = |x: f64, y: f64| assert!((x - y).abs() <= TOLERANCE * y.abs(), "{x} against {y}");
    near(mean["loss"][[]] * mean["normaliser"][[]], sum);
    let sum = with(Reduction::Sum)["loss"][[]];
    near(with(Reduction::By { normaliser: -7.0 })["loss"][[]] * -7.0, sum);
    near(with(Reduction::None)["loss"].sum(), sum);
}

/// PyTorch spreads α over all classes, Megatron α over the others.
#[test]
fn smoothing_over_others_is_smoothing() {
    let alpha = 0.3;
    for vocab in [1, 2, 5] {
        let problem = LinearCrossEntropy { vocab, ..small() }.reduction(Reduction::None);
        let x = operands(&problem, Pass::Forward, 26);
        let plain = run(&problem, Pass::Forward, &x).expect("plain");
        let over_others = problem.clone().label_smoothing_over_others(alpha);
        assert_eq!(over_others.check(), Ok(()));
        let found = run(&over_others, Pass::Forward, &x).expect("smooth");
        for (i, &target) in x.targets.iter().enumerate() {
            // 1 − α of the target's term and α/(V − 1) of each of the others'.
            let mut expected = 0.0;
            if target != problem.ignore_index {
                let mut losses = Array1::zeros(vocab);
                for class in 0..vocab {
                    let mut other = x.clone();
                    other.targets.fill(class as i64);
                    losses[class] = run(&problem, Pass::Forward, &other).expect("y")["loss"][[i]];
                }
                let own = plain["loss"][[i]];
                let others =
                    if vocab > 1 { (losses.sum() - own) / (vocab as f64 - 1.0) } else { own };
                expected = (1.0 - alpha) * own + alpha * others;
            }
            assert!((found["loss"][[i]] - expected).abs() <= 1e-14, "V = {vocab}");
        }
    }
}

/// Classes in another order: the same results, dw, dbias and argmax in that order.
#[test]
fn classes_have_no_order() {
    let problem = LinearCrossEntropy { vocab: 7, ..everything() };
    let x = operands(&problem, Pass::Backward, 27);
    let order = |v: usize| (3 * v + 2) % 7;
    let mut turned: Operands<f64> = x.clone();
    for name in ["w", "bias", "class_weights"] {
        let tensor = turned.floats.get_mut(name).expect(name);
        for v in 0..7 {
            tensor.index_axis_mut(Axis(0), order(v)).assign(&x.floats[name].index_axis(Axis(0), v));
        }
    }
    let turn = |y: i64| if y < 0 { y } else { order(y as usize) as i64 };
    turned.targets.mapv_inplace(turn);
    let (y, mut found) = (
        run(&problem, Pass::Forward, &x).expect("forward"),
        run(&problem, Pass::Forward, &turned).expect("turned"),
    );
    let expected = y["argmax"].mapv(|v| turn(v as i64) as f64);
    assert_eq!(found["argmax"], expected);
    found.insert("argmax".to_string(), y["argmax"].clone());
    assert_close(&found, &y, TOLERANCE, "forward");
    let y = run(&problem, Pass::Backward, &x).expect("backward");
    let found = run(&problem, Pass::Backward, &turned).expect("turned");
    assert_near(&found["dh"], &y["dh"], TOLERANCE, 0.0, "dh");
    for name in ["dw", "dbias"] {
        for v in 0..7 {
            let (found, expected) =
                (found[name].index_axis(Axis(0), order(v)), y[name].index_axis(Axis(0), v));
            assert_near(&found.to_owned(), &expected.to_owned(), 1e-13, 0.1, name);
        }
    }
}

/// p_y = 1 − 2⁻³⁰: the target's gradient −(1 − p_y) has all its digits but those that l lost.
#[test]
fn a_confident_token_keeps_its_gradient() {
    let problem = LinearCrossEntropy::new(1, 1, 2).bias().outputs(EVERY_OUTPUT);
    let mut x = operands(&problem, Pass::Backward, 28);
    x.floats.retain(|name, _| !["dlse", "dlogprob", "dentropy"].contains(&name.as_str()));
    x.floats.get_mut("h").expect("h").fill(0.0);
    x.floats.get_mut("dloss").expect("dloss").fill(1.0);
    // p_other / p_y = 2⁻³⁰ / (1 − 2⁻³⁰)
    let miss = 2f64.powi(-30);
    let odds = (miss / (1.0 - miss)).ln();
    x.floats.insert("bias".to_string(), ndarray::arr1(&[0.0, odds]).into_dyn());
    x.targets[0] = 0;
    let y = run(&problem, Pass::Backward, &x).expect("backward");
    // l = 1 + 2⁻³⁰ is rounded to 2⁻⁵³, which is 2⁻²³ of 1 − p.
    let error = (y["dbias"][[0]] + miss).abs();
    assert!(error <= 2f64.powi(-52), "{:e}", y["dbias"][[0]]);
    assert!((y["dbias"][[1]] - miss).abs() <= 2f64.powi(-52));
    let y = run(&problem, Pass::Forward, &x).expect("forward");
    assert!((y["loss"][[]] - miss).abs() <= 2f64.powi(-52));
}
