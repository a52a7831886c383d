//! Identities of the backward pass.

use super::cases::{Case, PASSES, attention_problems, cases};
use super::tensors::{Sum, Tensors, assert_close, assert_same, operands, run};
use super::visible::{TOLERANCE, seeing, weights};
use etalon_problem::{Attention, Pass};
use ndarray::{ArrayD, Axis};

type Combine = dyn Fn(&ArrayD<f64>, &ArrayD<f64>) -> ArrayD<f64>;

/// A problem of attention, its operands, its outputs and its gradients.
struct Example {
    name: String,
    problem: Attention,
    x: Tensors<f64>,
    y: Tensors<f64>,
    gradients: Tensors<f64>,
}

fn examples() -> impl Iterator<Item = Example> {
    attention_problems().into_iter().map(|(name, problem)| {
        let case = problem.clone().into();
        let x = operands(&case, Pass::Backward, 21);
        let y = run(&case, Pass::Forward, &x).expect(&name);
        let gradients = run(&case, Pass::Backward, &x).expect(&name);
        Example { name, problem, x, y, gradients }
    })
}

fn backward(problem: &Attention, x: &Tensors<f64>) -> Tensors<f64> {
    run(&problem.clone().into(), Pass::Backward, x).expect("the backward pass")
}

#[test]
fn gradients_are_linear_in_the_cotangents() {
    for Case { name, problem } in cases() {
        let x = operands(&problem, Pass::Backward, 22);
        let other = operands(&problem, Pass::Backward, 23);
        let with = |combine: &Combine| {
            let mut changed = x.clone();
            for cotangent in ["dout", "dlse"] {
                if let Some(tensor) = changed.get_mut(cotangent) {
                    *tensor = combine(tensor, &other[cotangent]);
                }
            }
            run(&problem, Pass::Backward, &changed).expect(&name)
        };
        let (one, two) = (with(&|a, _| a.clone()), with(&|_, b| b.clone()));
        let (double, none, sum) =
            (with(&|a, _| a * -4.0), with(&|a, _| a * 0.0), with(&|a, b| a + b));
        for (result, one) in &one {
            let what = format!("{name}: {result}");
            assert_same(&double[result], &(one * -4.0), &what);
            assert_same(&none[result], &(one * 0.0), &what);
            assert_close(&sum[result], &(one + &two[result]), 10.0 * TOLERANCE, &what);
        }
    }
}

/// Σ_j dk_j = σ Σ_i dlse_i q_i: adding a vector to every key moves lse alone. (Not with a softcap
/// or sinks, which notice where the scores lie.)
#[test]
fn gradients_of_the_keys_add_up() {
    for Example { name, problem, x, gradients, .. } in examples() {
        if problem.scores.softcap.is_some() || problem.scores.sinks {
            continue;
        }
        let rows = (&x["dlse"] * &seeing(&problem.scores)).insert_axis(Axis(3));
        let by_head = (&x["q"] * &rows).sum_axis(Axis(2)) * problem.scores.scale();
        let mut expected = gradients["dk"].sum_axis(Axis(2)) * 0.0;
        for (place, part) in by_head.indexed_iter() {
            expected[[place[0], place[1] / problem.scores.group(), place[2]]] += part;
        }
        let found = gradients["dk"].sum_axis(Axis(2));
        assert_absolutely_close(&found, &expected, &name);
    }
}

/// Sums that cancel are compared in units of the operands, which are of the size of 1.
fn assert_absolutely_close(found: &ArrayD<f64>, expected: &ArrayD<f64>, what: &str) {
    let error = (found - expected).iter().fold(0.0f64, |worst, x| worst.max(x.abs()));
    assert!(error <= 10.0 * TOLERANCE, "{what}: off by {error:e}");
}

