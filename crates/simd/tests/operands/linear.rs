//! Linear attention over many spans: the conformance suite's sequences have one or two.

use crate::common::wave;
use etalon_problem::{Blocking, Decay, LinearAttention, LinearExtents, TokenSequences};
use etalon_simd::{Options, Workspace, linear_attention};
use ndarray::{Array3, Array4, Axis};

/// Everything that the passes read and return, in f32.
struct Results {
    lists: Vec<(&'static str, Vec<f32>)>,
}

/// Two sequences of 300 and 77 tokens, two key heads, a decay per token with a reset, states.
fn problem() -> LinearAttention {
    with_states(24, 40)
}

fn with_states(dim: usize, width: usize) -> LinearAttention {
    let extents = LinearExtents { batch: 2, query_heads: 4, key_heads: 2, tokens: 300, dim };
    LinearAttention::new(extents)
        .value_dim(width)
        .scale(0.7)
        .decay(Decay::PerToken)
        .initial_state()
        .final_state()
        .sequences(TokenSequences::Lengths { tokens: vec![300, 77] })
}

/// Everything that a double backward pass reads.
struct Operands {
    problem: LinearAttention,
    /// q, k, v, initial_state; ddq, ddk, ddv, ddinitial_state.
    inputs: [Array4<f32>; 8],
    g: Array3<f32>,
    ddg: Array3<f32>,
    /// dout, dfinal_state; cot_o, cot_final_state.
    cotangents: [Array4<f32>; 4],
}

impl Operands {
    fn new(problem: LinearAttention) -> Self {
        let p = &problem;
        let [b, h, n] = p.g_shape();
        let gates = |t| -> Array3<f32> { wave([1, b, h, n], t).index_axis_move(Axis(0), 0) };
        let mut g = gates(1.7).mapv(|g| -0.05 * g.abs());
        g[[0, 1, 170]] = f32::NEG_INFINITY;
        let mut ddg = gates(4.1);
        ddg[[0, 1, 170]] = f32::NAN; // at a reset it is not read
        let (q, k, v, state) = (p.q_shape(), p.k_shape(), p.v_shape(), p.state_shape());
        let inputs = [(q, 0.7), (k, 0.7), (v, 1.1), (state, 1.9)];
        let motions = [(q, 2.9), (k, 2.9), (v, 3.1), (state, 4.3)];
        let cotangents = [(p.o_shape(), 1.3), (state, 2.3), (p.o_shape(), 3.7), (state, 4.7)];
        let list = |at: usize| [inputs, motions][at / 4][at % 4];
        Operands {
            inputs: std::array::from_fn(|at| wave(list(at).0, list(at).1)),
            g,
            ddg,
            cotangents: cotangents.map(|(shape, t)| wave(shape, t)),
            problem,
        }
    }

    fn inputs(&self) -> linear_attention::Inputs<'_, f32> {
        let [q, k, v, initial, ..] = &self.inputs;
        let inputs = linear_attention::Inputs::new(q.view(), k.view(), v.view());
        inputs.g(self.g.view()).initial_state(initial.view())
    }

    fn cotangents(&self) -> linear_attention::Cotangents<'_, f32> {
        let [dout, dfinal, ..] = &self.cotangents;
        linear_attention::Cotangents::new(dout.view()).dfinal_state(dfinal.view())
    }

    fn second(&self) -> linear_attention::SecondCotangents<'_, f32> {
        let [.., ddq, ddk, ddv, ddinitial] = &self.inputs;
        let [.., cot_o, cot_final] = &self.cotangents;
        linear_attention::SecondCotangents {
            ddq: Some(ddq.view()),
            ddk: Some(ddk.view()),
            ddv: Some(ddv.view()),
            ddg_gamma: None,
            ddg: Some(self.ddg.view()),
            ddinitial_state: Some(ddinitial.view()),
            ddscale: Some(0.3),
            cot_o: Some(cot_o.view()),
            cot_final_state: Some(cot_final.view()),
        }
    }
}

fn results(problem: &LinearAttention, blocking: Blocking, threads: usize) -> Results {
    let operands = Operands::new(problem.clone());
    let (inputs, cotangents) = (operands.inputs(), operands.cotangents());
    let second = operands.second();
    let options = Options { blocking: Some(blocking), ..Options::default() };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    pool.install(|| {
        let out = linear_attention::forward(problem, &inputs, &options).unwrap();
        let grads = linear_attention::backward(problem, &inputs, &cotangents, &options).unwrap();
        let mut lists = vec![
            ("o", out.o.into_raw_vec_and_offset().0),
            ("final_state", out.final_state.unwrap().into_raw_vec_and_offset().0),
            ("dq", grads.dq.into_raw_vec_and_offset().0),
            ("dk", grads.dk.into_raw_vec_and_offset().0),
            ("dv", grads.dv.into_raw_vec_and_offset().0),
            ("dg", grads.dg.unwrap().into_raw_vec_and_offset().0),
            ("dinitial_state", grads.dinitial_state.unwrap().into_raw_vec_and_offset().0),
            ("dscale", vec![grads.dscale]),
        ];
        let seconds =
            linear_attention::double_backward(problem, &inputs, &cotangents, &second, &options);
        lists.extend(listed(seconds.unwrap()));
        Results { lists }
    })
}

