//! attention_lse: forward, and backward in its three modes.

use criterion::{Criterion, criterion_group, criterion_main};
use etalon_benches::{flops, square, wave};
use etalon_problem::{AttentionLse, Mask};
use etalon_simd::{Level, Mode, Options, attention_lse};
use std::hint::black_box;

fn all(c: &mut Criterion) {
    let problem = AttentionLse::new(square(8, 2048, 64)).mask(Mask::causal());
    let q = wave::<f32, _>(problem.scores.q_shape(), 0.7);
    let k = wave::<f32, _>(problem.scores.k_shape(), 1.1);
    let dlse = wave::<f32, _>(problem.scores.row_shape(), 1.3);
    let inputs = attention_lse::Inputs::new(q.view(), k.view());
    let cotangents = attention_lse::Cotangents { dlse: dlse.view() };
    for &level in Level::available() {
        let mut group = c.benchmark_group(format!("attention_lse/causal 1x8x2048x64/f32/{level}"));
        group.sample_size(10);
        for mode in [Mode::Separate, Mode::FusedPartials, Mode::ForwardGradient] {
            let options = Options { level, mode, ..Options::default() };
            // With the gradient the forward pass has a second product, and the backward pass one
            // less.
            let in_forward = usize::from(mode == Mode::ForwardGradient);
            flops(&mut group, &problem.scores, 1 + in_forward);
            group.bench_function(format!("forward {mode:?}"), |b| {
                b.iter(|| attention_lse::forward(&problem, black_box(&inputs), &options));
            });
            let out = attention_lse::forward(&problem, &inputs, &options).expect("a valid problem");
            flops(&mut group, &problem.scores, 3 - in_forward);
            group.bench_function(format!("backward {mode:?}"), |b| {
                b.iter(|| {
                    let inputs = black_box(&inputs);
                    attention_lse::backward::<f32>(&problem, inputs, &out, &cotangents, &options)
                });
            });
        }
    }
}

criterion_group!(benches, all);
criterion_main!(benches);
