//! Identities of the backward pass.

use super::cases::{TOLERANCE, cases};
use super::naive;
use super::tensors::{Sum, Tensors, assert_all_close, assert_close, assert_same, operands, run};
use etalon_problem::{LazyAttention, Pass};
use ndarray::{ArrayD, Axis};

type Combine = dyn Fn(&ArrayD<f64>, &ArrayD<f64>) -> ArrayD<f64>;

fn backward(problem: &LazyAttention, x: &Tensors<f64>) -> Tensors<f64> {
    run(problem, Pass::Backward, x).expect("the backward pass")
}

/// dlse where the row sees a key, else 0.
fn seen_dlse(problem: &LazyAttention, x: &Tensors<f64>) -> ArrayD<f64> {
    let mut dlse = &x["dlse"] * 0.0;
    for (_, row) in naive::rows(problem, x) {
        dlse[row[0].row()] = x["dlse"][row[0].row()];
    }
    dlse
}

/// Σ of a `[B, Hq, D]` tensor over the query heads of each key head.
fn over_groups(problem: &LazyAttention, by_head: &ArrayD<f64>, like: &ArrayD<f64>) -> ArrayD<f64> {
    let mut sums = like * 0.0;
    for (place, part) in by_head.indexed_iter() {
        sums[[place[0], place[1] / problem.scores.group(), place[2]]] += part;
    }
    sums
}

/// Σ_j dS_ij = dlse_i, as it shows in dk, and in dbias where its width covers all visible pairs.
#[test]
fn gradients_of_the_scores_add_up_to_dlse() {
    let mut covering = 0;
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::Backward, 21);
        let gradients = backward(&problem, &x);
        let dlse = seen_dlse(&problem, &x);
        let rows = dlse.clone().insert_axis(Axis(3));
        let by_head = (&x["q"] * &rows).sum_axis(Axis(2)) * problem.scores.scale();
        let found = gradients["dk"].sum_axis(Axis(2));
        assert_close(&found, &over_groups(&problem, &by_head, &found), TOLERANCE, name);

        let pairs = naive::rows(&problem, &x).into_iter().flat_map(|(_, row)| row);
        if problem.bias.is_some() && pairs.into_iter().all(|pair| pair.distance.is_some()) {
            covering += 1;
            let expected = dlse.sum_axis(Axis(2)).sum_axis(Axis(0));
            assert_close(&gradients["dbias"].sum_axis(Axis(1)), &expected, TOLERANCE, name);
        }
    }
    assert!(covering > 5, "{covering} cases have a bias for all of their pairs");
}

/// Σ_j dv_j = Σ_i (Σ_j e_ij) dout_i.
#[test]
fn gradients_of_the_values_add_up() {
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::Backward, 22);
        let mut ones = x.clone();
        ones.get_mut("v").expect("v").fill(1.0);
        let left = run(&problem, Pass::Forward, &ones).expect(name)["o"].clone();
        let by_head = (&x["dout"] * &left).sum_axis(Axis(2));
        let found = backward(&problem, &x)["dv"].sum_axis(Axis(2));
        assert_close(&found, &over_groups(&problem, &by_head, &found), TOLERANCE, name);
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
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::Backward, 23);
        let (y, d) = (run(&problem, Pass::Forward, &x).expect(name), backward(&problem, &x));
        let heads = problem.scores.extents.key_heads;
        let pairs = [
            [(&d["dq"], &x["q"]), (&d["dk"], &x["k"])],
            [(&d["dv"], &x["v"]), (&x["dout"], &y["o"])],
        ];
        for [left, right] in pairs {
            let (left, right) =
                (by_key_head(left.0, left.1, heads), by_key_head(right.0, right.1, heads));
            left.iter().zip(&right).for_each(|(a, b)| a.assert_equals(b, TOLERANCE, name));
        }
    }
}

#[test]
fn gradients_are_linear_in_the_cotangents() {
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::Backward, 24);
        let other = operands(&problem, Pass::Backward, 25);
        let with = |combine: &Combine| {
            let mut changed = x.clone();
            for cotangent in ["dout", "dlse"] {
                changed.insert(cotangent.to_string(), combine(&x[cotangent], &other[cotangent]));
            }
            backward(&problem, &changed)
        };
        let (one, two) = (with(&|a, _| a.clone()), with(&|_, b| b.clone()));
        let (double, sum) = (with(&|a, _| a * -4.0), with(&|a, b| a + b));
        for (result, one) in &one {
            let what = format!("{name}: {result}");
            assert_same(&double[result], &(one * -4.0), &what);
            assert_close(&sum[result], &(one + &two[result]), TOLERANCE, &what);
        }
    }
}

/// Without dout nothing depends on τ and v, and only the scores have gradients; without dlse a dead
/// row has none at all.
#[test]
fn the_way_through_lse_knows_neither_tau_nor_values() {
    for (name, problem) in cases() {
        let mut x = operands(&problem, Pass::Backward, 26);
        x.get_mut("dout").expect("dout").fill(0.0);
        let mut changed = x.clone();
        changed.get_mut("tau").expect("tau").fill(-0.7);
        changed.get_mut("v").expect("v").fill(-1.0);
        let found = backward(&problem, &x);
        assert_all_close(&backward(&problem, &changed), &found, 0.0, name);
        assert!(found["dv"].iter().chain(&found["dtau"]).all(|&d| d == 0.0), "{name}");
    }
}

#[test]
fn dead_rows_have_no_gradient_but_that_of_lse() {
    for (name, problem) in cases() {
        let mut x = operands(&problem, Pass::Backward, 27);
        x.get_mut("tau").expect("tau").fill(-100.0); // above every n
        let through_lse = backward(&problem, &x);
        let mut without_dout = x.clone();
        without_dout.get_mut("dout").expect("dout").fill(0.0);
        assert_all_close(&through_lse, &backward(&problem, &without_dout), 0.0, name);
        x.remove("dlse");
        assert!(backward(&problem, &x).values().flatten().all(|&d| d == 0.0), "{name}");
    }
}

/// A vector added to every key moves every score of a row alike: dq by what lse asks for, and
/// nothing else but lse.
#[test]
fn shifting_the_keys_moves_dq_by_dlse() {
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::Backward, 28);
        let mut changed = x.clone();
        changed.get_mut("k").expect("k").mapv_inplace(|k| k + 0.75);
        let mut expected = backward(&problem, &x);
        let rows = seen_dlse(&problem, &x).insert_axis(Axis(3));
        let shift = rows * (0.75 * problem.scores.scale());
        *expected.get_mut("dq").expect("dq") += &shift;
        assert_all_close(&backward(&problem, &changed), &expected, TOLERANCE, name);
    }
}