/// Σ_j dv_j = Σ_i dout_i, as far as the weights of row i add up to 1.
#[test]
fn gradients_of_the_values_add_up() {
    for Example { name, problem, x, y, gradients } in examples() {
        let rows = weights(&problem, &x, &y).insert_axis(Axis(3));
        let by_head = (&x["dout"] * &rows).sum_axis(Axis(2));
        let mut expected = gradients["dv"].sum_axis(Axis(2)) * 0.0;
        for (place, part) in by_head.indexed_iter() {
            expected[[place[0], place[1] / problem.scores.group(), place[2]]] += part;
        }
        assert_absolutely_close(&gradients["dv"].sum_axis(Axis(2)), &expected, &name);
    }
}

/// Σ over the query heads of each key head, per batch element, of x y.
fn by_key_head(x: &ArrayD<f64>, y: &ArrayD<f64>, key_heads: usize) -> Vec<Sum> {
    let (batch, heads) = (x.shape()[0], x.shape()[1]);
    let mut sums = vec![Sum::default(); batch * key_heads];
    for ((place, x), y) in x.indexed_iter().zip(y) {
        sums[place[0] * key_heads + place[1] * key_heads / heads].add(x * y);
    }
    sums
}

/// <dq, q> = <dk, k>: the scores know q and k by their product alone. <dv, v> = <dout, o>: o is
/// linear in v. Per key head.
#[test]
fn products_with_their_gradients_agree() {
    for Example { name, problem, x, y, gradients } in examples() {
        let heads = problem.scores.extents.key_heads;
        let pairs = [
            [(&gradients["dq"], &x["q"]), (&gradients["dk"], &x["k"])],
            [(&gradients["dv"], &x["v"]), (&x["dout"], &y["o"])],
        ];
        for [left, right] in pairs {
            let (left, right) =
                (by_key_head(left.0, left.1, heads), by_key_head(right.0, right.1, heads));
            left.iter().zip(&right).for_each(|(a, b)| a.assert_equals(b, TOLERANCE, &name));
        }
    }
}

/// Adding a constant to all scores of a row and to its sink moves its lse by it:
/// Σ_j dbias_ij + its share of dsink = dlse_i, here summed over the rows of a head.
#[test]
fn gradients_of_the_scores_add_up_to_dlse() {
    for Example { name, mut problem, mut x, .. } in examples() {
        let e = problem.scores.extents;
        problem = problem.bias(e.batch, e.query_heads);
        let bias = operands(&problem.clone().into(), Pass::Backward, 24).remove("bias");
        x.insert("bias".to_string(), bias.expect("the problem has a bias"));
        let gradients = backward(&problem, &x);
        let mut rows = seeing(&problem.scores);
        if problem.scores.sinks {
            rows.fill(0.0); // with a sink, every row of a sequence sees something
            for s in problem.scores.sequences() {
                let mut element = rows.index_axis_mut(Axis(0), s.batch);
                element
                    .slice_axis_mut(Axis(1), (s.query_start..s.query_start + s.queries).into())
                    .fill(1.0);
            }
        }
        let expected = (&x["dlse"] * &rows).sum_axis(Axis(2)).sum_axis(Axis(0));
        let mut found = gradients["dbias"].sum_axis(Axis(3)).sum_axis(Axis(2)).sum_axis(Axis(0));
        if let Some(dsinks) = gradients.get("dsinks") {
            found += dsinks;
        }
        assert_absolutely_close(&found, &expected, &name);
        if !problem.scores.sinks {
            let found = gradients["dbias"].sum_axis(Axis(3));
            assert_absolutely_close(&found, &(&x["dlse"] * &rows), &name);
        }
    }
}

/// v + w moves every o alike, which no score notices; k + w moves dq by what lse asks for.
#[test]
fn shifts_of_values_and_keys_do_not_reach_dq() {
    for Example { name, problem, x, gradients, .. } in examples() {
        if problem.scores.sinks {
            continue;
        }
        let mut changed = x.clone();
        changed.get_mut("v").expect("v").mapv_inplace(|v| v + 0.75);
        let found = backward(&problem, &changed);
        for result in ["dq", "dk"] {
            assert_absolutely_close(&found[result], &gradients[result], &name);
        }
        if problem.scores.softcap.is_none() {
            let mut changed = x.clone();
            changed.get_mut("k").expect("k").mapv_inplace(|k| k + 0.75);
            let rows = (&x["dlse"] * &seeing(&problem.scores)).insert_axis(Axis(3));
            let expected = &gradients["dq"] + &(rows * (0.75 * problem.scores.scale()));
            assert_absolutely_close(&backward(&problem, &changed)["dq"], &expected, &name);
        }
    }
}

