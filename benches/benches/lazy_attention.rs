//! lazy_attention: forward, backward and double backward, with scores without structure and with a bias that falls
//! with the distance, where most tiles are inactive.

use criterion::{Criterion, criterion_group, criterion_main};
use etalon_benches::{flops, square, wave};
use etalon_problem::LazyAttention;
use etalon_simd::{Level, Mode, Options, lazy_attention};
use ndarray::{Array1, Array2};
use std::hint::black_box;

fn all(c: &mut Criterion) {
    let problem = LazyAttention::new(square(8, 2048, 64)).bias(2048);
    let q = wave::<f32, _>(problem.scores.q_shape(), 0.7);
    let k = wave::<f32, _>(problem.scores.k_shape(), 1.1);
    let v = wave::<f32, _>(problem.v_shape(), 1.3);
    let dout = wave::<f32, _>(problem.o_shape(), 1.7);
    let tau = Array1::from_elem(8, -1.0);
    let cotangents = lazy_attention::Cotangents::new(dout.view());
    for &level in Level::available() {
        for (name, slope) in [("dense", 0.0), ("decaying", 0.05)] {
            let name = format!("lazy_attention/causal 1x8x2048x64/f32/{name}/{level}");
            let mut group = c.benchmark_group(name);
            group.sample_size(10);
            let bias = Array2::from_shape_fn((8, 2048), |(_, d)| -slope * d as f32);
            let inputs = lazy_attention::Inputs::new(q.view(), k.view(), v.view(), tau.view());
            let inputs = inputs.bias(bias.view());
            for mode in [Mode::Auto, Mode::ForwardGradient] {
                let options = Options { level, mode, ..Options::default() };
                // With the sum of the forward pass, which has a product more, the backward pass has two
                // products less. As many as if every pair were active.
                let in_forward = usize::from(mode == Mode::ForwardGradient);
                flops(&mut group, &problem.scores, 2 + in_forward);
                group.bench_function(format!("forward {mode:?}"), |b| {
                    b.iter(|| lazy_attention::forward(&problem, black_box(&inputs), &options));
                });
                let out = lazy_attention::forward(&problem, &inputs, &options);
                let out = out.expect("a valid problem");
                flops(&mut group, &problem.scores, 7 - 2 * in_forward);
                group.bench_function(format!("backward {mode:?}"), |b| {
                    b.iter(|| {
                        let inputs = black_box(&inputs);
                        lazy_attention::backward(&problem, inputs, &out, &cotangents, &options)
                    });
                });
            }
            let options = Options { level, ..Options::default() };
            let out = lazy_attention::forward(&problem, &inputs, &options);
            let out = out.expect("a valid problem");
            let second = lazy_attention::SecondCotangents {
                ddq: Some(k.view()),
                ddk: Some(q.view()),
                ddv: Some(v.view()),
                ..Default::default()
            };
            flops(&mut group, &problem.scores, 22);
            group.bench_function("double backward", |b| {
                b.iter(|| {
                    let inputs = black_box(&inputs);
                    lazy_attention::double_backward(
                        &problem,
                        inputs,
                        &out,
                        &cotangents,
                        &second,
                        &options,
                    )
                });
            });
        }
    }
}

criterion_group!(benches, all);
criterion_main!(benches);
