//! Identities that need no second implementation.

use super::cases::{Case, cases, with_all};
use super::tensors::{
    INPUTS, OUTPUTS, Sum, Tensors, assert_absolutely_close, assert_close, assert_same, run,
};
use etalon_problem::{Decay, Pass};
use ndarray::{ArrayD, Axis};

/// Tolerance of sums of a few hundred rounded terms: units in the last place of the absolute terms.
const TOLERANCE: f64 = 1e-13;

fn forward(case: &Case, x: &Tensors<f64>) -> Tensors<f64> {
    run(&case.problem, Pass::Forward, x).expect(&case.name)
}

fn backward(case: &Case, x: &Tensors<f64>) -> Tensors<f64> {
    run(&case.problem, Pass::Backward, x).expect(&case.name)
}

fn second(case: &Case, x: &Tensors<f64>) -> Tensors<f64> {
    run(&case.problem, Pass::DoubleBackward, x).expect(&case.name)
}

/// Tensors that may be absent.
type Pair<'a> = (Option<&'a ArrayD<f64>>, Option<&'a ArrayD<f64>>);

fn products(pairs: &[Pair<'_>]) -> Sum {
    let mut sum = Sum::default();
    pairs.iter().for_each(|(x, y)| sum.add_product(*x, *y));
    sum
}

/// <dq, q> = <dout, o>, <dk, k> = <dv, v> and <dk, k> + <dH_0, H_0> = <dout, o> + <dH_n, H_n>.
#[test]
fn products_with_their_gradients_agree() {
    for case in cases() {
        let x = case.operands(Pass::Backward, 21);
        let (y, d) = (forward(&case, &x), backward(&case, &x));
        let both = |input: &str| (x.get(input), d.get(&format!("d{input}")));
        let output = (x.get("dout"), y.get("o"));
        let state = (x.get("dfinal_state"), y.get("final_state"));
        let check = |left: Sum, right: Sum| left.assert_equals(&right, TOLERANCE, &case.name);
        check(products(&[both("q")]), products(&[output]));
        check(products(&[both("k")]), products(&[both("v")]));
        let initial = both("initial_state");
        check(products(&[both("k"), initial]), products(&[output, state]));
        check(products(&[both("v"), initial]), products(&[output, state]));
    }
}

/// dg_t = Σ_{u ≥ t} (q_u·dq_u − k_u·dk_u) + <dH_n, H_n>, per sequence and key head: what came in
/// before t and leaves at t or later. The sum cancels; its absolute terms are its scale.
#[test]
fn the_other_form_of_the_gradient_of_a_decay_agrees() {
    for case in cases().into_iter().filter(|case| case.problem.decay == Decay::PerToken) {
        let mut case = case;
        case.problem.final_state = true;
        let x = case.operands(Pass::Backward, 22);
        let (y, d) = (forward(&case, &x), backward(&case, &x));
        for s in case.problem.list_sequences() {
            for h in 0..case.problem.extents.key_heads {
                let state = |x: &ArrayD<f64>| {
                    x.index_axis(Axis(0), s.index).index_axis(Axis(0), h).to_owned()
                };
                let row = |x: &ArrayD<f64>, head: usize, t: usize| {
                    let element = x.index_axis(Axis(0), s.batch);
                    element.index_axis(Axis(0), head).index_axis(Axis(0), t).to_owned()
                };
                let mut sum = Sum::default();
                sum.add_product(Some(&state(&x["dfinal_state"])), Some(&state(&y["final_state"])));
                for t in (s.start..s.start + s.tokens).rev() {
                    let group = case.problem.group();
                    for head in h * group..(h + 1) * group {
                        sum.add_product(
                            Some(&row(&x["q"], head, t)),
                            Some(&row(&d["dq"], head, t)),
                        );
                    }
                    sum.add_product(Some(&-row(&x["k"], h, t)), Some(&row(&d["dk"], h, t)));
                    let error = (d["dg"][[s.batch, h, t]] - sum.value).abs();
                    assert!(error <= TOLERANCE * sum.magnitude, "{}: {error:e}", case.name);
                }
            }
        }
    }
}

/// One decay for all tokens: its gradient is the sum of theirs.
#[test]
fn the_gradient_of_a_head_is_the_sum_of_its_tokens() {
    for mut case in cases() {
        if case.problem.decay != Decay::PerHead {
            continue;
        }
        let mut x = case.operands(Pass::DoubleBackward, 23);
        let (first, twice) = (backward(&case, &x), second(&case, &x));
        case.problem.decay = Decay::PerToken;
        for prefix in ["", "dd"] {
            let per_head = x.remove(&format!("{prefix}g_gamma")).expect("a decay per head");
            let column = per_head.insert_axis(Axis(1));
            let spread = column.broadcast(case.problem.g_shape().to_vec()).expect("a broadcast");
            x.insert(format!("{prefix}g"), spread.to_owned());
        }
        let (per_token, per_token_twice) = (backward(&case, &x), second(&case, &x));
        for (prefix, found, expected) in [("d", first, per_token), ("g", twice, per_token_twice)] {
            for (result, expected) in &expected {
                let what = format!("{}: {result}", case.name);
                if *result == format!("{prefix}g") {
                    let sum = expected.sum_axis(Axis(2)).sum_axis(Axis(0));
                    let scale = expected.mapv(f64::abs).sum();
                    let found = &found[&format!("{prefix}g_gamma")];
                    assert_absolutely_close(found, &sum, TOLERANCE * scale, &what);
                } else {
                    assert_same(&found[result], expected, &what);
                }
            }
        }
    }
}

type Combine = dyn Fn(&ArrayD<f64>, &ArrayD<f64>) -> ArrayD<f64>;

#[test]
fn gradients_are_linear_in_the_cotangents() {
    for case in cases() {
        let x = case.operands(Pass::Backward, 24);
        let other = case.operands(Pass::Backward, 25);
        let with = |combine: &Combine| {
            let mut changed = x.clone();
            for cotangent in ["dout", "dfinal_state"] {
                if let Some(tensor) = changed.get_mut(cotangent) {
                    *tensor = combine(tensor, &other[cotangent]);
                }
            }
            backward(&case, &changed)
        };
        let (one, two) = (with(&|a, _| a.clone()), with(&|_, b| b.clone()));
        let (four, none, sum) =
            (with(&|a, _| a * -4.0), with(&|a, _| a * 0.0), with(&|a, b| a + b));
        for (result, one) in &one {
            let what = format!("{}: {result}", case.name);
            assert_same(&four[result], &(one * -4.0), &what);
            assert_same(&none[result], &(one * 0.0), &what);
            let parts = one + &two[result];
            // dσ and dg_gamma sum over everything and may cancel; nothing here exceeds 10⁴.
            assert_absolutely_close(&sum[result], &parts, 1e4 * f64::EPSILON, &what);
        }
    }
}

/// Twice the scale is twice o, exactly; so is twice q, with H as it was.
#[test]
fn outputs_are_linear() {
    for case in cases() {
        let x = case.operands(Pass::Forward, 26);
        let expected = forward(&case, &x);
        let twice = case.problem.clone().scale(2.0 * case.problem.scale);
        let found = run(&twice, Pass::Forward, &x).expect(&case.name);
        assert_same(&found["o"], &(&expected["o"] * 2.0), &case.name);
        let mut changed = x.clone();
        *changed.get_mut("q").expect("q") *= 2.0;
        let found = forward(&case, &changed);
        assert_same(&found["o"], &(&expected["o"] * 2.0), &case.name);
        // k and H_0 together: the states are twice what they were.
        let mut changed = x.clone();
        *changed.get_mut("k").expect("k") *= 2.0;
        changed.get_mut("initial_state").into_iter().for_each(|state| *state *= 2.0);
        for (result, found) in forward(&case, &changed) {
            assert_same(&found, &(&expected[&result] * 2.0), &case.name);
        }
    }
}

/// A direction in the space of the inputs, as the cotangents of their gradients.
fn along(x: &Tensors<f64>, direction: &Tensors<f64>) -> Tensors<f64> {
    let named = direction.iter().map(|(input, tensor)| (format!("dd{input}"), tensor.clone()));
    x.iter().map(|(name, tensor)| (name.clone(), tensor.clone())).chain(named).collect()
}

/// A random direction, the scale included.
fn direction(case: &Case, seed: u64) -> Tensors<f64> {
    let all = case.direction(Pass::DoubleBackward, seed);
    let inputs = INPUTS.into_iter().chain(["scale"]);
    inputs.filter_map(|i| Some((i.to_string(), all.get(&format!("dd{i}"))?.clone()))).collect()
}

/// <u, H w> = <w, H u>, H the second derivative by all inputs and by the scale.
#[test]
fn the_hessian_is_symmetric() {
    for case in cases() {
        let x = case.operands(Pass::Backward, 31);
        let (u, w) = (direction(&case, 32), direction(&case, 33));
        let product = |left: &Tensors<f64>, right: &Tensors<f64>| {
            let moved = second(&case, &along(&x, right));
            let mut sum = Sum::default();
            left.iter().for_each(|(input, left)| {
                sum.add_product(Some(left), moved.get(&format!("g{input}")));
            });
            sum
        };
        product(&u, &w).assert_equals(&product(&w, &u), TOLERANCE, &case.name);
    }
}

/// <dout, gdout> + <dH_n, gdH_n> = Σ <ddx, dx>: the gradients are linear in dout and dH_n.
#[test]
fn contractions_with_the_cotangents_agree() {
    for case in cases() {
        let x = case.operands(Pass::Backward, 34);
        let direction = direction(&case, 35);
        let gradients = backward(&case, &x);
        let found = second(&case, &along(&x, &direction));
        let (mut left, mut right) = (Sum::default(), Sum::default());
        for [_, cotangent, _] in OUTPUTS {
            left.add_product(x.get(cotangent), found.get(&format!("g{cotangent}")));
        }
        for (input, direction) in &direction {
            right.add_product(Some(direction), gradients.get(&format!("d{input}")));
        }
        left.assert_equals(&right, TOLERANCE, &case.name);
    }
}

/// Along v and H_0 everything that is linear in the values returns as it was.
#[test]
fn along_the_values_the_first_order_returns() {
    for case in cases() {
        let x = case.operands(Pass::Backward, 36);
        let (y, d) = (forward(&case, &x), backward(&case, &x));
        let mut values = x.clone();
        values.retain(|name, _| name == "v" || name == "initial_state");
        let found = second(&case, &along(&x, &values));
        let mut expected = vec![
            ("gq", d["dq"].clone()),
            ("gk", d["dk"].clone()),
            ("gv", &d["dv"] * 0.0),
            ("gscale", d["dscale"].clone()),
            ("gdout", y["o"].clone()),
        ];
        for (second, first) in [("gg", "dg"), ("gg_gamma", "dg_gamma")] {
            expected.extend(d.get(first).map(|d| (second, d.clone())));
        }
        expected.extend(d.get("dinitial_state").map(|d| ("ginitial_state", d * 0.0)));
        expected.extend(y.get("final_state").map(|y| ("gdfinal_state", y.clone())));
        for (result, expected) in expected {
            assert_close(&found[result], &expected, TOLERANCE, &format!("{}: {result}", case.name));
        }
    }
}

/// cot_o and cot_final_state alone give an ordinary backward pass.
#[test]
fn cotangents_of_the_outputs_alone_give_the_first_order() {
    for case in cases() {
        let x = case.operands(Pass::DoubleBackward, 37);
        let mut alone = x.clone();
        alone.retain(|name, _| !name.starts_with("dd"));
        let mut first = x.clone();
        for [_, cotangent, second] in OUTPUTS {
            first.extend(x.get(second).map(|x| (cotangent.to_string(), x.clone())));
        }
        let (found, expected) = (second(&case, &alone), backward(&case, &first));
        for (result, expected) in &expected {
            let twice = format!("g{}", &result[1..]);
            assert_same(&found[&twice], expected, &format!("{}: {twice}", case.name));
        }
        for result in ["gdout", "gdfinal_state"] {
            if let Some(found) = found.get(result) {
                assert_same(found, &(found * 0.0), &case.name);
            }
        }
    }
}

/// A sum over the heads of a group is one head's sum over its keys: with k and v repeated for each
/// query head, o stays and the gradients of the copies add up.
#[test]
fn shared_heads_are_repeated_heads() {
    let problem = super::cases::problem([2, 6, 2, 5, 3, 4]);
    for decay in [Decay::None, Decay::PerHead, Decay::PerToken] {
        let case = Case {
            name: format!("{decay:?}"),
            problem: with_all(problem.clone(), decay),
            gates: super::cases::Gates::Usual,
        };
        let mut alone =
            Case { name: case.name.clone(), problem: case.problem.clone(), gates: case.gates };
        alone.problem.extents.key_heads = 6;
        let x = case.operands(Pass::Backward, 38);
        let head_axis = |name: &str| if name.ends_with("g_gamma") { 0 } else { 1 };
        let mut repeated = x.clone();
        for (name, tensor) in &mut repeated {
            if !["q", "dout"].contains(&name.as_str()) {
                let heads: Vec<usize> = (0..6).map(|head| head / 3).collect();
                *tensor = tensor.select(Axis(head_axis(name)), &heads);
            }
        }
        // Each copy brings the whole gradient by the final state: a third each.
        repeated.get_mut("dfinal_state").expect("it is there").mapv_inplace(|d| d / 3.0);
        let (y, y_alone) = (forward(&case, &x), forward(&alone, &repeated));
        assert_same(&y_alone["o"], &y["o"], &case.name);
        let (d, d_alone) = (backward(&case, &x), backward(&alone, &repeated));
        for (result, d) in &d {
            let mut found = d_alone[result].clone();
            if !["dq", "dscale"].contains(&result.as_str()) {
                let axis = Axis(head_axis(result));
                let mut shape = found.shape().to_vec();
                shape[axis.index()] = 2;
                shape.insert(axis.index() + 1, 3);
                let split = found.to_shape(shape).expect("six heads are two times three");
                found = split.sum_axis(Axis(axis.index() + 1));
            }
            assert_close(&found, d, TOLERANCE, &format!("{}: {result}", case.name));
        }
    }
}