fn listed(grads: linear_attention::SecondGradients<f32>) -> Vec<(&'static str, Vec<f32>)> {
    vec![
        ("gq", grads.gq.into_raw_vec_and_offset().0),
        ("gk", grads.gk.into_raw_vec_and_offset().0),
        ("gv", grads.gv.into_raw_vec_and_offset().0),
        ("gg", grads.gg.unwrap().into_raw_vec_and_offset().0),
        ("ginitial_state", grads.ginitial_state.unwrap().into_raw_vec_and_offset().0),
        ("gscale", vec![grads.gscale]),
        ("gdout", grads.gdout.into_raw_vec_and_offset().0),
        ("gdfinal_state", grads.gdfinal_state.unwrap().into_raw_vec_and_offset().0),
    ]
}

/// The second gradients with other second cotangents.
fn seconds(
    operands: &Operands,
    second: &linear_attention::SecondCotangents<'_, f32>,
) -> Result<Vec<(&'static str, Vec<f32>)>, etalon_problem::Error> {
    let (inputs, cotangents) = (operands.inputs(), operands.cotangents());
    let options = Options::default();
    let problem = &operands.problem;
    linear_attention::double_backward(problem, &inputs, &cotangents, second, &options).map(listed)
}

/// Operands that are absent are left out, and that is as if they were 0: to the last bit, but for the signs
/// of zeros.
#[test]
fn an_absent_second_cotangent_is_zero() {
    let operands = Operands::new(problem());
    let zeros = operands.inputs.clone().map(|x| x * 0.0);
    let (none, cot_o) =
        (Array3::zeros(operands.problem.g_shape()), operands.cotangents[2].clone() * 0.0);
    for which in 0..8 {
        let (mut absent, mut zero) = (operands.second(), operands.second());
        match which {
            0 => (absent.ddq, zero.ddq) = (None, Some(zeros[4].view())),
            1 => (absent.ddk, zero.ddk) = (None, Some(zeros[5].view())),
            2 => (absent.ddv, zero.ddv) = (None, Some(zeros[6].view())),
            3 => (absent.ddg, zero.ddg) = (None, Some(none.view())),
            4 => {
                (absent.ddinitial_state, zero.ddinitial_state) = (None, Some(zeros[7].view()));
            }
            5 => (absent.ddscale, zero.ddscale) = (None, Some(0.0)),
            6 => (absent.cot_o, zero.cot_o) = (None, Some(cot_o.view())),
            _ => {
                (absent.cot_final_state, zero.cot_final_state) = (None, Some(zeros[7].view()));
            }
        }
        let (absent, zero) = (seconds(&operands, &absent), seconds(&operands, &zero));
        assert_eq!(absent.unwrap(), zero.unwrap(), "{which}");
    }
}

/// A second gradient is the same beside others and alone.
#[test]
fn a_second_gradient_that_is_asked_for_alone_is_the_same() {
    let operands = Operands::new(problem());
    let p = &operands.problem;
    let (inputs, cotangents, second) =
        (operands.inputs(), operands.cotangents(), operands.second());
    let all =
        linear_attention::double_backward(p, &inputs, &cotangents, &second, &Options::default());
    let all = all.unwrap();
    let run = |place: linear_attention::SecondGradientsMut<'_, f32>| {
        let options = Options::default();
        linear_attention::double_backward_into(
            &Workspace::new(),
            p,
            &inputs,
            &cotangents,
            &second,
            place,
            &options,
        )
    };
    let mut gq = Array4::from_elem(p.q_shape(), 7.0);
    run(linear_attention::SecondGradientsMut { gq: Some(gq.view_mut()), ..Default::default() })
        .unwrap();
    assert_eq!(gq, all.gq);
    let mut gk = Array4::from_elem(p.k_shape(), 7.0);
    run(linear_attention::SecondGradientsMut { gk: Some(gk.view_mut()), ..Default::default() })
        .unwrap();
    assert_eq!(gk, all.gk);
    let mut gv = Array4::from_elem(p.v_shape(), 7.0);
    run(linear_attention::SecondGradientsMut { gv: Some(gv.view_mut()), ..Default::default() })
        .unwrap();
    assert_eq!(gv, all.gv);
    let mut gdout = Array4::from_elem(p.o_shape(), 7.0);
    let place = Some(gdout.view_mut());
    run(linear_attention::SecondGradientsMut { gdout: place, ..Default::default() }).unwrap();
    assert_eq!(gdout, all.gdout);
    let mut gg = Array3::from_elem(p.g_shape(), 7.0);
    run(linear_attention::SecondGradientsMut { gg: Some(gg.view_mut()), ..Default::default() })
        .unwrap();
    assert_eq!(Some(gg), all.gg);
    let mut gscale = 7.0;
    let place = Some(&mut gscale);
    run(linear_attention::SecondGradientsMut { gscale: place, ..Default::default() }).unwrap();
    assert_eq!(gscale, all.gscale);
    let (mut before, mut after) =
        (all.ginitial_state.clone().unwrap(), all.gdfinal_state.clone().unwrap());
    before.fill(7.0);
    after.fill(7.0);
    run(linear_attention::SecondGradientsMut {
        ginitial_state: Some(before.view_mut()),
        gdfinal_state: Some(after.view_mut()),
        ..Default::default()
    })
    .unwrap();
    assert_eq!((Some(before), Some(after)), (all.ginitial_state, all.gdfinal_state));
}

