//! Dual numbers: the gradients are the derivatives of what they claim. And the formulas that the
//! page gives beside those that the reference uses.

use super::cases::{TOLERANCE, cases};
use super::naive;
use super::tensors::{
    INPUTS, OUTPUTS, PASSES, Sum, Tensors, assert_all_close, assert_close, direction, dual,
    operands, run,
};
use etalon_problem::{LazyAttention, Pass, Role};
use etalon_reference::scalar::Dual;
use ndarray::ArrayD;

/// Both sides round each term a few times: 10⁻¹² of the absolute terms is three digits more than
/// they need, and 10 digits less than any wrong term.
const OF_THE_TERMS: f64 = 1e-12;

fn tangent(results: &Tensors<Dual<f64>>, name: &str) -> Option<ArrayD<f64>> {
    results.get(name).map(|y| y.mapv(|y| y.tangent))
}

/// <dy, ẏ> = <dx, ẋ>, where ẏ is how the forward pass moves. Dual numbers take the side of a kink
/// that their value takes, so that it holds there too.
#[test]
fn backward_is_the_derivative_of_forward() {
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::Backward, 1);
        let motion = direction(&problem, Pass::Forward, 1);
        let moved = run(&problem, Pass::Forward, &dual(&x, &motion)).expect(name);
        let gradients = run(&problem, Pass::Backward, &x).expect(name);

        let (mut outputs, mut inputs) = (Sum::default(), Sum::default());
        for [output, cotangent, _] in OUTPUTS {
            outputs.add_product(x.get(cotangent), tangent(&moved, output).as_ref());
        }
        for input in INPUTS {
            inputs.add_product(gradients.get(&format!("d{input}")), motion.get(input));
        }
        inputs.assert_equals(&outputs, OF_THE_TERMS, name);
    }
}

/// Along one input at a time, and one head of it: no gradient makes up for another.
#[test]
fn each_gradient_is_the_derivative_along_its_input() {
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::Backward, 2);
        let gradients = run(&problem, Pass::Backward, &x).expect(name);
        let motion = direction(&problem, Pass::Forward, 2);
        for input in INPUTS.into_iter().filter(|input| x.contains_key(*input)) {
            let alone = Tensors::from([(input.to_string(), motion[input].clone())]);
            let moved = run(&problem, Pass::Forward, &dual(&x, &alone)).expect(name);
            let (mut outputs, mut inputs) = (Sum::default(), Sum::default());
            for [output, cotangent, _] in OUTPUTS {
                outputs.add_product(x.get(cotangent), tangent(&moved, output).as_ref());
            }
            inputs.add_product(gradients.get(&format!("d{input}")), motion.get(input));
            inputs.assert_equals(&outputs, OF_THE_TERMS, &format!("{name}: {input}"));
        }
    }
}

/// The same of <ddx, dx> + <cot_y, y>, as a function of the inputs and of dout and dlse.
#[test]
fn double_backward_is_the_derivative_of_backward() {
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::DoubleBackward, 3);
        let motion = direction(&problem, Pass::Backward, 3);
        let moving = dual(&x, &motion);
        let moved_outputs = run(&problem, Pass::Forward, &moving).expect(name);
        let moved_gradients = run(&problem, Pass::Backward, &moving).expect(name);
        let second = run(&problem, Pass::DoubleBackward, &x).expect(name);

        let (mut results, mut arguments) = (Sum::default(), Sum::default());
        for input in INPUTS {
            let gradient = tangent(&moved_gradients, &format!("d{input}"));
            results.add_product(x.get(&format!("dd{input}")), gradient.as_ref());
            arguments.add_product(second.get(&format!("g{input}")), motion.get(input));
        }
        for [output, cotangent, second_cotangent] in OUTPUTS {
            let value = tangent(&moved_outputs, output);
            results.add_product(x.get(second_cotangent), value.as_ref());
            arguments.add_product(second.get(&format!("g{cotangent}")), motion.get(cotangent));
        }
        arguments.assert_equals(&results, OF_THE_TERMS, name);
    }
}

