//! Identities of the double backward pass and of the tangents.

use super::cases::{Case, attention_problems, cases};
use super::tensors::{INPUTS, OUTPUTS, Sum, Tensors, assert_close, assert_same, operands, run};
use super::visible::{TOLERANCE, seeing, weights};
use etalon_problem::{Attention, Pass, Problem};
use ndarray::{ArrayD, Axis};

fn second(problem: &Problem, x: &Tensors<f64>) -> Tensors<f64> {
    run(problem, Pass::DoubleBackward, x).expect("the double backward pass")
}

/// The operands without the optional cotangents: what is absent is zero.
fn bare(problem: &Problem, seed: u64) -> Tensors<f64> {
    operands(problem, Pass::Backward, seed)
}

/// The operands, with these cotangents of the gradients alone.
fn along(x: &Tensors<f64>, direction: &Tensors<f64>) -> Tensors<f64> {
    let named = direction.iter().map(|(input, tensor)| (format!("dd{input}"), tensor.clone()));
    x.iter().map(|(name, tensor)| (name.clone(), tensor.clone())).chain(named).collect()
}

fn random_direction(problem: &Problem, seed: u64) -> Tensors<f64> {
    operands(problem, Pass::Forward, seed)
}

/// The problem, its operands without dlse, and its first-order results.
fn examples() -> impl Iterator<Item = (String, Attention, Tensors<f64>, Tensors<f64>)> {
    attention_problems().into_iter().map(|(name, problem)| {
        let case: Problem = problem.clone().into();
        let mut x = bare(&case, 31);
        x.remove("dlse");
        let mut first = run(&case, Pass::Backward, &x).expect(&name);
        first.extend(run(&case, Pass::Forward, &x).expect(&name));
        (name, problem, x, first)
    })
}

fn assert_is(found: &Tensors<f64>, expected: &[(&str, ArrayD<f64>)], what: &str) {
    for (result, expected) in expected {
        let error = (&found[*result] - expected).iter().fold(0.0f64, |worst, x| worst.max(x.abs()));
        // The operands are of the size of 1.
        assert!(error <= 10.0 * TOLERANCE, "{what}: {result} is off by {error:e}");
    }
}

/// (q, −k): the scores are products, so <q, dq> − <k, dk> is 0 whatever q and k are, and its
/// derivative too.
#[test]
fn along_q_and_minus_k_nothing_moves() {
    for (name, problem, x, first) in examples() {
        let direction =
            Tensors::from([("q".to_string(), x["q"].clone()), ("k".to_string(), -&x["k"])]);
        let found = second(&problem.into(), &along(&x, &direction));
        let expected = [
            ("gq", -&first["dq"]),
            ("gk", first["dk"].clone()),
            ("gv", &x["v"] * 0.0),
            ("gdout", &x["dout"] * 0.0),
        ];
        assert_is(&found, &expected, &name);
    }
}

/// One vector for every key: without softcap and sinks only lse moves.
#[test]
fn along_a_shift_of_the_keys_lse_alone_moves() {
    for (name, problem, x, first) in examples() {
        if problem.scores.softcap.is_some() || problem.scores.sinks {
            continue;
        }
        let shift = 0.5; // the same in every element
        let direction = Tensors::from([("k".to_string(), x["k"].mapv(|_| shift))]);
        let gdlse =
            x["q"].sum_axis(Axis(3)) * &seeing(&problem.scores) * (shift * problem.scores.scale());
        let found = second(&problem.into(), &along(&x, &direction));
        let expected = [
            ("gq", &x["q"] * 0.0),
            ("gk", &x["k"] * 0.0),
            ("gv", &x["v"] * 0.0),
            ("gdout", &first["o"] * 0.0),
            ("gdlse", gdlse),
        ];
        assert_is(&found, &expected, &name);
    }
}

/// v itself: everything is linear in v.
#[test]
fn along_v_the_first_order_returns() {
    for (name, problem, x, first) in examples() {
        let direction = Tensors::from([("v".to_string(), x["v"].clone())]);
        let found = second(&problem.into(), &along(&x, &direction));
        let mut expected = vec![
            ("gq", first["dq"].clone()),
            ("gk", first["dk"].clone()),
            ("gv", &x["v"] * 0.0),
            ("gdout", first["o"].clone()),
        ];
        expected.extend(first.get("dsinks").map(|dsinks| ("gsinks", dsinks.clone())));
        expected.extend(first.get("dbias").map(|dbias| ("gbias", dbias.clone())));
        assert_is(&found, &expected, &name);
    }
}

