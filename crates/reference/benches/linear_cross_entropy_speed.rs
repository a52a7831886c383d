//! Time that the oracle takes for a usual size:
//! `cargo bench -p etalon-reference --bench linear_cross_entropy_speed`.

use etalon_problem::LinearCrossEntropy;
use etalon_reference::linear_cross_entropy::{Cotangents, Inputs, Wanted, backward, forward};
use ndarray::{Array1, Array2, arr0};
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for problem in [
        LinearCrossEntropy::new(512, 512, 32000),
        LinearCrossEntropy::new(512, 512, 32000).softcap(30.0).label_smoothing(0.1),
    ] {
        // Any numbers of the usual size will do: the time does not depend on them.
        let h = Array2::from_shape_fn(problem.h_shape(), |(i, j)| ((i * 512 + j) as f64).sin());
        let w = Array2::from_shape_fn(problem.w_shape(), |(v, j)| {
            0.1 * ((v * 512 + j) as f64 * 0.7).cos()
        });
        let targets = Array1::from_shape_fn(problem.tokens, |i| (i * 61 % problem.vocab) as i64);
        let inputs = Inputs {
            h: h.view(),
            w: w.view(),
            bias: None,
            targets: targets.view(),
            class_weights: None,
            token_weights: None,
        };
        let start = Instant::now();
        let loss = forward(&problem, &inputs)?.loss[[]];
        let there = start.elapsed();
        let one = arr0(1.0);
        let dloss = Some(one.view().into_dyn());
        let cotangents = Cotangents { dloss, dlse: None, dlogprob: None, dentropy: None };
        backward(&problem, &inputs, &cotangents, Wanted::ALL)?;
        let back = start.elapsed() - there;
        let cap = problem.softcap;
        println!("cap {cap:?}: loss {loss:.4}, forward {there:.2?}, backward {back:.2?}");
    }
    Ok(())
}
