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

/// What the error of a forward pass says, after `spoil` has done something to it.
fn complaint(
    spoil: impl FnOnce(&mut LinearAttention, &mut Options, &mut linear_attention::Inputs<'_, f32>),
) -> String {
    let mut problem = problem();
    let [q, k] = [problem.q_shape(), problem.k_shape()].map(|shape| wave(shape, 0.7));
    let v = wave(problem.v_shape(), 1.1);
    let g = Array3::from_elem(problem.g_shape(), -0.1);
    let initial = wave(problem.state_shape(), 1.9);
    let mut o = Array4::from_elem(problem.o_shape(), 7.0);
    let mut state = Array4::from_elem(problem.state_shape(), 7.0);
    let inputs = linear_attention::Inputs::new(q.view(), k.view(), v.view());
    let mut inputs = inputs.g(g.view()).initial_state(initial.view());
    let mut options = Options::default();
    spoil(&mut problem, &mut options, &mut inputs);
    let final_state = Some(state.view_mut());
    let out = linear_attention::OutputMut { o: o.view_mut(), final_state };
    let error = linear_attention::forward_into(&problem, &inputs, out, &options);
    assert!(o.iter().chain(&state).all(|&x| x == 7.0), "nothing is half-written");
    error.expect_err("the operands were spoiled").to_string()
}

#[test]
fn what_is_wrong_is_named() {
    let cut = ndarray::s![.., .., 1.., ..];
    let spoiled = complaint(|_, _, inputs| inputs.q = inputs.q.slice_move(cut));
    assert_eq!(spoiled, "`q` must have shape [2, 4, 300, 24], found [2, 4, 299, 24]");
    let spoiled = complaint(|_, _, inputs| inputs.initial_state = None);
    assert_eq!(spoiled, "`initial_state` is missing: the problem sets `initial_state`");
    let spoiled = complaint(|problem, _, _| problem.decay = Decay::None);
    assert_eq!(spoiled, "`g` was given, but the problem does not set `decay`");
    let spoiled = complaint(|problem, _, _| problem.final_state = false);
    assert_eq!(spoiled, "`final_state` was given, but the problem does not set `final_state`");
    let spoiled = complaint(|_, options, _| options.blocking = Some(Blocking::new(8, 0)));
    assert_eq!(spoiled, "`blocking.keys` must be at least 1, found 0");
    // A gate that grows, at a token that belongs to a sequence; one of the padding may be anything.
    let [b, h, n] = problem().g_shape();
    for (token, bad) in [(76, true), (77, false)] {
        let mut g = Array3::from_elem([b, h, n], -0.1);
        g[[1, 0, token]] = f32::NAN;
        let [q, k] = [problem().q_shape(), problem().k_shape()].map(|shape| wave(shape, 0.7));
        let (v, initial) = (wave(problem().v_shape(), 1.1), wave(problem().state_shape(), 1.9));
        let inputs = linear_attention::Inputs::new(q.view(), k.view(), v.view());
        let inputs = inputs.g(g.view()).initial_state(initial.view());
        let out = linear_attention::forward(&problem(), &inputs, &Options::default());
        let text = out.map(|out| out.o.iter().all(|x| x.is_finite())).map_err(|e| e.to_string());
        let expected = Err("`g[1, 0, 76]` must be at most 0, found NaN".to_string());
        assert_eq!(text, if bad { expected } else { Ok(true) });
    }
}

#[test]
fn any_strides_give_the_same_bits() {
    let problem = problem();
    let plain = |shape, t| wave(shape, t);
    // The same numbers in arrays whose last axes are exchanged, and behind reversed axes.
    let turned = |x: &Array4<f32>| {
        let mut y = Array4::zeros([x.dim().0, x.dim().1, x.dim().3, x.dim().2]);
        y.assign(&x.view().permuted_axes([0, 1, 3, 2]));
        y.permuted_axes([0, 1, 3, 2])
    };
    let reversed = |x: &Array4<f32>| {
        let mut y = x.slice(ndarray::s![.., .., ..;-1, ..]).to_owned();
        y.invert_axis(Axis(2));
        y
    };
    let [q, k] = [problem.q_shape(), problem.k_shape()].map(|shape| plain(shape, 0.7));
    let (v, dout) = (plain(problem.v_shape(), 1.1), plain(problem.o_shape(), 1.3));
    let g = Array3::from_elem(problem.g_shape(), -0.1);
    let initial = plain(problem.state_shape(), 1.9);
    let run =
        |q: &Array4<f32>, k: &Array4<f32>, v: &Array4<f32>, dout: &Array4<f32>, h: &Array4<f32>| {
            let inputs = linear_attention::Inputs::new(q.view(), k.view(), v.view());
            let inputs = inputs.g(g.view()).initial_state(h.view());
            let cotangents = linear_attention::Cotangents::new(dout.view());
            let options = Options::default();
            let out = linear_attention::forward(&problem, &inputs, &options).unwrap();
            (out, linear_attention::backward(&problem, &inputs, &cotangents, &options).unwrap())
        };
    let one = run(&q, &k, &v, &dout, &initial);
    let other = run(&turned(&q), &reversed(&k), &turned(&v), &reversed(&dout), &turned(&initial));
    assert_eq!(one, other);
}

#[test]
fn a_step_in_place_is_a_step() {
    let problem = problem();
    let [q, k, v] = [(4, 24, 0.7), (2, 24, 1.1), (2, 40, 1.3)]
        .map(|(heads, dim, t)| wave([1, 2, heads, dim], t).index_axis_move(Axis(0), 0));
    let g = ndarray::arr2(&[[-0.1, f32::NEG_INFINITY], [0.0, -2.0]]);
    let inputs = linear_attention::StepInputs {
        q: q.view(),
        k: k.view(),
        v: v.view(),
        g_gamma: None,
        g: Some(g.view()),
    };
    let mut state = wave(problem.state_shape(), 1.9);
    state[[0, 1, 0, 0]] = f32::NAN; // forgotten
    let options = Options::default();
    let expected = linear_attention::step(&problem, &inputs, state.view(), &options).unwrap();
    assert!(expected.o.iter().all(|x| x.is_finite()));
    // A state whose columns lie first.
    let mut turned = Array4::zeros([2, 2, 40, 24]);
    turned.assign(&state.view().permuted_axes([0, 1, 3, 2]));
    let mut o = Array3::zeros([2, 4, 40]);
    let place = turned.view_mut().permuted_axes([0, 1, 3, 2]);
    linear_attention::step_into(&problem, &inputs, place, o.view_mut(), &options).unwrap();
    assert_eq!(o, expected.o);
    assert_eq!(turned.permuted_axes([0, 1, 3, 2]), expected.final_state);
}

/// States of 200 × 410, in more than one slab of operands: against the definition in f64, which is short
/// without decay.
#[test]
fn wide_states_are_those_of_the_definition() {
    let (n, dim, width) = (70, 200, 410);
    let extents = LinearExtents { batch: 1, query_heads: 1, key_heads: 1, tokens: n, dim };
    let problem = LinearAttention::new(extents).value_dim(width).scale(0.5).final_state();
    let [q, k] = [0.7, 1.1].map(|t| wave(problem.q_shape(), t));
    let [v, dout] = [1.3, 1.7].map(|t| wave(problem.v_shape(), t));
    let dot = |a: &Array4<f32>, i: usize, b: &Array4<f32>, j: usize| -> f64 {
        (0..a.dim().3).map(|d| f64::from(a[[0, 0, i, d]]) * f64::from(b[[0, 0, j, d]])).sum()
    };
    // Σ weight(i, j) · row j of x, over what (i, j) are related.
    let sum = |weight: &dyn Fn(usize, usize) -> f64, x: &Array4<f32>, i: usize, e: usize| -> f64 {
        (0..n).map(|j| 0.5 * weight(i, j) * f64::from(x[[0, 0, j, e]])).sum()
    };
    let before = |a, b| move |i: usize, j: usize| if j <= i { dot(a, i, b, j) } else { 0.0 };
    let after = |a, b| move |j: usize, i: usize| if j <= i { dot(a, i, b, j) } else { 0.0 };
    let inputs = linear_attention::Inputs::new(q.view(), k.view(), v.view());
    let cotangents = linear_attention::Cotangents::new(dout.view());
    for blocking in [None, Some(Blocking::new(16, 12))] {
        let options = Options { blocking, ..Options::default() };
        let out = linear_attention::forward(&problem, &inputs, &options).unwrap();
        let grads = linear_attention::backward(&problem, &inputs, &cotangents, &options).unwrap();
        let check = |name: &str, found: &Array4<f32>, expected: &dyn Fn(usize, usize) -> f64| {
            let largest = found.iter().fold(0.0f64, |most, &x| most.max(f64::from(x.abs())));
            for ((_, _, i, e), &x) in found.indexed_iter() {
                let apart = (f64::from(x) - expected(i, e)).abs();
                // Some hundred roundings of 2⁻²⁴ of terms of that size.
                assert!(apart <= 3e-5 * largest, "{name}[{i}, {e}]: {x}, not {}", expected(i, e));
            }
        };
        let (qk, dov) = (before(&q, &k), before(&dout, &v));
        let (kq, vdo) = (after(&q, &k), after(&dout, &v));
        // Every seventh column: each is a sum over all rows of dot products.
        let thin = |x: &Array4<f32>| x.slice(ndarray::s![.., .., ..;3, ..;7]).to_owned();
        check("o", &thin(&out.o), &|i, e| sum(&qk, &v, 3 * i, 7 * e));
        check("dq", &thin(&grads.dq), &|i, d| sum(&dov, &k, 3 * i, 7 * d));
        check("dk", &thin(&grads.dk), &|j, d| sum(&vdo, &q, 3 * j, 7 * d));
        check("dv", &thin(&grads.dv), &|j, e| sum(&kq, &dout, 3 * j, 7 * e));
        let state = |d: usize, e: usize| -> f64 {
            (0..n).map(|j| f64::from(k[[0, 0, j, d]]) * f64::from(v[[0, 0, j, e]])).sum()
        };
        check("final_state", &out.final_state.unwrap(), &state);
    }
}
