//! linear_cross_entropy: forward, forward with both gradients, and the second order along h and w, with a
//! budget for one pass and with one for which logits are computed again.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use etalon_benches::wave;
use etalon_problem::LinearCrossEntropy;
use etalon_simd::{Level, Options, linear_cross_entropy};
use ndarray::{Array1, arr0};
use std::hint::black_box;

fn all(c: &mut Criterion) {
    let problem = LinearCrossEntropy::new(512, 512, 16_000);
    let h = wave::<f32, _>(problem.h_shape(), 0.7);
    let w = wave::<f32, _>(problem.w_shape(), 1.1);
    let targets: Array1<i64> = (0..512).map(|i| i * 31).collect();
    let inputs = linear_cross_entropy::Inputs::new(h.view(), w.view(), targets.view());
    let dloss = arr0(1.0).into_dyn();
    let cotangents = linear_cross_entropy::Cotangents::default().dloss(dloss.view());
    let second = linear_cross_entropy::SecondCotangents {
        ddh: Some(h.view()),
        ddw: Some(w.view()),
        ..linear_cross_entropy::SecondCotangents::default()
    };
    let product = 2 * 512 * 512 * 16_000;
    for &level in Level::available() {
        let mut group =
            c.benchmark_group(format!("linear_cross_entropy/512x512x16000/f32/{level}"));
        group.sample_size(10);
        group.throughput(Throughput::Elements(product));
        let options = Options { level, ..Options::default() };
        group.bench_function("forward", |b| {
            b.iter(|| linear_cross_entropy::forward(&problem, black_box(&inputs), &options));
        });
        for megabytes in [64, 8] {
            let options = Options { memory_budget: megabytes << 20, ..options };
            group.throughput(Throughput::Elements(3 * product));
            group.bench_function(format!("forward_backward, {megabytes} MiB"), |b| {
                b.iter(|| {
                    let inputs = black_box(&inputs);
                    linear_cross_entropy::forward_backward(&problem, inputs, &cotangents, &options)
                });
            });
            group.throughput(Throughput::Elements(7 * product));
            group.bench_function(format!("double_backward, {megabytes} MiB"), |b| {
                b.iter(|| {
                    let (x, dy) = (black_box(&inputs), &cotangents);
                    linear_cross_entropy::double_backward(&problem, x, dy, &second, &options)
                });
            });
        }
    }
}

criterion_group!(benches, all);
criterion_main!(benches);
