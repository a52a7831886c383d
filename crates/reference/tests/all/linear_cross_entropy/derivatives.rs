//! Dual numbers: the gradients are the derivatives of what they claim.

use super::cases::cases;
use super::tensors::{Operands, PASSES, Sum, Tensors, assert_close, dual, operands, run};
use etalon_problem::{LinearCrossEntropy, Pass, Role};
use etalon_reference::scalar::Dual;
use ndarray::ArrayD;

/// Both sides round each term a few times: 10⁻¹² of the absolute terms is four digits more than
/// they need, and 10 digits less than any wrong term.
const TOLERANCE: f64 = 1e-12;

const INPUTS: [&str; 3] = ["h", "w", "bias"];
const OUTPUTS: [&str; 4] = ["loss", "lse", "logprob", "entropy"];

fn tangent(results: &Tensors<Dual<f64>>, name: &str) -> Option<ArrayD<f64>> {
    results.get(name).map(|y| y.mapv(|y| y.tangent))
}

/// <dy, ẏ> = <dx, ẋ>, where ẏ is how the forward pass moves.
fn check_backward(name: &str, problem: &LinearCrossEntropy, x: &Operands<f64>, seed: u64) {
    let motion = operands(problem, Pass::Backward, seed ^ 0xd1ec);
    let moved = run(problem, Pass::Forward, &dual(x, &motion)).expect(name);
    let gradients = run(problem, Pass::Backward, x).expect(name);
    let (mut outputs, mut inputs) = (Sum::default(), Sum::default());
    for output in OUTPUTS {
        let cotangent = x.floats.get(&format!("d{output}"));
        outputs.add_product(cotangent, tangent(&moved, output).as_ref());
    }
    for input in INPUTS {
        inputs.add_product(gradients.get(&format!("d{input}")), motion.floats.get(input));
    }
    inputs.assert_equals(&outputs, TOLERANCE, name);
}

#[test]
fn backward_is_the_derivative_of_forward() {
    for (name, problem) in cases() {
        check_backward(name, &problem, &operands(&problem, Pass::Backward, 1), 1);
    }
}

/// So that an error of one does not hide behind the others, which may be larger.
#[test]
fn backward_is_the_derivative_of_each_output_alone() {
    for (name, problem) in cases() {
        let all = operands(&problem, Pass::Backward, 2);
        for output in OUTPUTS {
            let mut alone = all.clone();
            alone.floats.retain(|name, _| {
                let cotangent = OUTPUTS.iter().any(|other| *name == format!("d{other}"));
                !cotangent || *name == format!("d{output}")
            });
            check_backward(&format!("{name}: {output}"), &problem, &alone, 2);
        }
    }
}

/// The same of <ddx, dx> + <cot_y, y>, as a function of the inputs and of the cotangents.
#[test]
fn double_backward_is_the_derivative_of_backward() {
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::DoubleBackward, 3);
        let motion = operands(&problem, Pass::DoubleBackward, 3 ^ 0xd1ec);
        let moving = dual(&x, &motion);
        let outputs = run(&problem, Pass::Forward, &moving).expect(name);
        let gradients = run(&problem, Pass::Backward, &moving).expect(name);
        let second = run(&problem, Pass::DoubleBackward, &x).expect(name);
        let (mut results, mut arguments) = (Sum::default(), Sum::default());
        let given = |prefix: &str, name: &str| x.floats.get(&format!("{prefix}{name}"));
        for input in INPUTS {
            let moved = tangent(&gradients, &format!("d{input}"));
            results.add_product(given("dd", input), moved.as_ref());
            arguments.add_product(second.get(&format!("g{input}")), motion.floats.get(input));
        }
        for output in OUTPUTS {
            results.add_product(given("cot_", output), tangent(&outputs, output).as_ref());
            let moved = motion.floats.get(&format!("d{output}"));
            arguments.add_product(second.get(&format!("gd{output}")), moved);
        }
        arguments.assert_equals(&results, TOLERANCE, name);
    }
}

/// Absent cotangents count as zero.
#[test]
fn absent_operands_count_as_zero() {
    for (name, problem) in cases() {
        for pass in PASSES {
            let full = operands(&problem, pass, 4);
            let optional = problem.operands(pass).into_iter();
            for absent in optional.filter(|x| x.role == Role::OptionalCotangent) {
                let (mut without, mut zero) = (full.clone(), full.clone());
                without.floats.remove(absent.name);
                zero.floats.get_mut(absent.name).expect(absent.name).fill(0.0);
                let expected = run(&problem, pass, &zero).expect(name);
                let found = run(&problem, pass, &without).expect(name);
                assert_close(&found, &expected, 0.0, &format!("{name} without {}", absent.name));
            }
        }
    }
}