/// (E15)–(E17) for the backward pass, (E19)–(E30) for the double backward pass, and every pair by
/// itself for the forward pass.
#[test]
fn the_other_formulas_of_the_page_agree() {
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::DoubleBackward, 4);
        for pass in PASSES {
            let expected = match pass {
                Pass::Forward => naive::forward(&problem, &x),
                Pass::Backward => naive::backward(&problem, &x),
                _ => naive::double_backward(&problem, &x),
            };
            let found = run(&problem, pass, &x).expect(name);
            assert_all_close(&found, &expected, TOLERANCE, name);
        }
    }
}

/// Absent cotangents count as zero.
#[test]
fn absent_operands_count_as_zero() {
    for (name, problem) in cases() {
        for pass in [Pass::Backward, Pass::DoubleBackward] {
            let full = operands(&problem, pass, 5);
            let optional = problem.operands(pass).into_iter();
            for absent in optional.filter(|o| o.role == Role::OptionalCotangent) {
                let (mut without, mut zero) = (full.clone(), full.clone());
                without.remove(absent.name);
                zero.get_mut(absent.name).expect(absent.name).fill(0.0);
                let expected = run(&problem, pass, &zero).expect(name);
                for (result, found) in run(&problem, pass, &without).expect(name) {
                    let what = format!("{name}: {result} without {}", absent.name);
                    assert_close(&found, &expected[&result], 0.0, &what);
                }
            }
        }
    }
}

/// In all second cotangents together; and those of o and lse alone give the first order back.
#[test]
fn second_gradients_are_linear_in_the_second_cotangents() {
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::DoubleBackward, 6);
        let is_second = |name: &str| name.starts_with("dd") || name.starts_with("cot_");
        let second = |x: &Tensors<f64>| run(&problem, Pass::DoubleBackward, x).expect(name);
        let mut doubled = x.clone();
        doubled.iter_mut().filter(|(name, _)| is_second(name)).for_each(|(_, x)| *x *= -2.0);
        let (one, double) = (second(&x), second(&doubled));
        for (result, one) in &one {
            assert_close(&double[result], &(one * -2.0), 0.0, &format!("{name}: {result}"));
        }

        let mut outputs_alone = x.clone();
        outputs_alone.retain(|name, _| !name.starts_with("dd"));
        let found = second(&outputs_alone);
        let mut first = x.clone();
        for [_, cotangent, second_cotangent] in OUTPUTS {
            first.insert(cotangent.to_string(), x[second_cotangent].clone());
        }
        for (result, expected) in run(&problem, Pass::Backward, &first).expect(name) {
            let result = result.replacen('d', "g", 1);
            assert_close(&found[&result], &expected, TOLERANCE, &format!("{name}: {result}"));
        }
    }
}

/// Finite differences agree away from kinks: nothing here is exact, and nothing is shared.
#[test]
fn finite_differences_agree_away_from_kinks() {
    let problem = LazyAttention::new(super::cases::extents([1, 2, 1, 6, 6, 3])).bias(4);
    let mut x = operands(&problem, Pass::Backward, 7);
    x.insert("tau".to_string(), ndarray::arr1(&[-0.9, -0.35]).into_dyn());
    let inputs = super::tensors::inputs(&x);
    // A step of 10⁻⁵ moves a weight by about as much: it must not cross the kink.
    let near = etalon_reference::lazy_attention::ambiguous(&problem, &inputs, |_| 1e-3);
    assert_eq!(near, Ok(Vec::new()), "choose another seed");
    let loss = |x: &Tensors<f64>| {
        let y = run(&problem, Pass::Forward, x).expect("forward");
        (&x["dout"] * &y["o"]).sum() + (&x["dlse"] * &y["lse"]).sum()
    };
    let gradients = run(&problem, Pass::Backward, &x).expect("backward");
    let step = 1e-5;
    for input in INPUTS {
        for place in 0..x[input].len() {
            let moved = |step: f64| {
                let mut x = x.clone();
                *x.get_mut(input).expect(input).iter_mut().nth(place).expect("an element") += step;
                loss(&x)
            };
            let slope = (moved(step) - moved(-step)) / (2.0 * step);
            let gradient = gradients[&format!("d{input}")].iter().nth(place).expect("an element");
            // The third derivative times step²/6, and 10⁻¹⁶/step of rounding: 10⁻⁹ covers both.
            assert!((slope - gradient).abs() < 1e-9, "d{input} {place}: {slope}, {gradient}");
        }
    }
}
