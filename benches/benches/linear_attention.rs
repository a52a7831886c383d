//! Linear attention: the rows of `docs/benchmarks.md`, each with the flops that it is counted by.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use etalon_benches::wave;
use etalon_problem::{Decay, LinearAttention, LinearExtents, Pass};
use etalon_simd::{Options, Workspace, linear_attention};
use ndarray::{Array1, Array3, Array4};
use std::hint::black_box;

/// C: tokens of a chunk.
fn chunk(problem: &LinearAttention) -> usize {
    let plan = linear_attention::plan::<f32>(problem, Pass::Forward, &Options::default());
    plan.expect("a valid problem").blocking.queries
}

/// The flops that are counted: 4DE + C (D + E) for a token forward, 2.5 times that backward.
fn flops(problem: &LinearAttention) -> u64 {
    let (e, width) = (&problem.extents, problem.value_dim);
    (e.query_heads * e.tokens * (4 * e.dim * width + chunk(problem) * (e.dim + width))) as u64
}

/// 36DE + C (8D + 7E) for a token.
fn second_flops(problem: &LinearAttention) -> u64 {
    let (e, width) = (&problem.extents, problem.value_dim);
    let of_token = 36 * e.dim * width + chunk(problem) * (8 * e.dim + 7 * width);
    (e.query_heads * e.tokens * of_token) as u64
}

fn passes(c: &mut Criterion) {
    let mut group = c.benchmark_group("linear_attention 8 heads of 4096 × 64");
    let extents = LinearExtents { batch: 1, query_heads: 8, key_heads: 8, tokens: 4096, dim: 64 };
    for (name, decay) in [
        ("no decay", Decay::None),
        ("decay per head", Decay::PerHead),
        ("decay per token", Decay::PerToken),
    ] {
        let problem = LinearAttention::new(extents).decay(decay);
        let [q, k, v, dout] = [0.7, 1.1, 1.3, 1.7].map(|t| wave::<f32, _>(problem.q_shape(), t));
        let g_gamma = Array1::linspace(-0.1, 0.0, 8);
        let g = Array3::from_elem(problem.g_shape(), -0.05);
        let mut inputs = linear_attention::Inputs::new(q.view(), k.view(), v.view());
        inputs.g_gamma = (decay == Decay::PerHead).then(|| g_gamma.view());
        inputs.g = (decay == Decay::PerToken).then(|| g.view());
        let cotangents = linear_attention::Cotangents::new(dout.view());
        let options = Options::default();
        group.throughput(Throughput::Elements(flops(&problem)));
        group.bench_function(format!("forward, {name}"), |b| {
            b.iter(|| linear_attention::forward(&problem, black_box(&inputs), &options));
        });
        group.throughput(Throughput::Elements(flops(&problem) * 5 / 2));
        group.bench_function(format!("backward, {name}"), |b| {
            b.iter(|| linear_attention::backward(&problem, &inputs, &cotangents, &options));
        });
        let second = linear_attention::SecondCotangents {
            ddq: Some(k.view()),
            ddk: Some(v.view()),
            ddv: Some(dout.view()),
            ddg_gamma: (decay == Decay::PerHead).then(|| g_gamma.view()),
            ddg: (decay == Decay::PerToken).then(|| g.view()),
            cot_o: Some(q.view()),
            ..Default::default()
        };
        group.throughput(Throughput::Elements(second_flops(&problem)));
        group.bench_function(format!("double_backward, {name}"), |b| {
            b.iter(|| {
                linear_attention::double_backward(&problem, &inputs, &cotangents, &second, &options)
            });
        });
    }
}

fn step(c: &mut Criterion) {
    let mut group = c.benchmark_group("linear_attention, a step of 16 heads of 128 × 128");
    let extents = LinearExtents { batch: 1, query_heads: 16, key_heads: 16, tokens: 1, dim: 128 };
    let problem = LinearAttention::new(extents);
    let [q, k, v, mut o] = [0.7, 1.1, 1.3, 1.7].map(|t| wave::<f32, _>([1, 16, 128], t));
    let mut state: Array4<f32> = wave(problem.state_shape(), 1.9);
    let (q, k, v) = (q.view(), k.view(), v.view());
    let inputs =
        linear_attention::StepInputs { q, k, v, g_gamma: None, g: None, initial_state: None };
    let (workspace, options) = (Workspace::new(), Options::default());
    // Read and written.
    group.throughput(Throughput::Bytes(2 * (state.len() * size_of::<f32>()) as u64));
    group.bench_function("states", |b| {
        b.iter(|| {
            let (o, final_state) = (Some(o.view_mut()), Some(state.view_mut()));
            let place = linear_attention::StepOutputMut { o, final_state };
            linear_attention::step_into(&workspace, &problem, &inputs, place, &options)
        });
    });
}

criterion_group!(benches, passes, step);
criterion_main!(benches);
