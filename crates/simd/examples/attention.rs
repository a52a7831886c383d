//! One step of attention, forward and backward, in each storage type; and the log-sum-exp alone.

use etalon_problem::{Attention, AttentionLse, Error, Extents, Mask};
use etalon_simd::{Element, Level, Options, attention, attention_lse};
use half::{bf16, f16};
use ndarray::{Array3, Array4};

/// A wave, different for every tensor, so that no two rows are alike.
fn wave<T: Element>(shape: [usize; 4], speed: f32) -> Array4<T> {
    let mut t = 0.0;
    Array4::from_shape_simple_fn(shape, || {
        t += speed;
        T::from_f32(f32::sin(t))
    })
}

fn step<T: Element>(problem: &Attention, options: &Options) -> Result<[f32; 4], Error> {
    let q = wave::<T>(problem.scores.q_shape(), 0.7);
    let k = wave::<T>(problem.scores.k_shape(), 1.1);
    let v = wave::<T>(problem.v_shape(), 1.3);
    let dout = wave::<T>(problem.o_shape(), 1.7);
    let inputs = attention::Inputs::new(q.view(), k.view(), v.view());
    let out = attention::forward(problem, &inputs, options)?;
    let cotangents = attention::Cotangents::new(dout.view());
    let gradients = attention::backward(problem, &inputs, &out, &cotangents, options)?;

    let lse = AttentionLse { scores: problem.scores.clone() };
    let inputs = attention_lse::Inputs::new(q.view(), k.view());
    let lse_out = attention_lse::forward(&lse, &inputs, options)?;
    let dlse = Array3::ones(lse.scores.row_shape());
    let cotangents = attention_lse::Cotangents { dlse: dlse.view() };
    let lse_gradients =
        attention_lse::backward::<T>(&lse, &inputs, &lse_out, &cotangents, options)?;

    let norm = |x: &Array4<T>| x.iter().map(|x| x.to_f32().powi(2)).sum::<f32>().sqrt();
    Ok([norm(&out.o), norm(&gradients.dq), norm(&gradients.dk), norm(&lse_gradients.dq)])
}

fn main() -> Result<(), Error> {
    let extents =
        Extents { batch: 1, query_heads: 4, key_heads: 2, queries: 200, keys: 200, dim: 64 };
    let problem = Attention::new(extents).mask(Mask::causal()).softcap(20.0);
    for &level in Level::available() {
        let options = Options { level, ..Options::default() };
        println!("{level:>8} f32  {:?}", step::<f32>(&problem, &options)?);
        println!("{level:>8} bf16 {:?}", step::<bf16>(&problem, &options)?);
        println!("{level:>8} f16  {:?}", step::<f16>(&problem, &options)?);
    }
    Ok(())
}