#[test]
fn a_wrong_second_cotangent_is_named() {
    let operands = Operands::new(problem());
    let complaint = |spoil: &dyn Fn(&mut linear_attention::SecondCotangents<'_, f32>)| {
        let mut second = operands.second();
        spoil(&mut second);
        seconds(&operands, &second).expect_err("a cotangent was spoiled").to_string()
    };
    let cut = ndarray::s![.., .., 1.., ..];
    let spoiled = complaint(&|x| x.ddq = x.ddq.map(|x| x.slice_move(cut)));
    assert_eq!(spoiled, "`ddq` must have shape [2, 4, 300, 24], found [2, 4, 299, 24]");
    let spoiled = complaint(&|x| x.cot_o = x.cot_o.map(|x| x.slice_move(cut)));
    assert_eq!(spoiled, "`cot_o` must have shape [2, 4, 300, 40], found [2, 4, 299, 40]");
    let spoiled = complaint(&|x| x.cot_final_state = x.cot_final_state.map(|x| x.slice_move(cut)));
    assert_eq!(spoiled, "`cot_final_state` must have shape [2, 2, 24, 40], found [2, 2, 23, 40]");
    let spoiled = complaint(&|x| x.ddg = x.ddg.map(|x| x.slice_move(ndarray::s![.., .., 1..])));
    assert_eq!(spoiled, "`ddg` must have shape [2, 2, 300], found [2, 2, 299]");
    let heads = ndarray::Array1::zeros(2);
    let spoiled = {
        let mut second = operands.second();
        second.ddg_gamma = Some(heads.view());
        seconds(&operands, &second).expect_err("the problem decays by token").to_string()
    };
    assert_eq!(spoiled, "`ddg_gamma` was given, but the problem does not set `decay`");
}

/// Problems with spans of two lengths: small states are all kept, a span is a chunk; of states of 80 × 120,
/// 38 KB each, a sequence keeps every fourth, 300 tokens being 75 chunks of 4.
fn problems() -> [(LinearAttention, Blocking); 2] {
    [(problem(), Blocking::new(8, 4)), (with_states(80, 120), Blocking::new(4, 4))]
}

/// Many spans, with seven threads for four states, against one chunk of 256 and a tail: the form that
/// the suite judges.
#[test]
fn many_spans_give_what_one_gives() {
    for (problem, blocking) in problems() {
        let many = results(&problem, blocking, 7);
        let one = results(&problem, Blocking::new(256, 48), 1);
        for ((name, many), (_, one)) in many.lists.iter().zip(&one.lists) {
            let largest = one.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            let apart = many.iter().zip(one).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            // 300 sums of 24 to 120 terms in either order: some hundred roundings of 2⁻²⁴.
            assert!(apart <= 3e-5 * largest, "{name}: {apart} of {largest}");
            assert!(largest > 0.1, "{name} says nothing");
        }
    }
}

/// Tiles of any size are cut to what there is, the largest number too.
#[test]
fn no_blocking_is_too_large() {
    let one = results(&problem(), Blocking::new(256, 256), 1);
    let huge = results(&problem(), Blocking::new(usize::MAX, usize::MAX), 1);
    assert_eq!(one.lists, huge.lists);
}

