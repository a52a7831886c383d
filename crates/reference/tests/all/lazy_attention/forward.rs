//! Identities of the forward pass, and softmax attention as a special case.

use super::cases::{TOLERANCE, cases, extents};
use super::naive;
use super::tensors::{Tensors, assert_all_close, assert_close, assert_same, operands, run};
use etalon_problem::{Attention, LazyAttention, Mask, Pass};
use etalon_reference::attention;
use ndarray::{Array4, ArrayD};

fn forward(problem: &LazyAttention, x: &Tensors<f64>) -> Tensors<f64> {
    run(problem, Pass::Forward, x).expect("the forward pass")
}

/// Softmax attention with the bias by distance written out: o, lse, and all gradients; dbias as
/// the sums along the diagonals.
fn softmax_attention(problem: &LazyAttention, x: &Tensors<f64>) -> Tensors<f64> {
    let e = problem.scores.extents;
    let plain = Attention { scores: problem.scores.clone(), value_dim: problem.value_dim };
    let plain = plain.bias(e.batch, e.query_heads);
    let pairs: Vec<_> = naive::rows(problem, x).into_iter().flat_map(|(_, row)| row).collect();
    let mut bias = Array4::zeros((e.batch, e.query_heads, e.queries, e.keys));
    for (pair, d) in pairs.iter().filter_map(|pair| Some((pair, pair.distance?))) {
        bias[[pair.b, pair.h, pair.i, pair.j]] = x["bias"][[pair.h, d]];
    }
    let view = |name: &str| x[name].view().into_dimensionality().expect("four axes");
    let inputs = attention::Inputs {
        q: view("q"),
        k: view("k"),
        v: view("v"),
        sinks: None,
        bias: Some(bias.view()),
    };
    let dlse = x["dlse"].view().into_dimensionality().expect("three axes");
    let cotangents = attention::Cotangents { dout: view("dout"), dlse: Some(dlse) };
    let y = attention::forward(&plain, &inputs).expect("forward");
    let d = attention::backward(&plain, &inputs, &cotangents).expect("backward");
    let mut results = Tensors::from([
        ("o".to_string(), y.o.into_dyn()),
        ("lse".to_string(), y.lse.into_dyn()),
        ("dq".to_string(), d.dq.into_dyn()),
        ("dk".to_string(), d.dk.into_dyn()),
        ("dv".to_string(), d.dv.into_dyn()),
    ]);
    if let Some(bias) = x.get("bias") {
        let (mut sums, by_pair) = (bias * 0.0, d.dbias.expect("a gradient"));
        for (pair, d) in pairs.iter().filter_map(|pair| Some((pair, pair.distance?))) {
            sums[[pair.h, d]] += by_pair[[pair.b, pair.h, pair.i, pair.j]];
        }
        results.insert("dbias".to_string(), sums);
    }
    results
}

/// The mean of the visible values of each row: `[B, Hq, N, E]`.
fn mean_values(problem: &LazyAttention, x: &Tensors<f64>) -> ArrayD<f64> {
    let mut means = ArrayD::zeros(problem.o_shape().to_vec());
    for pair in naive::rows(problem, x).into_iter().flat_map(|(_, row)| row) {
        for e in 0..problem.value_dim {
            let value = x["v"][[pair.b, pair.kh, pair.j, e]];
            means[[pair.b, pair.h, pair.i, e]] += value / pair.n;
        }
    }
    means
}

#[test]
fn without_tau_it_is_softmax_attention() {
    for (name, problem) in cases() {
        let mut x = operands(&problem, Pass::Backward, 11);
        x.get_mut("tau").expect("tau").fill(0.0);
        let mut found = forward(&problem, &x);
        found.extend(run(&problem, Pass::Backward, &x).expect(name));
        found.remove("dtau");
        assert_all_close(&found, &softmax_attention(&problem, &x), TOLERANCE, name);
    }
}

/// Above 0 it adds τ times the mean value, and dtau is what that says.
#[test]
fn above_zero_it_adds_the_mean_value() {
    for (name, problem) in cases() {
        let mut x = operands(&problem, Pass::Backward, 12);
        let tau = 0.75; // any number above 0
        x.get_mut("tau").expect("tau").fill(tau);
        let means = mean_values(&problem, &x);
        let expected = softmax_attention(&problem, &x);
        let found = forward(&problem, &x);
        assert_close(&found["o"], &(&expected["o"] + &(&means * tau)), TOLERANCE, name);
        assert_same(&found["lse"], &expected["lse"], name);

        let found = run(&problem, Pass::Backward, &x).expect(name);
        for result in ["dq", "dk", "dbias"] {
            if let Some(expected) = expected.get(result) {
                assert_close(&found[result], expected, TOLERANCE, &format!("{name}: {result}"));
            }
        }
        let mut dtau = &x["tau"] * 0.0;
        for (place, &dout) in x["dout"].indexed_iter() {
            dtau[[place[1]]] += dout * means[&place];
        }
        assert_close(&found["dtau"], &dtau, TOLERANCE, name);
    }
}

/// Σ_j e_ij, as a value element that is 1 everywhere returns it, and the number of active pairs.
#[test]
fn what_is_left_of_the_weights() {
    for (name, problem) in cases() {
        let mut x = operands(&problem, Pass::Forward, 13);
        x.get_mut("v").expect("v").fill(1.0);
        let left = forward(&problem, &x)["o"].clone();
        for (_, row) in naive::rows(&problem, &x) {
            let [b, h, i] = row[0].row();
            let (left, tau, n) = (left[[b, h, i, 0]], x["tau"][[h]], row[0].n);
            if tau >= 0.0 {
                assert!((left - (1.0 + tau)).abs() <= TOLERANCE, "{name}: {left}");
                continue;
            }
            assert!((0.0..=1.0).contains(&left), "{name}: {left}");
            let active = row.iter().filter(|pair| pair.is_active()).count() as f64;
            assert!(active < n / tau.abs(), "{name}: {active} of {n} with {tau}");
            let largest = row.iter().fold(0.0, |max, pair| pair.p.max(max));
            assert_eq!(left == 0.0, largest <= tau.abs() / n, "{name}: dead or not");
            assert!(left > 0.0 || tau.abs() >= 1.0, "{name}: dead above −1");
        }
    }
}