/// A sink is a key of value 0 whose score is the sink: with one more column of k = v = 0 and the
/// sink in its bias, every pass gives the same, and the column's gradient is the sink's.
#[test]
fn a_sink_is_a_key_without_a_value() {
    use etalon_problem::{Mask, NamedArray, Sequences};
    for (name, problem) in attention_problems() {
        let e = problem.scores.extents;
        if !problem.scores.sinks || problem.scores.sequences != Sequences::Dense {
            continue;
        }
        let mut other = problem.clone().bias(e.batch, e.query_heads);
        other.scores.sinks = false;
        other.scores.extents.keys += 1;
        let mut flags =
            ArrayD::from_elem(vec![e.batch, e.query_heads, e.queries, e.keys + 1], false);
        super::visible::allowed(&problem.scores).iter().for_each(|&place| flags[place] = true);
        flags.index_axis_mut(Axis(3), e.keys).fill(true);
        let data: Vec<bool> = flags.iter().copied().collect();
        other.scores.mask = Mask::Array(NamedArray::new("allowed", flags.shape(), data));
        for pass in PASSES {
            let x = operands(&problem.clone().into(), pass, 25);
            let expected = run(&problem.clone().into(), pass, &x).expect(&name);
            let mut extended = Tensors::new();
            for (operand, tensor) in &x {
                let prefix = operand.trim_end_matches("sinks").trim_end_matches("bias");
                match operand.as_str() {
                    operand if operand.ends_with("sinks") => {
                        let shape = vec![e.batch, e.query_heads, e.queries, e.keys + 1];
                        let mut bias = ArrayD::zeros(shape);
                        if let Some(old) = x.get(&format!("{prefix}bias")) {
                            let mut kept = bias.slice_axis_mut(Axis(3), (0..e.keys).into());
                            kept += old;
                        }
                        for mut element in
                            bias.index_axis_mut(Axis(3), e.keys).axis_iter_mut(Axis(0))
                        {
                            element += &tensor.view().insert_axis(Axis(1));
                        }
                        extended.insert(format!("{prefix}bias"), bias);
                    }
                    operand if operand.ends_with("bias") => {}
                    operand if operand.ends_with(['k', 'v']) => {
                        let mut shape = tensor.shape().to_vec();
                        shape[2] += 1;
                        let mut longer = ArrayD::zeros(shape);
                        longer.slice_axis_mut(Axis(2), (0..e.keys).into()).assign(tensor);
                        extended.insert(operand.to_string(), longer);
                    }
                    operand => drop(extended.insert(operand.to_string(), tensor.clone())),
                }
            }
            let found = run(&other.clone().into(), pass, &extended).expect(&name);
            for (result, expected) in &expected {
                let what = format!("{name}: {result}");
                let found = match result.as_str() {
                    "dsinks" | "gsinks" => {
                        let column = found[&result.replace("sinks", "bias")]
                            .index_axis(Axis(3), e.keys)
                            .to_owned();
                        column.sum_axis(Axis(2)).sum_axis(Axis(0))
                    }
                    "dbias" | "gbias" => continue,
                    result if result.ends_with(['k', 'v']) => {
                        found[result].slice_axis(Axis(2), (0..e.keys).into()).to_owned()
                    }
                    result => found[result].clone(),
                };
                assert_absolutely_close(&found.mapv(at_most), &expected.mapv(at_most), &what);
            }
        }
    }
}

/// −∞ as a number, so that it can be compared by difference.
fn at_most(x: f64) -> f64 {
    x.max(-1e300)
}
