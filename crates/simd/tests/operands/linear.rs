//! Linear attention over many spans: the conformance suite's sequences have one or two.

use crate::common::wave;
use etalon_problem::{Blocking, Decay, LinearAttention, LinearExtents, TokenSequences};
use etalon_simd::{Options, linear_attention};
use ndarray::{Array3, Array4, Axis};

/// Everything that the passes read and return, in f32.
struct Results {
    lists: Vec<(&'static str, Vec<f32>)>,
}

/// Two sequences of 300 and 77 tokens, two key heads, a decay per token with a reset, states.
fn problem() -> LinearAttention {
    let extents = LinearExtents { batch: 2, query_heads: 4, key_heads: 2, tokens: 300, dim: 24 };
    LinearAttention::new(extents)
        .value_dim(40)
        .scale(0.7)
        .decay(Decay::PerToken)
        .initial_state()
        .final_state()
        .sequences(TokenSequences::Lengths { tokens: vec![300, 77] })
}

fn results(blocking: Blocking, threads: usize) -> Results {
    let problem = problem();
    let [q, k] = [problem.q_shape(), problem.k_shape()].map(|shape| wave(shape, 0.7));
    let (v, dout) = (wave(problem.v_shape(), 1.1), wave(problem.o_shape(), 1.3));
    let [b, h, n] = problem.g_shape();
    let mut g: Array3<f32> = wave([1, b, h, n], 1.7).index_axis_move(Axis(0), 0);
    g.mapv_inplace(|g| -0.05 * g.abs());
    g[[0, 1, 170]] = f32::NEG_INFINITY;
    let [initial, dfinal]: [Array4<f32>; 2] = [1.9, 2.3].map(|t| wave(problem.state_shape(), t));
    let inputs = linear_attention::Inputs::new(q.view(), k.view(), v.view());
    let inputs = inputs.g(g.view()).initial_state(initial.view());
    let cotangents = linear_attention::Cotangents::new(dout.view()).dfinal_state(dfinal.view());
    let options = Options { blocking: Some(blocking), ..Options::default() };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    pool.install(|| {
        let out = linear_attention::forward(&problem, &inputs, &options).unwrap();
        let grads = linear_attention::backward(&problem, &inputs, &cotangents, &options).unwrap();
        let lists = vec![
            ("o", out.o.into_raw_vec_and_offset().0),
            ("final_state", out.final_state.unwrap().into_raw_vec_and_offset().0),
            ("dq", grads.dq.into_raw_vec_and_offset().0),
            ("dk", grads.dk.into_raw_vec_and_offset().0),
            ("dv", grads.dv.into_raw_vec_and_offset().0),
            ("dg", grads.dg.unwrap().into_raw_vec_and_offset().0),
            ("dinitial_state", grads.dinitial_state.unwrap().into_raw_vec_and_offset().0),
            ("dscale", vec![grads.dscale]),
        ];
        Results { lists }
    })
}

/// Chunks of 8 make ten spans of the longer sequence, with seven threads for four states; chunks of
/// 256 make one, and one chunk of the shorter: the form that the suite judges.
#[test]
fn many_spans_give_what_one_gives() {
    let many = results(Blocking::new(8, 4), 7);
    let one = results(Blocking::new(256, 48), 1);
    for ((name, many), (_, one)) in many.lists.iter().zip(&one.lists) {
        let largest = one.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let apart = many.iter().zip(one).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // 300 sums of 24 or 40 terms in either order: some hundred roundings of 2⁻²⁴.
        assert!(apart <= 3e-5 * largest, "{name}: {apart} of {largest}");
        assert!(largest > 0.1, "{name} says nothing");
    }
}

#[test]
fn threads_change_no_bit() {
    for blocking in [Blocking::new(8, 4), Blocking::new(40, 24)] {
        let one = results(blocking, 1);
        for threads in [2, 3, 7] {
            let many = results(blocking, threads);
            for ((name, many), (_, one)) in many.lists.iter().zip(&one.lists) {
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(many), bits(one), "{name}, {threads} threads");
            }
        }
    }
}
