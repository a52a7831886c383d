//! Dual numbers: the gradients are the derivatives of what they claim.

use super::cases::{Case, cases, extents};
use super::tensors::{INPUTS, OUTPUTS, Sum, Tensors, assert_close, direction, dual, operands, run};
use etalon_problem::{Attention, AttentionLse, Mask, Pass, Problem, Sequences};
use etalon_reference::scalar::Dual;
use ndarray::ArrayD;
use proptest::prelude::*;

/// Both sides round each term a few times: 10⁻¹² of the absolute terms is four digits more than
/// they need, and 10 digits less than any wrong term.
const TOLERANCE: f64 = 1e-12;

fn tangent(results: &Tensors<Dual<f64>>, name: &str) -> Option<ArrayD<f64>> {
    results.get(name).map(|y| y.mapv(|y| y.tangent))
}

/// <dy, ẏ> = <dx, ẋ>, where ẏ is how the forward pass moves.
fn backward_is_the_derivative(case: &Case, seed: u64) {
    let Case { name, problem } = case;
    let x = operands(problem, Pass::Backward, seed);
    let motion = direction(problem, Pass::Forward, seed);
    let moved = run(problem, Pass::Forward, &dual(&x, &motion)).expect(name);
    let gradients = run(problem, Pass::Backward, &x).expect(name);

    let (mut outputs, mut inputs) = (Sum::default(), Sum::default());
    for output in &OUTPUTS {
        outputs.add_product(x.get(output.cotangent), tangent(&moved, output.value).as_ref());
    }
    for input in INPUTS {
        inputs.add_product(gradients.get(&format!("d{input}")), motion.get(input));
    }
    inputs.assert_equals(&outputs, TOLERANCE, name);
}

/// The same of <ddx, dx> + <cot_y, y>, as a function of the inputs and of dout and dlse.
fn double_backward_is_the_derivative(case: &Case, seed: u64) {
    let Case { name, problem } = case;
    let x = operands(problem, Pass::DoubleBackward, seed);
    let motion = direction(problem, Pass::Backward, seed);
    let moving = dual(&x, &motion);
    let moved_outputs = run(problem, Pass::Forward, &moving).expect(name);
    let moved_gradients = run(problem, Pass::Backward, &moving).expect(name);
    let second = run(problem, Pass::DoubleBackward, &x).expect(name);

    let (mut results, mut arguments) = (Sum::default(), Sum::default());
    for input in INPUTS {
        let gradient = tangent(&moved_gradients, &format!("d{input}"));
        results.add_product(x.get(&format!("dd{input}")), gradient.as_ref());
        arguments.add_product(second.get(&format!("g{input}")), motion.get(input));
    }
    for output in &OUTPUTS {
        let value = tangent(&moved_outputs, output.value);
        results.add_product(x.get(output.second_cotangent), value.as_ref());
        let cotangent = output.cotangent;
        arguments.add_product(second.get(&format!("g{cotangent}")), motion.get(cotangent));
    }
    arguments.assert_equals(&results, TOLERANCE, name);
}

/// Element by element.
fn jvp_is_the_derivative(case: &Case, seed: u64) {
    let Case { name, problem } = case;
    let x = operands(problem, Pass::Jvp, seed);
    let tangents = INPUTS.iter().filter_map(|&input| {
        x.get(&format!("t{input}")).map(|tangent| (input.to_string(), tangent.clone()))
    });
    let moved = run(problem, Pass::Forward, &dual(&x, &tangents.collect())).expect(name);
    let found = run(problem, Pass::Jvp, &x).expect(name);
    for output in &OUTPUTS {
        if let Some(expected) = tangent(&moved, output.value) {
            assert_close(&found[output.tangent], &expected, TOLERANCE, name);
        }
    }
}

#[test]
fn backward_is_the_derivative_of_forward() {
    cases().iter().for_each(|case| backward_is_the_derivative(case, 1));
}

#[test]
fn double_backward_is_the_derivative_of_backward() {
    cases().iter().for_each(|case| double_backward_is_the_derivative(case, 2));
}

#[test]
fn jvp_is_the_derivative_of_forward_along_the_tangents() {
    cases().iter().for_each(|case| jvp_is_the_derivative(case, 3));
}

/// Absent cotangents count as zero.
#[test]
fn absent_operands_count_as_zero() {
    for Case { name, problem } in cases() {
        for pass in [Pass::Backward, Pass::DoubleBackward, Pass::Jvp] {
            let full = operands(&problem, pass, 4);
            let role = etalon_problem::Role::OptionalCotangent;
            let optional = problem.operands(pass).into_iter().filter(|o| o.role == role);
            for absent in optional {
                let (mut without, mut zero) = (full.clone(), full.clone());
                without.remove(absent.name);
                zero.get_mut(absent.name).expect(absent.name).fill(0.0);
                let expected = run(&problem, pass, &zero).expect(&name);
                for (result, found) in run(&problem, pass, &without).expect(&name) {
                    let what = format!("{name}: {result} without {}", absent.name);
                    assert_close(&found, &expected[&result], 0.0, &what);
                }
            }
        }
    }
}

/// Problems with any combination of options.
fn any_problem() -> impl Strategy<Value = Problem> {
    let masks = prop_oneof![
        Just(Mask::Full),
        Just(Mask::causal()),
        (0usize..3, 0usize..3).prop_map(|(left, right)| Mask::window(left, right)),
        (1usize..4).prop_map(|chunk| Mask::ChunkedCausal { chunk, align: Default::default() }),
    ];
    let shape = (1usize..3, 1usize..3, 1usize..3, 0usize..6, 0usize..6, 1usize..10, 1usize..10);
    let flags = (any::<[bool; 3]>(), 0usize..2, prop::option::of(0.5f64..4.0));
    (shape, masks, flags, any::<bool>()).prop_map(
        |((batch, key_heads, group, n, m, dim, value_dim), mask, (flags, padding, cap), lse)| {
            let [sinks, wide_bias, bias] = flags;
            let heads = group * key_heads;
            let mut problem = Attention::new(extents([batch, heads, key_heads, n, m, dim]));
            problem = problem.value_dim(value_dim).mask(mask);
            problem.scores.softcap = cap;
            problem.scores.sinks = sinks;
            if bias {
                problem = if wide_bias { problem.bias(batch, heads) } else { problem.bias(1, 1) };
            }
            if padding > 0 {
                let (query, key) = (n.saturating_sub(padding), m.saturating_sub(padding));
                let (query, key) = (vec![query; batch], vec![key; batch]);
                problem = problem.sequences(Sequences::Lengths { query, key });
            }
            if lse { AttentionLse { scores: problem.scores }.into() } else { problem.into() }
        },
    )
}

proptest! {
    #[test]
    fn every_pass_is_a_derivative(problem in any_problem(), seed: u64) {
        let case = Case { name: format!("{problem:?}"), problem };
        backward_is_the_derivative(&case, seed);
        double_backward_is_the_derivative(&case, seed);
        jvp_is_the_derivative(&case, seed);
    }
}
