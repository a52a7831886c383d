//! Weights that the first sweep of lazy attention on the level sm90a leaves out of lse: those below a rounding of
//! their row's sum. Without such a device the test says that it was skipped.

use etalon_cuda::{Level, Options, Precision, Workspace, run_in};
use etalon_problem::{Extents, LazyAttention, Mask, Pass, Views, ViewsMut};
use half::bf16;
use ndarray::{Array1, Array2, Array3, Array4};

/// The keys of a row whose score is 0; all others lie `gap` below.
const NEAR: usize = 64;

/// lse of every row, and by how much each exceeds lse of the row in f64.
fn errors(workspace: &Workspace, gap: f32) -> Vec<(usize, f64)> {
    let extents = Extents { batch: 1, query_heads: 2, key_heads: 1, queries: 1500, keys: 1500, dim: 64 };
    let problem = LazyAttention::new(extents).bias(extents.keys).mask(Mask::causal());
    // No product: a score is its bias.
    let q = Array4::from_elem(problem.scores.q_shape(), bf16::ZERO);
    let k = Array4::from_elem(problem.scores.k_shape(), bf16::ONE);
    let v = Array4::from_elem(problem.v_shape(), bf16::ONE);
    let bias = Array2::from_shape_fn((2, extents.keys), |(_, d)| if d < NEAR { 0.0 } else { -gap });
    let tau = Array1::from_elem(2, -1.0f32);
    let inputs = Views::new().with("q", &q).with("k", &k).with("v", &v);
    let inputs = inputs.with("bias", &bias).with("tau", &tau);
    let mut o = Array4::from_elem(problem.scores.q_shape(), bf16::NAN);
    let mut lse = Array3::from_elem((1, 2, extents.queries), f32::NAN);
    let mut outputs = ViewsMut::new().with("o", &mut o).with("lse", &mut lse);
    let options = Options { level: Level::Sm90a, precision: Precision::Flash, ..Options::default() };
    run_in(workspace, &problem.into(), Pass::Forward, &inputs, &mut outputs, &options).unwrap();
    drop(outputs);
    lse.indexed_iter()
        .map(|((_, _, i), &lse)| {
            let near = (i + 1).min(NEAR);
            let sum = near as f64 + (i + 1 - near) as f64 * f64::from(-gap).exp();
            (i + 1 - near, f64::from(lse) - sum.ln())
        })
        .collect()
}

#[test]
fn what_is_left_out_of_lse_is_below_a_rounding() {
    let workspace = Workspace::new();
    if workspace.capability(0) != Ok((9, 0)) {
        println!("skipped: no device of compute capability 9.0");
        return;
    }
    let u = 0.5f64.powi(24);
    let roundings = 8.0 * u * (1.0 + (NEAR as f64).ln()); // of the exponential, the logarithm and lse itself
    // So far below that f32 would notice: each counts.
    for (far, error) in errors(&workspace, 15.0) {
        assert!(error.abs() <= roundings, "{far} keys 15 below: lse is off by {error:e}");
    }
    // Each may be left out, and then lse is less by a rounding for each of them at most.
    for gap in [17.5, 19.0, 40.0, 200.0] {
        for (far, error) in errors(&workspace, gap) {
            let lost = far as f64 * u.min((-f64::from(gap)).exp()) / NEAR as f64;
            let bounds = -lost - roundings..=roundings;
            assert!(bounds.contains(&error), "{far} keys {gap} below: lse is off by {error:e}");
        }
    }
}