/// A smaller τ filters more: e falls and what is filtered stays filtered.
#[test]
fn weights_are_monotone_in_tau() {
    for (name, problem) in cases() {
        let mut x = operands(&problem, Pass::Forward, 14);
        x.get_mut("v").expect("v").mapv_inplace(f64::abs);
        let o = forward(&problem, &x)["o"].clone();
        x.get_mut("tau").expect("tau").mapv_inplace(|tau| tau - 0.25);
        let less = forward(&problem, &x)["o"].clone();
        assert!(o.iter().zip(&less).all(|(o, less)| less <= o), "{name}");
        x.get_mut("tau").expect("tau").fill(-1e3);
        assert!(forward(&problem, &x)["o"].iter().all(|&o| o == 0.0), "{name}");
    }
}

/// At τ = −1 a row of one key, and one of equal scores, lies on the kink: inactive, o = 0, and no
/// gradient but that of lse.
#[test]
fn the_kink_is_inactive() {
    let problem = LazyAttention::new(extents([1, 1, 1, 5, 5, 2])).bias(2);
    let mut x = operands(&problem, Pass::Backward, 15);
    x.get_mut("tau").expect("tau").fill(-1.0);
    let y = forward(&problem, &x);
    assert!(y["o"].iter().take(2).all(|&o| o == 0.0), "row 1 sees one key: {}", y["o"]);
    assert!(y["o"].iter().skip(2).any(|&o| o != 0.0));

    x.get_mut("q").expect("q").fill(0.0);
    x.get_mut("bias").expect("bias").fill(0.0);
    assert!(forward(&problem, &x)["o"].iter().all(|&o| o == 0.0));
    let d = run(&problem, Pass::Backward, &x).expect("backward");
    assert!(d["dv"].iter().chain(&d["dtau"]).all(|&d| d == 0.0));
    x.remove("dlse");
    let d = run(&problem, Pass::Backward, &x).expect("backward");
    assert!(d.values().flatten().all(|&d| d == 0.0), "{d:?}");

    // A hair above −1 every pair is active again: 2⁻⁴⁰/5 is far above 2⁻⁵³.
    x.get_mut("tau").expect("tau").fill(-1.0 + (-40f64).exp2());
    assert!(forward(&problem, &x)["o"].iter().all(|&o| o != 0.0));
}

/// A single visible key has the weight 1 + τ, exactly, if it is active.
#[test]
fn a_single_key_weighs_one() {
    let problem = LazyAttention::new(extents([2, 2, 1, 5, 5, 3])).mask(Mask::window(0, 0));
    let mut x = operands(&problem, Pass::Forward, 16);
    for (tau, weight) in [(-0.75, 0.25), (0.0, 1.0), (0.5, 1.5), (-1.0, 0.0), (-1.5, 0.0)] {
        x.get_mut("tau").expect("tau").fill(tau);
        for (place, &o) in forward(&problem, &x)["o"].indexed_iter() {
            let value = x["v"][[place[0], 0, place[2], place[3]]];
            assert_eq!(o, weight * value);
        }
    }
}

/// A constant added to every bias in reach moves lse alone.
#[test]
fn shifting_the_bias_shifts_lse_alone() {
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::Backward, 17);
        let rows = naive::rows(&problem, &x);
        if rows.iter().any(|(_, row)| row.iter().any(|pair| pair.distance.is_none())) {
            continue;
        }
        let mut changed = x.clone();
        if let Some(bias) = changed.get_mut("bias") {
            *bias += 0.5;
        }
        let (y, found) = (forward(&problem, &x), forward(&problem, &changed));
        assert_close(&found["o"], &y["o"], TOLERANCE, name);
        let shift = if x.contains_key("bias") { 0.5 } else { 0.0 };
        assert_close(&found["lse"], &(&y["lse"] + shift), TOLERANCE, name);
        let expected = run(&problem, Pass::Backward, &x).expect(name);
        let found = run(&problem, Pass::Backward, &changed).expect(name);
        assert_all_close(&found, &expected, TOLERANCE, name);
    }
}

/// Adding a vector to every value moves o by what is left of the weights times it, and o is
/// homogeneous in v, bit for bit under a power of two.
#[test]
fn outputs_are_linear_in_the_values() {
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::Forward, 18);
        let o = forward(&problem, &x)["o"].clone();
        let with = |change: &dyn Fn(f64) -> f64| {
            let mut changed = x.clone();
            changed.get_mut("v").expect("v").mapv_inplace(change);
            forward(&problem, &changed)["o"].clone()
        };
        assert_same(&with(&|v| -2.0 * v), &o.mapv(|o| -2.0 * o), name);
        assert_close(&with(&|v| v + 3.0), &(&o + &(with(&|_| 1.0) * 3.0)), TOLERANCE, name);
    }
}

/// lse knows neither τ nor the values.
#[test]
fn lse_is_that_of_every_visible_key() {
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::Forward, 19);
        let mut changed = x.clone();
        changed.get_mut("tau").expect("tau").fill(-0.6);
        changed.get_mut("v").expect("v").fill(0.0);
        assert_same(&forward(&problem, &changed)["lse"], &forward(&problem, &x)["lse"], name);
    }
}
