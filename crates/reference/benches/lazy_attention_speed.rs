//! Time that the oracle of lazy attention takes for a usual size:
//! `cargo bench -p etalon-reference --bench lazy_attention_speed`.

use etalon_problem::{Blocking, Extents, LazyAttention};
use etalon_reference::lazy_attention::{Cotangents, Inputs, backward, forward, stats};
use ndarray::{Array, Dimension, ShapeBuilder};
use std::time::Instant;

/// Any numbers of the usual size will do: the time hardly depends on them.
fn tensor<D: Dimension>(shape: impl ShapeBuilder<Dim = D>, step: f64) -> Array<f64, D> {
    let mut n = 0.0;
    Array::from_shape_simple_fn(shape, || {
        n += step;
        f64::sin(n)
    })
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let extents =
        Extents { batch: 1, query_heads: 8, key_heads: 8, queries: 1024, keys: 1024, dim: 64 };
    let problem = LazyAttention::new(extents).bias(512);
    let q = tensor(problem.scores.q_shape(), 0.7);
    let k = tensor(problem.scores.k_shape(), 1.1);
    let v = tensor(problem.v_shape(), 1.3);
    let dout = tensor(problem.o_shape(), 1.7);
    let bias = tensor([8, 512], 0.9);
    let tau = Array::from_elem(8, -0.9);
    let inputs =
        Inputs { q: q.view(), k: k.view(), v: v.view(), bias: Some(bias.view()), tau: tau.view() };

    let start = Instant::now();
    forward(&problem, &inputs)?;
    let there = start.elapsed();
    backward(&problem, &inputs, &Cotangents { dout: dout.view(), dlse: None })?;
    let back = start.elapsed() - there;
    println!("forward {there:.2?}, backward {back:.2?}");
    println!("{:#?}", stats(&problem, &inputs, Blocking::new(64, 64))?);
    Ok(())
}