#[test]
fn threads_change_no_bit() {
    let [(small, blocking), large] = problems();
    let other = (small.clone(), Blocking::new(40, 24));
    for (problem, blocking) in [(small, blocking), other, large] {
        let one = results(&problem, blocking, 1);
        for threads in [2, 3, 7] {
            let many = results(&problem, blocking, threads);
            for ((name, many), (_, one)) in many.lists.iter().zip(&one.lists) {
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(many), bits(one), "{name}, {threads} threads");
            }
        }
    }
}

/// A sequence is worked on as it would be alone: what lies beside it in a batch or in a pack, how long
/// that is and how many heads there are, changes no bit.
#[test]
fn neighbours_change_no_bit() {
    let blocking = Blocking::new(8, 4);
    let dims = |batch, key_heads, tokens| LinearExtents {
        batch,
        query_heads: key_heads,
        key_heads,
        tokens,
        dim: 80,
    };
    let run = |problem: LinearAttention, q: &Array4<f32>, v: &Array4<f32>, dout: &Array4<f32>| {
        let problem = problem.value_dim(120).decay(Decay::PerHead);
        let heads = problem.extents.key_heads;
        let g = ndarray::Array1::from_elem(heads, -0.01);
        let inputs = linear_attention::Inputs::new(q.view(), q.view(), v.view());
        let inputs = inputs.g_gamma(g.view());
        let cotangents = linear_attention::Cotangents::new(dout.view());
        let options = Options { blocking: Some(blocking), ..Options::default() };
        let out = linear_attention::forward(&problem, &inputs, &options).unwrap();
        let grads = linear_attention::backward(&problem, &inputs, &cotangents, &options).unwrap();
        [out.o, grads.dq, grads.dk, grads.dv]
    };
    // 37 tokens are five chunks, all of whose states are kept; of 2000 tokens every
    // fifteenth is.
    let cu_tokens = vec![0, 37, 2037];
    let packed =
        LinearAttention::new(dims(1, 2, 2037)).sequences(TokenSequences::Packed { cu_tokens });
    let [q, v, dout] =
        [(80, 0.7), (120, 1.1), (120, 1.3)].map(|(dim, t)| wave([1, 2, 2037, dim], t));
    let together = run(packed, &q, &v, &dout);
    for head in 0..2 {
        let cut = ndarray::s![.., head..head + 1, ..37, ..];
        let [q, v, dout] = [&q, &v, &dout].map(|x| x.slice(cut).to_owned());
        let alone = run(LinearAttention::new(dims(1, 1, 37)), &q, &v, &dout);
        for (together, alone) in together.iter().zip(&alone) {
            assert_eq!(together.slice(cut), alone);
        }
    }
}

/// Message of the error of a forward pass, after `spoil` has done something to it.
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
    let out = linear_attention::OutputMut { o: Some(o.view_mut()), final_state };
    let error = linear_attention::forward_into(&Workspace::new(), &problem, &inputs, out, &options);
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
        initial_state: None,
    };
    let mut state = wave(problem.state_shape(), 1.9);
    state[[0, 1, 0, 0]] = f32::NAN; // forgotten
    let options = Options::default();
    let given = inputs.initial_state(state.view());
    let expected = linear_attention::step(&problem, &given, &options).unwrap();
    assert!(expected.o.iter().all(|x| x.is_finite()));
    // A state whose columns lie first.
    let mut turned = Array4::zeros([2, 2, 40, 24]);
    turned.assign(&state.view().permuted_axes([0, 1, 3, 2]));
    let mut o = Array3::zeros([2, 4, 40]);
    let place = linear_attention::StepOutputMut {
        o: Some(o.view_mut()),
        final_state: Some(turned.view_mut().permuted_axes([0, 1, 3, 2])),
    };
    linear_attention::step_into(&Workspace::new(), &problem, &inputs, place, &options).unwrap();
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
        // ⟨ddq, dq⟩ = ⟨dout, o⟩ for ddq = q, and so for k and v: three times the loss as far as it
        // depends on dout. On q depend two of them, dq being one derivative without it.
        let second = linear_attention::SecondCotangents {
            ddq: Some(q.view()),
            ddk: Some(k.view()),
            ddv: Some(v.view()),
            ..Default::default()
        };
        let seconds =
            linear_attention::double_backward(&problem, &inputs, &cotangents, &second, &options);
        let seconds = seconds.unwrap();
        check("gdout", &thin(&seconds.gdout), &|i, e| 3.0 * sum(&qk, &v, 3 * i, 7 * e));
        check("gq", &thin(&seconds.gq), &|i, d| 2.0 * sum(&dov, &k, 3 * i, 7 * d));
        check("gk", &thin(&seconds.gk), &|j, d| 2.0 * sum(&vdo, &q, 3 * j, 7 * d));
        check("gv", &thin(&seconds.gv), &|j, e| 2.0 * sum(&kq, &dout, 3 * j, 7 * e));
    }
}
