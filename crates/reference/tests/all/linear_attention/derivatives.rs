//! Dual numbers: the gradients are the derivatives of what they claim.

use super::cases::{Case, Gates, cases, lengths, packed, problem};
use super::tensors::{INPUTS, OUTPUTS, Sum, Tensors, assert_same, dual, run};
use etalon_problem::{Decay, LinearAttention, Pass, Role, TokenSequences};
use etalon_reference::scalar::Dual;
use ndarray::ArrayD;
use proptest::prelude::*;

/// Both sides round each term a few times: 10⁻¹² of the absolute terms is four digits more than
/// they need, and 10 digits less than any wrong term.
const TOLERANCE: f64 = 1e-12;

fn tangent(results: &Tensors<Dual<f64>>, name: &str) -> Option<ArrayD<f64>> {
    results.get(name).map(|y| y.mapv(|y| y.tangent))
}

/// The same problem with another σ.
fn scaled(problem: &LinearAttention, scale: f64) -> LinearAttention {
    problem.clone().scale(scale)
}

/// <dy, ẏ> = <dx, ẋ>, where ẏ is how the forward pass moves.
fn backward_is_the_derivative(case: &Case, seed: u64) {
    let Case { name, problem, .. } = case;
    let x = case.operands(Pass::Backward, seed);
    let motion = case.direction(Pass::Forward, seed);
    let moved = run(problem, Pass::Forward, &dual(&x, &motion)).expect(name);
    let gradients = run(problem, Pass::Backward, &x).expect(name);

    let (mut outputs, mut inputs) = (Sum::default(), Sum::default());
    for [output, cotangent, _] in OUTPUTS {
        outputs.add_product(x.get(cotangent), tangent(&moved, output).as_ref());
    }
    for input in INPUTS {
        inputs.add_product(gradients.get(&format!("d{input}")), motion.get(input));
    }
    inputs.assert_equals(&outputs, TOLERANCE, name);

    // o is σ times what it is for σ = 1.
    let one = run(&scaled(problem, 1.0), Pass::Forward, &x).expect(name);
    let (mut expected, mut found) = (Sum::default(), Sum::default());
    expected.add_product(x.get("dout"), one.get("o"));
    found.add(gradients["dscale"].sum());
    found.assert_equals(&expected, TOLERANCE, name);
}

/// <ddx, dx> + ddσ dσ + <cot_y, y>
fn second_loss(case: &Case, x: &Tensors<f64>, scale: f64) -> Sum {
    let problem = scaled(&case.problem, scale);
    let mut loss = Sum::default();
    let gradients = run(&problem, Pass::Backward, x).expect(&case.name);
    for input in INPUTS.into_iter().chain(["scale"]) {
        let cotangent = x.get(&format!("dd{input}"));
        loss.add_product(cotangent, gradients.get(&format!("d{input}")));
    }
    let outputs = run(&problem, Pass::Forward, x).expect(&case.name);
    for [output, _, second] in OUTPUTS {
        loss.add_product(x.get(second), outputs.get(output));
    }
    loss
}

/// The motion of that loss, as a function of the inputs, of σ, and of dout and dfinal_state.
fn double_backward_is_the_derivative(case: &Case, seed: u64) {
    let Case { name, problem, .. } = case;
    let x = case.operands(Pass::DoubleBackward, seed);
    let motion = case.direction(Pass::Backward, seed);
    let moving = dual(&x, &motion);
    let moved_outputs = run(problem, Pass::Forward, &moving).expect(name);
    let moved_gradients = run(problem, Pass::Backward, &moving).expect(name);
    let second = run(problem, Pass::DoubleBackward, &x).expect(name);

    let (mut results, mut arguments) = (Sum::default(), Sum::default());
    for input in INPUTS.into_iter().chain(["scale"]) {
        let gradient = tangent(&moved_gradients, &format!("d{input}"));
        results.add_product(x.get(&format!("dd{input}")), gradient.as_ref());
        arguments.add_product(second.get(&format!("g{input}")), motion.get(input));
    }
    for [output, cotangent, second_cotangent] in OUTPUTS {
        let value = tangent(&moved_outputs, output);
        results.add_product(x.get(second_cotangent), value.as_ref());
        arguments.add_product(second.get(&format!("g{cotangent}")), motion.get(cotangent));
    }
    arguments.assert_equals(&results, TOLERANCE, name);

    // Affine in σ: a step of 1 is as good as a derivative.
    let (mut step, below) = (second_loss(case, &x, problem.scale + 1.0), problem.scale);
    let before = second_loss(case, &x, below);
    step.add(-before.value);
    step.magnitude += before.magnitude;
    let mut gscale = Sum::default();
    gscale.add(second["gscale"].sum());
    gscale.assert_equals(&step, TOLERANCE, name);
}

#[test]
fn backward_is_the_derivative_of_forward() {
    cases().iter().for_each(|case| backward_is_the_derivative(case, 1));
}

#[test]
fn double_backward_is_the_derivative_of_backward() {
    cases().iter().for_each(|case| double_backward_is_the_derivative(case, 2));
}

/// Absent cotangents count as zero.
#[test]
fn absent_operands_count_as_zero() {
    for case in cases() {
        let Case { name, problem, .. } = &case;
        for pass in [Pass::Backward, Pass::DoubleBackward] {
            let full = case.operands(pass, 4);
            let operands = problem.operands(pass).into_iter();
            for absent in operands.filter(|o| o.role == Role::OptionalCotangent) {
                let (mut without, mut zero) = (full.clone(), full.clone());
                without.remove(absent.name);
                zero.get_mut(absent.name).expect(absent.name).fill(0.0);
                let expected = run(problem, pass, &zero).expect(name);
                for (result, found) in run(problem, pass, &without).expect(name) {
                    let what = format!("{name}: {result} without {}", absent.name);
                    assert_same(&found, &expected[&result], &what);
                }
            }
        }
    }
}

/// Problems with any combination of options.
fn any_case() -> impl Strategy<Value = Case> {
    let shape = (1usize..3, 1usize..3, 1usize..3, 0usize..9, 1usize..10, 1usize..10);
    let decays = prop::sample::select(vec![Decay::None, Decay::PerHead, Decay::PerToken]);
    let gates = prop::sample::select(vec![Gates::Usual, Gates::Resets, Gates::Extreme]);
    let options = (decays, gates, any::<[bool; 2]>(), -2.0..2.0f64, 0usize..3);
    (shape, options).prop_map(|((batch, keys, group, n, dim, width), options)| {
        let (decay, gates, [initial, last], scale, sequences) = options;
        let batch = if sequences == 2 { 1 } else { batch };
        let mut problem = problem([batch, group * keys, keys, n, dim, width]);
        problem = problem.decay(decay).scale(scale);
        problem.initial_state = initial;
        problem.final_state = last;
        problem.sequences = match sequences {
            0 => TokenSequences::Dense,
            1 => lengths(&vec![n / 2; batch]),
            _ => packed(&[0, n / 3, n / 2]),
        };
        Case { name: format!("{problem:?}"), problem, gates }
    })
}

proptest! {
    #[test]
    fn every_pass_is_a_derivative(case in any_case(), seed: u64) {
        backward_is_the_derivative(&case, seed);
        double_backward_is_the_derivative(&case, seed);
    }
}
