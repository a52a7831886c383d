//! Attention: the rows of `docs/benchmarks.md`, each with the flops that it is counted by.

use criterion::{
    BenchmarkGroup, Criterion, criterion_group, criterion_main, measurement::WallTime,
};
use etalon_benches::{flops, square, wave};
use etalon_problem::{Align, Attention, Extents, Mask};
use etalon_simd::{Element, Level, Mode, Options, attention};
use half::{bf16, f16};
use ndarray::{Array3, Array4};
use std::hint::black_box;

/// Operands and outputs of a problem.
struct Subject<T: Element> {
    problem: Attention,
    q: Array4<T>,
    k: Array4<T>,
    v: Array4<T>,
    dout: Array4<T>,
    out: attention::Output<T>,
    options: Options,
}

impl<T: Element> Subject<T> {
    fn new(extents: Extents, mask: Mask, level: Level) -> Self {
        let problem = Attention::new(extents).mask(mask);
        let scores = &problem.scores;
        let mut subject = Subject {
            q: wave(scores.q_shape(), 0.7),
            k: wave(scores.k_shape(), 1.1),
            v: wave(problem.v_shape(), 1.3),
            dout: wave(problem.o_shape(), 1.7),
            out: attention::Output {
                o: Array4::from_elem(problem.o_shape(), T::ZERO),
                lse: Array3::zeros(scores.row_shape()),
            },
            options: Options { level, ..Options::default() },
            problem,
        };
        let out = attention::forward(&subject.problem, &subject.inputs(), &subject.options);
        subject.out = out.expect("a valid problem");
        subject
    }

    fn inputs(&self) -> attention::Inputs<'_, T> {
        attention::Inputs::new(self.q.view(), self.k.view(), self.v.view())
    }

    fn forward(&self, group: &mut BenchmarkGroup<'_, WallTime>, name: &str) {
        flops(group, &self.problem.scores, 2);
        group.bench_function(name, |b| {
            b.iter(|| attention::forward(&self.problem, black_box(&self.inputs()), &self.options));
        });
    }

    fn backward(&self, group: &mut BenchmarkGroup<'_, WallTime>, name: &str, mode: Mode) {
        let cotangents = attention::Cotangents::new(self.dout.view());
        let options = Options { mode, ..self.options };
        flops(group, &self.problem.scores, 5);
        group.bench_function(name, |b| {
            b.iter(|| {
                let inputs = black_box(self.inputs());
                attention::backward(&self.problem, &inputs, &self.out, &cotangents, &options)
            });
        });
    }

    fn double_backward(&self, group: &mut BenchmarkGroup<'_, WallTime>, name: &str) {
        let cotangents = attention::Cotangents::new(self.dout.view());
        let second = attention::SecondCotangents {
            ddq: Some(self.q.view()),
            ddk: Some(self.k.view()),
            ddv: Some(self.v.view()),
            ..Default::default()
        };
        flops(group, &self.problem.scores, 19);
        group.bench_function(name, |b| {
            b.iter(|| {
                let (inputs, options) = (black_box(self.inputs()), &self.options);
                let (problem, out) = (&self.problem, &self.out);
                attention::double_backward(problem, &inputs, out, &cotangents, &second, options)
            });
        });
    }
}

fn group<'c>(c: &'c mut Criterion, name: &str) -> BenchmarkGroup<'c, WallTime> {
    let mut group = c.benchmark_group(format!("attention/{name}"));
    group.sample_size(10);
    group
}

/// Every level: 1 × 8 × N × D, causal; and the second order.
fn shapes(c: &mut Criterion) {
    for &level in Level::available() {
        for (length, dim) in [(2048, 128), (2048, 64), (4096, 64)] {
            let mut group = group(c, &format!("causal 1x8x{length}x{dim}/{level}"));
            let subject = Subject::<f32>::new(square(8, length, dim), Mask::causal(), level);
            subject.forward(&mut group, "forward");
            subject.backward(&mut group, "backward separate", Mode::Separate);
            subject.backward(&mut group, "backward fused", Mode::FusedPartials);
        }
        let mut group = group(c, &format!("causal 1x8x1024x64/{level}"));
        let subject = Subject::<f32>::new(square(8, 1024, 64), Mask::causal(), level);
        subject.double_backward(&mut group, "double backward");
    }
}

/// A window of 257 keys of 8192.
fn window(c: &mut Criterion) {
    let mut group = group(c, "1x8x8192x64");
    let window = Mask::Window { left: Some(256), right: Some(0), align: Align::default() };
    for (name, mask) in [("causal", Mask::causal()), ("window", window)] {
        let subject = Subject::<f32>::new(square(8, 8192, 64), mask, Level::best());
        subject.forward(&mut group, &format!("forward {name}"));
        subject.backward(&mut group, &format!("backward {name}"), Mode::Auto);
    }
}

/// Storage in two bytes.
fn storage(c: &mut Criterion) {
    fn add<T: Element>(group: &mut BenchmarkGroup<'_, WallTime>) {
        let subject = Subject::<T>::new(square(8, 2048, 64), Mask::causal(), Level::best());
        subject.forward(group, &format!("forward {}", T::DTYPE));
        subject.backward(group, &format!("backward {}", T::DTYPE), Mode::Auto);
    }
    let mut group = group(c, "causal 1x8x2048x64");
    add::<f32>(&mut group);
    add::<bf16>(&mut group);
    add::<f16>(&mut group);
}

/// One long sequence against many short ones of as many flops, and grouped heads.
fn heads(c: &mut Criterion) {
    for (heads, length) in [(1, 16384), (16, 4096)] {
        let mut group = group(c, &format!("causal 1x{heads}x{length}x64"));
        let subject = Subject::<f32>::new(square(heads, length, 64), Mask::causal(), Level::best());
        subject.forward(&mut group, "forward");
        subject.backward(&mut group, "backward", Mode::Auto);
    }
    for key_heads in [8, 1] {
        let mut group = group(c, &format!("causal 1x8x2048x64, {key_heads} key heads"));
        let extents = Extents { key_heads, ..square(8, 2048, 64) };
        let subject = Subject::<f32>::new(extents, Mask::causal(), Level::best());
        subject.forward(&mut group, "forward");
        subject.backward(&mut group, "backward", Mode::Auto);
    }
    let mut group = group(c, "causal 4x16x4096x128");
    let extents = Extents { batch: 4, ..square(16, 4096, 128) };
    let subject = Subject::<f32>::new(extents, Mask::causal(), Level::best());
    subject.forward(&mut group, "forward");
    subject.backward(&mut group, "backward", Mode::Auto);
}

criterion_group!(benches, shapes, window, storage, heads);
criterion_main!(benches);
