//! Every error in a request is reported; nothing panics.

use super::cases::{Case, Gates, cases, lengths, packed, problem, with_all};
use super::tensors::{PASSES, Tensors, run, run_chunked};
use etalon_problem::{Decay, Error, LinearAttention, LinearExtents, Pass, Role};
use etalon_reference::linear_attention::{
    Cotangents, Inputs, SecondCotangents, StepInputs, backward, double_backward, forward, step,
};
use ndarray::{Array4, ArrayD, Axis, IxDyn};

fn all_options(decay: Decay) -> Case {
    let problem = with_all(problem([2, 4, 2, 3, 2, 3]), decay);
    Case { name: format!("{decay:?}"), problem, gates: Gates::Usual }
}

/// Every form of a pass.
fn errors(problem: &LinearAttention, pass: Pass, x: &Tensors<f64>) -> Vec<Error> {
    let mut results = vec![run(problem, pass, x)];
    if [Pass::Forward, Pass::Backward].contains(&pass) {
        results.push(run_chunked(problem, pass, x, 2));
    }
    results.into_iter().map(|result| result.expect_err("an error")).collect()
}

#[test]
fn a_wrong_shape_is_named() {
    for case in cases() {
        for pass in PASSES {
            let x = case.operands(pass, 71);
            for (operand, tensor) in &x {
                for axis in 0..tensor.ndim() {
                    let mut shape = tensor.shape().to_vec();
                    shape[axis] += 1;
                    let mut changed = x.clone();
                    changed.insert(operand.clone(), ArrayD::zeros(IxDyn(&shape)));
                    let expected = Error::Shape {
                        operand: operand.clone(),
                        expected: tensor.shape().to_vec(),
                        found: shape,
                    };
                    for error in errors(&case.problem, pass, &changed) {
                        assert_eq!(error, expected, "{}", case.name);
                    }
                }
            }
        }
    }
}

/// The option that an operand belongs to, and the problem without it.
fn without_option(
    problem: &LinearAttention,
    operand: &str,
) -> Option<(&'static str, LinearAttention)> {
    let mut bare = problem.clone();
    let option = match operand {
        _ if operand.ends_with("initial_state") => {
            bare.initial_state = false;
            "initial_state"
        }
        _ if operand.ends_with("final_state") => {
            bare.final_state = false;
            "final_state"
        }
        _ if operand.ends_with('g') || operand.ends_with("g_gamma") => {
            bare.decay = Decay::None;
            "decay"
        }
        _ => return None,
    };
    Some((option, bare))
}

#[test]
fn options_and_operands_must_agree() {
    for case in [all_options(Decay::PerHead), all_options(Decay::PerToken)] {
        for pass in PASSES {
            let x = case.operands(pass, 72);
            for operand in case.problem.operands(pass) {
                let Some((option, bare)) = without_option(&case.problem, operand.name) else {
                    continue;
                };
                if operand.role == Role::Output || (pass == Pass::Step && option != "decay") {
                    continue; // a step has states whatever the problem says
                }
                let mut without = x.clone();
                without.remove(operand.name);
                if operand.role == Role::Input {
                    for error in errors(&case.problem, pass, &without) {
                        let expected = Error::Missing {
                            operand: operand.name.to_string(),
                            reason: format!("the problem sets `{option}`"),
                        };
                        assert_eq!(error, expected);
                    }
                } else {
                    assert!(run(&case.problem, pass, &without).is_ok());
                }
                // The option is not set; this operand of it has no place.
                let mut with = x.clone();
                with.retain(|name, _| {
                    name == operand.name
                        || without_option(&case.problem, name).is_none_or(|other| other.0 != option)
                });
                for error in errors(&bare, pass, &with) {
                    let expected = Error::Unexpected {
                        operand: operand.name.to_string(),
                        reason: format!("the problem does not set `{option}`"),
                    };
                    assert_eq!(error, expected);
                }
            }
        }
    }
}

#[test]
fn a_log_decay_that_is_none_is_named_with_its_place() {
    for bad in [1e-300, f64::NAN, f64::INFINITY] {
        for pass in PASSES {
            let tokens = pass != Pass::Step;
            for (case, operand, place) in [
                (all_options(Decay::PerHead), "g_gamma", vec![1]),
                (
                    all_options(Decay::PerToken),
                    "g",
                    if tokens { vec![1, 0, 2] } else { vec![1, 0] },
                ),
            ] {
                let mut x = case.operands(pass, 73);
                x.get_mut(operand).expect(operand)[IxDyn(&place)] = bad;
                let expected = Error::Value {
                    name: format!("{operand}{place:?}"),
                    expected: "at most 0".to_string(),
                    found: bad.to_string(),
                };
                for error in errors(&case.problem, pass, &x) {
                    assert_eq!(error, expected);
                }
            }
        }
    }
    // The place is that in the array, and the first one in its order is named.
    let mut case = all_options(Decay::PerToken);
    case.problem.extents.batch = 1;
    case.problem.extents.tokens = 7;
    case.problem.sequences = packed(&[0, 2, 5]);
    let mut x = case.operands(Pass::Forward, 74);
    for place in [[0, 1, 4], [0, 0, 6]] {
        x.get_mut("g").expect("g")[place] = 0.5; // the second one lies in padding
    }
    for error in errors(&case.problem, Pass::Forward, &x) {
        assert_eq!(error.to_string(), "`g[0, 1, 4]` must be at most 0, found 0.5");
    }
}

