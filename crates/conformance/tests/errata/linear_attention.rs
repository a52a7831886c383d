//! The figures of `docs/errata.md` on linear attention: what each mistake costs on a stated problem.
//! The mistakes are mutants of the zoo; the truth is the reference's.

use etalon_conformance::generate::Stream;
use etalon_conformance::tensor::{Tensor, Tensors};
use etalon_conformance::tier::{Hints, Request};
use etalon_conformance::tiers::{ask, oracle};
use etalon_conformance::zoo::{Host, Mutant, mutant};
use etalon_problem::{Decay, Dtype, LinearAttention, LinearExtents, Pass, Problem};
use ndarray::{ArrayD, IxDyn};

/// One head of 256 tokens with D = E = 64, which the host takes in chunks of 16.
fn problem(tokens: usize) -> LinearAttention {
    let extents = LinearExtents { batch: 1, query_heads: 1, key_heads: 1, tokens, dim: 64 };
    LinearAttention::new(extents)
}

/// The error of an output of a mutant: root mean square of the difference over that of the truth, in
/// per cent. Inputs are normal in f32; log-decays are −1/8.
fn cost(mutant: Mutant, problem: &LinearAttention, pass: Pass, name: &str) -> f64 {
    let problem = Problem::from(problem.clone());
    let mut inputs = Tensors::new();
    for operand in problem.operands(pass).iter().filter(|x| x.role.is_given()) {
        let stream = Stream::new(0, operand.name);
        let mut at = 0;
        let values = ArrayD::from_shape_simple_fn(IxDyn(&operand.shape), || {
            at += 1;
            if operand.name.starts_with("g") { -0.125 } else { stream.normal(at) }
        });
        inputs.insert(operand.name.to_string(), Tensor::round(&values, Dtype::F32));
    }
    let hints = Hints::default();
    let request = Request { problem: &problem, pass, dtype: Dtype::F32, inputs: &inputs, hints };
    let got = ask(&Host::mutant(mutant), &request).unwrap()[name].to_f64(name).unwrap();
    let exact = oracle(&request).unwrap()[name].to_f64(name).unwrap();
    let difference: f64 = got.iter().zip(&exact).map(|(a, b)| (a - b) * (a - b)).sum();
    100.0 * (difference / exact.iter().map(|x| x * x).sum::<f64>()).sqrt()
}

/// Fails unless a figure is the one in the document, in whole per cent.
#[track_caller]
fn figure(found: f64, documented: f64) {
    assert_eq!(found.round(), documented, "found {found} %");
}

#[test]
fn the_state_is_read_before_it_is_advanced() {
    figure(cost(mutant("state-before-use").unwrap(), &problem(256), Pass::Forward, "o"), 35.0);
}

#[test]
fn the_gradient_of_the_state_is_read_before_it_is_advanced() {
    let cost =
        |name| cost(mutant("cotangent-before-use").unwrap(), &problem(256), Pass::Backward, name);
    let [dk, dv] = ["dk", "dv"].map(cost);
    figure(dk, 35.0);
    figure(dv, 34.0);
}

#[test]
fn dk_is_not_its_transpose() {
    figure(
        cost(mutant("state-not-transposed").unwrap(), &problem(256), Pass::Backward, "dk"),
        139.0,
    );
}

#[test]
fn dq_needs_all_its_tiles() {
    figure(cost(mutant("queries-of-diagonal").unwrap(), &problem(256), Pass::Backward, "dq"), 22.0);
}

#[test]
fn both_parts_share_their_chunks() {
    let cost =
        |name| cost(mutant("chunks-of-two-sizes").unwrap(), &problem(256), Pass::Backward, name);
    let [dq, dk, dv] = ["dq", "dk", "dv"].map(cost);
    figure(dq, 18.0);
    figure(dk, 18.0);
    figure(dv, 17.0);
}

#[test]
fn a_tail_has_its_own_length() {
    // 250 tokens: 15 chunks and ten tokens.
    let dropped =
        cost(mutant("tail-of-tokens-dropped").unwrap(), &problem(250), Pass::Forward, "o");
    let decayed = |tokens| problem(tokens).decay(Decay::PerHead).final_state();
    let too_often =
        cost(mutant("tail-decays-as-chunk").unwrap(), &decayed(250), Pass::Forward, "final_state");
    let one_short =
        cost(mutant("query-decay-one-short").unwrap(), &decayed(256), Pass::Forward, "o");
    figure(dropped, 29.0);
    figure(too_often, 53.0);
    figure(one_short, 6.0);
}

/// The tables, in f32: what a tile of 64 or 16 rows with d = 64 takes.
#[test]
fn the_memory_tables() {
    let kib = |elements: usize| elements * 4 / 1024;
    let (matrix, rows) = (kib(64 * 64), kib(64 * 64));
    assert_eq!((matrix, rows), (16, 16));
    // qk_trans, dqk, index; q, k, v; dq, dk, dv; do.
    assert_eq!(3 * matrix + 7 * rows, 160);
    assert_eq!(3 * 16 + 12 + 12 + 4, 76); // as printed
    assert_eq!(kib(16 * 64), 4); // of 16 rows: three of them are the 12 that is printed
    assert_eq!(7 * kib(16 * 64) + 2 * kib(16 * 16), 30); // the second table, which is right
    assert_eq!(2 * kib(64 * 64), 32); // the two states, which it leaves out
    assert_eq!(2 * kib(128 * 128), 128); // and for d = 128, beyond 99
    assert_eq!(101_376, 99 * 1024);
}

/// Products of tiles and loads of tiles for a chunk of M = 4 micro-chunks.
#[test]
fn the_counts_of_a_chunk() {
    let m = 4;
    let pairs = m * (m + 1) / 2;
    let (first, second) = (2, 4); // A, Aᵀ dO; and A, dA, dA K, dAᵀ Q
    assert_eq!((first + second) * pairs, 60);
    assert_eq!(5 * pairs, 50);
    assert_eq!(5 * m * m, 80);
    let loads = 2 * (2 * m + 2 * pairs); // k_j and v_j once, q_i and dO_i for each pair, twice
    assert_eq!((loads, 4 * m), (56, 16));
}

/// The states at the chunk boundaries of 4096 tokens, C = 64, d = 64, in f32, and q in bf16.
#[test]
fn the_states_are_not_free() {
    assert_eq!(4096 / 64 * 64 * 64 * 4, 1 << 20);
    assert_eq!(4096 * 64 * 2, 1 << 19);
}
