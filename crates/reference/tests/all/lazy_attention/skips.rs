//! Tiles that may be skipped: the claims of the page on a bias that decays with the distance.

use super::cases::{TOLERANCE, extents};
use super::naive::{self, Pair};
use super::tensors::{Tensors, assert_all_close, inputs, operands, run};
use etalon_problem::{Blocking, LazyAttention, Pass};
use etalon_reference::lazy_attention::activity;
use ndarray::{Array4, ArrayD};

const LENGTH: usize = 64;
const TILE: Blocking = Blocking { queries: 16, keys: 16 };

/// Scores fall by a quarter of a unit with each position: after two tiles weights are e⁻⁸ of the
/// largest, and no pair there is active at τ = −0.9.
fn decaying() -> (LazyAttention, Tensors<f64>) {
    let problem = LazyAttention::new(extents([1, 1, 1, LENGTH, LENGTH, 8])).bias(LENGTH);
    let mut x = operands(&problem, Pass::Backward, 91);
    x.get_mut("q").expect("q").mapv_inplace(|q| 0.25 * q);
    for (place, bias) in x.get_mut("bias").expect("bias").indexed_iter_mut() {
        *bias = -0.25 * place[1] as f64;
    }
    x.remove("dlse");
    (problem, x)
}

/// dq and dbias by (E10) and (E13) over the pairs that `keep` keeps.
fn over(x: &Tensors<f64>, problem: &LazyAttention, keep: &dyn Fn(&Pair) -> bool) -> Tensors<f64> {
    let mut dq = &x["q"] * 0.0;
    let mut dbias = &x["bias"] * 0.0;
    for (_, row) in naive::rows(problem, x) {
        let g = |pair: &Pair| -> f64 {
            let elements = 0..problem.value_dim;
            elements.map(|c| x["dout"][[0, 0, pair.i, c]] * x["v"][[0, 0, pair.j, c]]).sum()
        };
        let active = row.iter().filter(|pair| pair.is_active());
        let delta: f64 = active.map(|pair| pair.p * g(pair)).sum();
        for pair in row.iter().filter(|pair| keep(pair)) {
            let d_score = pair.p * (if pair.is_active() { g(pair) } else { 0.0 } - delta);
            for c in 0..problem.scores.extents.dim {
                dq[[0, 0, pair.i, c]] +=
                    problem.scores.scale() * d_score * x["k"][[0, 0, pair.j, c]];
            }
            dbias[[0, pair.i - pair.j]] += d_score;
        }
    }
    Tensors::from([("dq".to_string(), dq), ("dbias".to_string(), dbias)])
}

fn norm(x: &ArrayD<f64>) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

fn in_active_tile(active: &Array4<bool>, pair: &Pair) -> bool {
    active[[pair.b, pair.h, pair.i / TILE.queries, pair.j / TILE.keys]]
}

/// Forward, dv and dtau may leave out tiles without an active pair: their values are not read.
#[test]
fn tiles_without_an_active_pair_may_be_skipped_where_values_enter() {
    let (problem, x) = decaying();
    let active = activity(&problem, &inputs(&x), TILE).expect("activity");
    let skipped = active.iter().filter(|active| !**active).count();
    // Of 4 × 4 tiles six are above the diagonal; more must be skipped than those.
    assert!(skipped > 6 && skipped < 16, "{skipped} tiles are inactive");
    for (_, row) in naive::rows(&problem, &x) {
        assert!(row.iter().all(|pair| in_active_tile(&active, pair) || !pair.is_active()));
    }
}

/// dq and dbias may not. As a whole they hardly change, which no comparison of norms would see; at
/// the distances that only skipped tiles hold, dbias is gone.
#[test]
fn skipping_them_in_dq_and_dbias_is_wrong() {
    let (problem, x) = decaying();
    let active = activity(&problem, &inputs(&x), TILE).expect("activity");
    let exact = run(&problem, Pass::Backward, &x).expect("backward");
    let whole = over(&x, &problem, &|_| true);
    let expected: Tensors<f64> = whole.keys().map(|n| (n.clone(), exact[n].clone())).collect();
    assert_all_close(&whole, &expected, TOLERANCE, "nothing skipped");

    let wrong = over(&x, &problem, &|pair| in_active_tile(&active, pair));
    for result in ["dq", "dbias"] {
        let error = norm(&(&wrong[result] - &exact[result])) / norm(&exact[result]);
        // Far above rounding, far below the usual tolerance of 1 %.
        assert!((1e-8..1e-2).contains(&error), "{result}: {error:e}");
    }
    let far: Vec<usize> = (0..LENGTH).filter(|&d| wrong["dbias"][[0, d]] == 0.0).collect();
    assert!(far.len() > LENGTH / 4, "{} distances are gone", far.len());
    assert!(far.iter().all(|&d| exact["dbias"][[0, d]] != 0.0));

    // Σ_d dbias_d = Σ_i dlse_i = 0 notices.
    let sums = [&exact, &wrong].map(|y| y["dbias"].sum().abs() / norm(&exact["dbias"]));
    assert!(sums[0] < 1e-14 && sums[1] > 1e-8, "{sums:?}");
}

/// The example of the page: P = (0.9, 0.1), τ = −1.
#[test]
fn two_keys_suffice() {
    let problem = LazyAttention::new(extents([1, 1, 1, 1, 2, 1])).bias(2);
    let mut x = operands(&problem, Pass::Backward, 92);
    x.remove("dlse");
    x.get_mut("tau").expect("tau").fill(-1.0);
    x.get_mut("q").expect("q").fill(0.0);
    // The first key is one away, the second aligned.
    x.insert("bias".to_string(), ndarray::arr2(&[[0.0, 9f64.ln()]]).into_dyn());
    let y = run(&problem, Pass::Backward, &x).expect("backward");
    let g = x["dout"][[0, 0, 0, 0]] * x["v"][[0, 0, 0, 0]];
    let (first, second) = (y["dbias"][[0, 1]], y["dbias"][[0, 0]]);
    assert!((first - 0.09 * g).abs() <= TOLERANCE && (second + 0.09 * g).abs() <= TOLERANCE);
}