#[test]
fn a_problem_outside_its_domain_is_refused() {
    let good = problem([2, 2, 1, 3, 4, 2]);
    let case = Case { name: "good".to_string(), problem: good.clone(), gates: Gates::Usual };
    let mut uneven = good.clone();
    uneven.extents.key_heads = 3;
    let bad = [
        uneven,
        good.clone().scale(f64::NAN),
        good.clone().value_dim(0),
        good.clone().sequences(lengths(&[4, 0])),
        good.clone().sequences(packed(&[0, 3])),
    ];
    for problem in bad {
        for pass in PASSES {
            let x = case.operands(pass, 75);
            assert_eq!(errors(&problem, pass, &x)[0], problem.check().expect_err("it is bad"));
        }
    }
    for pass in [Pass::Forward, Pass::Backward] {
        let found = run_chunked(&good, pass, &case.operands(pass, 76), 0);
        assert_eq!(found, Err(Error::value("chunk", "at least 1", 0)));
    }
}

/// Inputs that take no memory, as broadcasts, for outputs that no machine has.
#[test]
fn outputs_that_cannot_be_had_are_an_error() {
    // 2⁴⁵ · 4 · 2 elements of 8 bytes: 2⁵¹, beyond any address space of today.
    let extents = LinearExtents { batch: 1 << 45, query_heads: 1, key_heads: 1, tokens: 4, dim: 2 };
    let problem = LinearAttention::new(extents).decay(Decay::PerToken);
    let one = Array4::<f64>::ones((1, 1, 1, 1));
    let gate = -one.index_axis(Axis(3), 0).to_owned();
    let spread = one.broadcast(problem.q_shape()).expect("a broadcast");
    let inputs = Inputs {
        q: spread,
        k: spread,
        v: spread,
        g_gamma: None,
        g: gate.broadcast(problem.g_shape()),
        initial_state: None,
    };
    let cotangents = Cotangents { dout: spread, dfinal_state: None };
    let found = forward(&problem, &inputs);
    assert!(matches!(&found, Err(Error::Memory { bytes, .. }) if *bytes == 1 << 51), "{found:?}");
    let found = backward(&problem, &inputs, &cotangents);
    assert!(matches!(found, Err(Error::Memory { .. })));
    let second = SecondCotangents {
        ddq: Some(spread),
        ddk: None,
        ddv: None,
        ddg_gamma: None,
        ddg: None,
        ddinitial_state: None,
        ddscale: None,
        cot_o: None,
        cot_final_state: None,
    };
    let found = double_backward(&problem, &inputs, &cotangents, &second);
    assert!(matches!(found, Err(Error::Memory { .. })));

    // Without tokens there is nothing to compute, however many batch elements there are.
    let none = LinearAttention::new(LinearExtents { tokens: 0, ..extents });
    let empty = one.slice_axis(Axis(2), (0..0).into());
    let empty = empty.broadcast(none.q_shape()).expect("a broadcast");
    let state = one.broadcast([1 << 45, 1, 2, 2]);
    let inputs = Inputs { q: empty, k: empty, v: empty, g: None, ..inputs };
    assert_eq!(forward(&none, &inputs).map(|y| y.o.len()), Ok(0));
    let cotangents = Cotangents { dout: empty, dfinal_state: None };
    assert_eq!(backward(&none, &inputs, &cotangents).map(|y| y.dk.len()), Ok(0));
    // States without end cannot be copied into order, nor written.
    let (states, inputs) =
        (none.clone().initial_state(), Inputs { initial_state: state, ..inputs });
    let found = forward(&states, &inputs);
    assert!(matches!(found, Err(Error::Memory { .. })), "{found:?}");
    assert!(matches!(backward(&states, &inputs, &cotangents), Err(Error::Memory { .. })));

    let row = one.index_axis(Axis(2), 0);
    let token = row.broadcast([1 << 45, 1, 2]).expect("a broadcast");
    let inputs =
        StepInputs { q: token, k: token, v: token, g_gamma: None, g: None, initial_state: state };
    assert!(matches!(step(&none, &inputs), Err(Error::Memory { .. })));
}
