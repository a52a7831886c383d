//! Every error in a request is reported; nothing panics.

use super::cases::{cases, everything, small};
use super::tensors::{PASSES, operands, run};
use etalon_problem::{Error, LinearCrossEntropy, Pass, Reduction, Role};
use etalon_reference::linear_cross_entropy::{Cotangents, Inputs, Wanted, backward, forward};
use ndarray::{Array1, Array2, ArrayD, IxDyn};

#[test]
fn a_wrong_shape_is_named() {
    for (name, problem) in cases() {
        for pass in PASSES {
            let x = operands(&problem, pass, 71);
            for (operand, tensor) in &x.floats {
                for axis in 0..tensor.ndim() {
                    let mut shape = tensor.shape().to_vec();
                    shape[axis] += 1;
                    let mut changed = x.clone();
                    changed.floats.insert(operand.clone(), ArrayD::zeros(IxDyn(&shape)));
                    let expected = Error::Shape {
                        operand: operand.clone(),
                        expected: tensor.shape().to_vec(),
                        found: shape,
                    };
                    assert_eq!(run(&problem, pass, &changed), Err(expected), "{name}");
                }
            }
            let mut changed = x.clone();
            changed.targets = Array1::zeros(problem.tokens + 1);
            let error = run(&problem, pass, &changed);
            assert!(matches!(error, Err(Error::Shape { operand, .. }) if operand == "targets"));
        }
    }
    // One loss per token in place of one, and the reverse.
    for (reduction, shape) in [(Reduction::Mean, vec![6]), (Reduction::None, vec![])] {
        let problem = small().reduction(reduction);
        let mut x = operands(&problem, Pass::Backward, 71);
        x.floats.insert("dloss".to_string(), ArrayD::zeros(IxDyn(&shape)));
        let error = run(&problem, Pass::Backward, &x);
        assert!(matches!(error, Err(Error::Shape { operand, .. }) if operand == "dloss"));
    }
}

#[test]
fn options_and_operands_must_agree() {
    let bare = LinearCrossEntropy::new(6, 3, 5);
    for pass in PASSES {
        let all = operands(&everything(), pass, 72);
        for operand in everything().operands(pass) {
            if operand.role == Role::Output || ["h", "w", "targets"].contains(&operand.name) {
                continue;
            }
            let option = match operand.name {
                name @ ("class_weights" | "token_weights") => name,
                name if name.ends_with("bias") => "bias",
                name if name.ends_with("lse") => "outputs.lse",
                name if name.ends_with("logprob") => "outputs.logprob",
                name if name.ends_with("entropy") => "outputs.entropy",
                _ => continue, // the loss is always there
            };
            // The option is set; without its input the pass cannot run.
            let mut without = all.clone();
            without.floats.remove(operand.name);
            let found = run(&everything(), pass, &without);
            let reason = format!("the problem sets `{option}`");
            if operand.role == Role::Input {
                let expected = Error::Missing { operand: operand.name.to_string(), reason };
                assert_eq!(found, Err(expected));
            } else {
                assert!(found.is_ok());
            }
            // The option is not set; its operand has no place.
            let mut with = operands(&bare, pass, 72);
            let tensor = all.floats[operand.name].clone();
            with.floats.insert(operand.name.to_string(), tensor);
            let reason = format!("the problem does not set `{option}`");
            let expected = Error::Unexpected { operand: operand.name.to_string(), reason };
            assert_eq!(run(&bare, pass, &with), Err(expected));
        }
    }
}

#[test]
fn a_target_that_is_no_class_is_named() {
    for problem in [small(), small().ignore_index(2)] {
        for target in [5, -1, -101, 1 << 31, i64::MAX, i64::MIN] {
            for pass in PASSES {
                let mut x = operands(&problem, pass, 73);
                x.targets[4] = target;
                let expected = format!("a class below 5 or the ignored {}", problem.ignore_index);
                let expected = Error::value("targets[4]", expected, target);
                assert_eq!(run(&problem, pass, &x), Err(expected));
            }
        }
    }
}

#[test]
fn a_problem_outside_its_domain_is_refused() {
    let x = operands(&everything(), Pass::DoubleBackward, 74);
    let bad = [
        everything().softcap(0.0),
        everything().temperature(-1.0),
        everything().label_smoothing(1.5),
        everything().reduction(Reduction::By { normaliser: 0.0 }),
        LinearCrossEntropy { vocab: 0, ..everything() },
        LinearCrossEntropy { dim: 0, ..everything() },
    ];
    for problem in bad {
        for pass in PASSES {
            assert!(matches!(run(&problem, pass, &x), Err(Error::Value { .. })), "{problem:?}");
        }
    }
}

/// Inputs that take no memory, as broadcasts, for outputs that no machine has.
#[test]
fn outputs_that_cannot_be_had_are_an_error() {
    let one = Array2::<f64>::ones((1, 1));
    let (ignored, class) = (Array1::from_elem(1, -100), Array1::zeros(1));
    let check = |problem: &LinearCrossEntropy, targets: &Array1<i64>| {
        let inputs = Inputs {
            h: one.broadcast(problem.h_shape()).expect("a broadcast"),
            w: one.broadcast(problem.w_shape()).expect("a broadcast"),
            bias: None,
            targets: targets.broadcast(problem.tokens).expect("a broadcast"),
            class_weights: None,
            token_weights: None,
        };
        let cotangents = Cotangents { dloss: None, dlse: None, dlogprob: None, dentropy: None };
        let backward = backward(problem, &inputs, &cotangents, Wanted::ALL).err();
        assert!(matches!(backward, Some(Error::Memory { .. })), "{problem:?}: {backward:?}");
        forward(problem, &inputs).err()
    };
    // 2⁵¹ bytes and more: beyond any address space of today.
    let dim = LinearCrossEntropy::new(1, 1 << 58, 1);
    assert!(matches!(check(&dim, &class), Some(Error::Memory { .. })));
    assert!(matches!(check(&dim, &ignored), Some(Error::Memory { .. })), "a copy of w");
    let classes = LinearCrossEntropy::new(1, 1, 1 << 50);
    assert!(matches!(check(&classes, &ignored), Some(Error::Memory { .. })), "a copy of w");
}