/// One vector for every value: o moves by it, as far as the weights add up to 1, and without sinks
/// nothing else does.
#[test]
fn along_a_shift_of_the_values_o_alone_moves() {
    for (name, problem, x, first) in examples() {
        let shift = 0.5; // the same in every element
        let direction = Tensors::from([("v".to_string(), x["v"].mapv(|_| shift))]);
        let rows = weights(&problem, &x, &first).insert_axis(Axis(3));
        let mut expected =
            vec![("gdout", &first["o"] * 0.0 + &rows * shift), ("gv", &x["v"] * 0.0)];
        if !problem.scores.sinks {
            expected.extend([("gq", &x["q"] * 0.0), ("gk", &x["k"] * 0.0)]);
        }
        assert_is(&second(&problem.into(), &along(&x, &direction)), &expected, &name);
    }
}

/// <u, H w> = <w, H u>.
#[test]
fn the_hessian_is_symmetric() {
    for Case { name, problem } in cases() {
        let x = bare(&problem, 32);
        let (u, w) = (random_direction(&problem, 33), random_direction(&problem, 34));
        let product = |left: &Tensors<f64>, right: &Tensors<f64>| {
            let moved = second(&problem, &along(&x, right));
            let mut sum = Sum::default();
            INPUTS.iter().for_each(|input| {
                sum.add_product(left.get(*input), moved.get(&format!("g{input}")))
            });
            sum
        };
        product(&u, &w).assert_equals(&product(&w, &u), TOLERANCE, &name);
    }
}

/// gdout and gdlse are how o and lse move along the cotangents of the gradients; of those of o and
/// lse they know nothing.
#[test]
fn the_gradient_of_dout_is_the_tangent_of_o() {
    for Case { name, problem } in cases() {
        let mut x = operands(&problem, Pass::DoubleBackward, 35);
        for input in INPUTS {
            if let Some(direction) = x.get(&format!("dd{input}")).cloned() {
                x.insert(format!("t{input}"), direction);
            }
        }
        let (tangents, found) = (run(&problem, Pass::Jvp, &x).expect(&name), second(&problem, &x));
        for output in &OUTPUTS {
            if let Some(tangent) = tangents.get(output.tangent) {
                assert_same(&found[&format!("g{}", output.cotangent)], tangent, &name);
            }
        }
    }
}

/// <dout, gdout> + <dlse, gdlse> = Σ <ddx, dx>: the gradients are linear in dout and dlse.
#[test]
fn contractions_with_the_cotangents_agree() {
    for Case { name, problem } in cases() {
        let x = bare(&problem, 36);
        let direction = random_direction(&problem, 37);
        let gradients = run(&problem, Pass::Backward, &x).expect(&name);
        let found = second(&problem, &along(&x, &direction));
        let (mut left, mut right) = (Sum::default(), Sum::default());
        for output in &OUTPUTS {
            left.add_product(x.get(output.cotangent), found.get(&format!("g{}", output.cotangent)));
        }
        for input in INPUTS {
            right.add_product(direction.get(input), gradients.get(&format!("d{input}")));
        }
        left.assert_equals(&right, TOLERANCE, &name);
    }
}

/// In all second cotangents together; and those of o and lse alone give the first order back.
#[test]
fn second_gradients_are_linear_in_the_second_cotangents() {
    for Case { name, problem } in cases() {
        let x = operands(&problem, Pass::DoubleBackward, 38);
        let is_second = |name: &str| name.starts_with("dd") || name.starts_with("cot_");
        let scaled = |factor: f64| {
            let mut scaled = x.clone();
            scaled.iter_mut().filter(|(name, _)| is_second(name)).for_each(|(_, x)| *x *= factor);
            second(&problem, &scaled)
        };
        let (one, double, none) = (scaled(1.0), scaled(-2.0), scaled(0.0));
        for (result, one) in &one {
            assert_same(&double[result], &(one * -2.0), &format!("{name}: {result}"));
            assert_same(&none[result], &(one * 0.0), &format!("{name}: {result}"));
        }

        let mut outputs_alone = x.clone();
        outputs_alone.retain(|name, _| !name.starts_with("dd"));
        let found = second(&problem, &outputs_alone);
        let mut first = x.clone();
        for output in &OUTPUTS {
            if let Some(cotangent) = x.get(output.second_cotangent) {
                first.insert(output.cotangent.to_string(), cotangent.clone());
            }
        }
        let expected = run(&problem, Pass::Backward, &first).expect(&name);
        for input in INPUTS {
            if let Some(expected) = expected.get(&format!("d{input}")) {
                let what = format!("{name}: g{input}");
                assert_close(&found[&format!("g{input}")], expected, TOLERANCE, &what);
            }
        }
    }
}
