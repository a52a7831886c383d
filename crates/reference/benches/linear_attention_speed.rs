//! Time that the oracle takes for a usual size:
//! `cargo bench -p etalon-reference --bench linear_attention_speed`.

use etalon_problem::{Decay, LinearAttention, LinearExtents, slopes};
use etalon_reference::linear_attention::{
    Cotangents, Inputs, SecondCotangents, backward, double_backward, forward,
};
use ndarray::{Array1, Array4};
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let extents = LinearExtents { batch: 1, query_heads: 8, key_heads: 8, tokens: 4096, dim: 64 };
    let problem = LinearAttention::new(extents).decay(Decay::PerHead);
    // Any numbers of the usual size will do: the time does not depend on them.
    let tensor = |step: f64| {
        let shape = problem.q_shape();
        let values = (0..shape.iter().product()).map(|n| (n as f64 * step).sin()).collect();
        Array4::from_shape_vec(shape, values)
    };
    let (q, k, v, dout) = (tensor(0.7)?, tensor(1.1)?, tensor(1.3)?, tensor(1.7)?);
    let g_gamma = Array1::from_vec(slopes::alibi(8)?);
    let inputs = Inputs {
        q: q.view(),
        k: k.view(),
        v: v.view(),
        g_gamma: Some(g_gamma.view()),
        g: None,
        initial_state: None,
    };
    let cotangents = Cotangents { dout: dout.view(), dfinal_state: None };

    let start = Instant::now();
    forward(&problem, &inputs)?;
    let there = start.elapsed();
    backward(&problem, &inputs, &cotangents)?;
    let back = start.elapsed() - there;
    let second = SecondCotangents {
        ddq: Some(k.view()),
        ddk: None,
        ddv: None,
        ddg_gamma: None,
        ddg: None,
        ddinitial_state: None,
        ddscale: None,
        cot_o: None,
        cot_final_state: None,
    };
    double_backward(&problem, &inputs, &cotangents, &second)?;
    let twice = start.elapsed() - there - back;
    println!("forward {there:.2?}, backward {back:.2?}, double backward {twice:.2?}");
    Ok(())
}
