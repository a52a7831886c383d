//! Attention: forward, and backward in both modes, in every storage type and on every level.

use criterion::{Criterion, criterion_group, criterion_main};
use etalon_benches::{flops, square, wave};
use etalon_problem::{Attention, Mask};
use etalon_simd::{Element, Level, Mode, Options, attention};
use half::{bf16, f16};
use std::hint::black_box;

/// Eight heads of 2048, causal: long enough that no tile of keys stays in the L1 cache.
fn problem(dim: usize) -> Attention {
    Attention::new(square(8, 2048, dim)).mask(Mask::causal())
}

fn bench<T: Element>(c: &mut Criterion, level: Level, dim: usize) {
    let problem = problem(dim);
    let q = wave::<T, _>(problem.scores.q_shape(), 0.7);
    let k = wave::<T, _>(problem.scores.k_shape(), 1.1);
    let v = wave::<T, _>(problem.v_shape(), 1.3);
    let dout = wave::<T, _>(problem.o_shape(), 1.7);
    let inputs = attention::Inputs::new(q.view(), k.view(), v.view());
    let cotangents = attention::Cotangents::new(dout.view());
    let options = Options { level, ..Options::default() };
    let name = format!("attention/causal 1x8x2048x{dim}/{}/{level}", T::DTYPE);
    let mut group = c.benchmark_group(name);
    group.sample_size(10);
    flops(&mut group, &problem.scores, 2);
    group.bench_function("forward", |b| {
        b.iter(|| attention::forward(&problem, black_box(&inputs), &options));
    });
    flops(&mut group, &problem.scores, 5);
    let out = attention::forward(&problem, &inputs, &options).expect("a valid problem");
    for mode in [Mode::Separate, Mode::FusedPartials] {
        let options = Options { mode, ..options };
        group.bench_function(format!("backward {mode:?}"), |b| {
            b.iter(|| {
                attention::backward(&problem, black_box(&inputs), &out, &cotangents, &options)
            });
        });
    }
}

fn all(c: &mut Criterion) {
    for &level in Level::available() {
        for dim in [64, 128] {
            bench::<f32>(c, level, dim);
        }
        bench::<bf16>(c, level, 64);
        bench::<f16>(c, level, 64);
    }
}

criterion_group!(benches, all);
criterion_main!(benches);
