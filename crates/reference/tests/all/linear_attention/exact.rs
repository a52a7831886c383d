//! Laws that hold to the last bit, or would if numbers did not round: everything is linear in each operand,
//! so that a step of 1 in one element is as good as a derivative.

use super::cases::{Case, cases};
use super::naive;
use super::tensors::{INPUTS, OUTPUTS, Random, Sum, Tensors, assert_all_same, run, run_chunked};
use etalon_problem::{Decay, Pass};
use ndarray::ArrayD;

/// Elements tried in each operand.
const TRIED: usize = 6;

/// Integers between −3 and 3, a scale of −2, and decays of 1, ½ and 0. All numbers are multiples of
/// 2⁻²³ (23 tokens), and the second loss, their largest, stays below 23²·11·17·3⁵·16 < 2²⁹: 52 bits.
fn integers(case: &Case, pass: Pass, seed: u64) -> (Case, Tensors<f64>) {
    let problem = case.problem.clone().scale(-2.0);
    let case = Case { name: case.name.clone(), problem, gates: case.gates };
    let mut x = case.operands(pass, seed);
    let half = -std::f64::consts::LN_2;
    assert_eq!(half.exp(), 0.5);
    for (name, tensor) in &mut x {
        match name.as_str() {
            "g" | "g_gamma" => tensor.mapv_inplace(|g| match g {
                g if g < -2.0 => g,
                g if g < -0.7 => half,
                _ => 0.0,
            }),
            _ => tensor.mapv_inplace(|x| (2.0 * x).round()),
        }
    }
    (case, x)
}

/// <dout, o> + <dfinal_state, final_state>, by the definition without states.
fn loss(case: &Case, x: &Tensors<f64>) -> Sum {
    let y = naive::forward(&case.problem, x);
    let mut loss = Sum::default();
    for [output, cotangent, _] in OUTPUTS {
        loss.add_product(y.get(output), x.get(cotangent));
    }
    loss
}

/// <ddx, dx> + <cot_y, y>, with the gradients of the backward pass.
fn second_loss(case: &Case, x: &Tensors<f64>) -> Sum {
    let y = run(&case.problem, Pass::Forward, x).expect(&case.name);
    let gradients = run(&case.problem, Pass::Backward, x).expect(&case.name);
    let mut loss = Sum::default();
    for input in INPUTS.into_iter().chain(["scale"]) {
        loss.add_product(gradients.get(&format!("d{input}")), x.get(&format!("dd{input}")));
    }
    for [output, _, second] in OUTPUTS {
        loss.add_product(y.get(output), x.get(second));
    }
    loss
}

/// f(x + step) − f(x) for some elements of an operand, next to the gradients. A log-decay g is
/// stepped from −∞ to 0: the loss is linear in e^g, so that e^g times the difference is the
/// derivative by g.
fn steps(
    x: &Tensors<f64>,
    operand: &str,
    gradient: &ArrayD<f64>,
    loss: impl Fn(&Tensors<f64>) -> Sum,
    compare: impl Fn(f64, f64, f64),
) {
    let places: Vec<_> = gradient.indexed_iter().map(|(place, _)| place).collect();
    let mut random = Random(places.len() as u64);
    for _ in 0..TRIED.min(places.len()) {
        let place = &places[random.below(places.len())];
        let at = |value: f64| {
            let mut x = x.clone();
            x.get_mut(operand).expect(operand)[place] = value;
            loss(&x)
        };
        let here = x[operand][place];
        let (low, high, slope) = match operand {
            "g" => (f64::NEG_INFINITY, 0.0, here.exp()),
            _ => (here, here + 1.0, 1.0),
        };
        let (low, high) = (at(low), at(high));
        compare(
            gradient[place],
            slope * (high.value - low.value),
            slope * (low.magnitude + high.magnitude),
        );
    }
}

/// Runs `compare(what, gradient, difference, scale)` for elements of every operand that the loss is
/// linear in. (It is not in g_gamma, which acts at every token.)
fn all_steps(case: &Case, x: &Tensors<f64>, double: bool, compare: impl Fn(&str, f64, f64, f64)) {
    let pass = if double { Pass::DoubleBackward } else { Pass::Backward };
    let gradients = run(&case.problem, pass, x).expect(&case.name);
    for operand in ["q", "k", "v", "g", "initial_state", "dout", "dfinal_state"] {
        let prefix = if double { "g" } else { "d" };
        let Some(gradient) = gradients.get(&format!("{prefix}{operand}")) else { continue };
        let what = format!("{}, {operand}", case.name);
        let compare = |found, expected, scale| compare(&what, found, expected, scale);
        let loss = |x: &Tensors<f64>| if double { second_loss(case, x) } else { loss(case, x) };
        steps(x, operand, gradient, loss, compare);
    }
}

#[test]
fn forms_agree_with_the_definition_on_integers() {
    for case in cases() {
        let (case, x) = integers(&case, Pass::Backward, 11);
        let found = run(&case.problem, Pass::Forward, &x).expect(&case.name);
        assert_all_same(&found, &naive::forward(&case.problem, &x), &case.name);
        // e^{−2 ln 2} need not be 1/4, so that chunks are exact where nothing decays.
        if case.problem.decay == Decay::None {
            for chunk in 1..=24 {
                for pass in [Pass::Forward, Pass::Backward] {
                    let expected = run(&case.problem, pass, &x).expect(&case.name);
                    let found = run_chunked(&case.problem, pass, &x, chunk).expect(&case.name);
                    assert_all_same(&found, &expected, &case.name);
                }
            }
        }
    }
}

#[test]
fn gradients_are_steps_of_the_definition_on_integers() {
    for case in cases() {
        let (case, x) = integers(&case, Pass::Backward, 12);
        all_steps(&case, &x, false, |what, found, expected, _| {
            assert_eq!(found, expected, "{what}")
        });
    }
}

#[test]
fn second_gradients_are_steps_of_the_gradients_on_integers() {
    for case in cases() {
        let (case, x) = integers(&case, Pass::DoubleBackward, 13);
        all_steps(&case, &x, true, |what, found, expected, _| {
            assert_eq!(found, expected, "{what}")
        });
    }
}

/// The same where numbers round: by less than 10⁻¹³ of the absolute terms, which are a few
/// hundred units in the last place.
#[test]
fn gradients_are_steps_of_the_definition() {
    for case in cases() {
        for (pass, double) in [(Pass::Backward, false), (Pass::DoubleBackward, true)] {
            let x = case.operands(pass, 14);
            all_steps(&case, &x, double, |what, found, expected, scale| {
                let error = (found - expected).abs();
                assert!(error <= 1e-13 * scale, "{what}: {found} is off by {error:e} of {scale}");
            });
        }
    }
}
