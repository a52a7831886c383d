//! Linear attention in bf16, by the rules of the instructions on every machine, beside the same in f32.

use etalon_problem::{Blocking, Decay, LinearAttention, LinearExtents, TokenSequences};
use etalon_simd::linear_attention::{self, Cotangents, Inputs, SecondCotangents};
use etalon_simd::{Level, Options, Precision};
use half::bf16;
use ndarray::{Array1, Array3, Array4, ShapeBuilder};

/// Numbers of no pattern, below 1.
fn noise(seed: usize, shape: [usize; 4]) -> Array4<f32> {
    Array4::from_shape_fn(shape, |(b, h, i, d)| {
        let x = (1 + seed + 131 * b + 177 * h + 1009 * i + 7 * d) as f32;
        (x * 0.7351).sin()
    })
}

/// Sequences and widths that fill no block, one of several chunks, two query heads to a key head.
fn problem(decay: Decay, [dim, width]: [usize; 2]) -> LinearAttention {
    let extents = LinearExtents { batch: 1, query_heads: 4, key_heads: 2, tokens: 205, dim };
    LinearAttention::new(extents)
        .value_dim(width)
        .scale(0.7)
        .decay(decay)
        .initial_state()
        .final_state()
        .sequences(TokenSequences::Packed { cu_tokens: vec![0, 170, 205] })
}

/// One with several blocks of either width.
fn problems() -> Vec<LinearAttention> {
    let decays = [Decay::None, Decay::PerHead, Decay::PerToken];
    let mut all: Vec<_> = decays.iter().map(|decay| problem(*decay, [40, 24])).collect();
    all.push(problem(Decay::PerToken, [72, 120]));
    all
}

struct Case {
    problem: LinearAttention,
    /// q, k, v and dout, and their tangents.
    tensors: [Array4<bf16>; 4],
    tangents: [Array4<bf16>; 4],
    states: [Array4<f32>; 2],
    state_tangents: [Array4<f32>; 2],
    g: Array3<f32>,
    g_gamma: Array1<f32>,
    ddg: Array3<f32>,
}

impl Case {
    fn new(problem: &LinearAttention) -> Self {
        let p = problem;
        let [b, h, n] = p.g_shape();
        let mut g =
            Array3::from_shape_fn([b, h, n], |(_, h, t)| -0.03 * (1 + (3 * t + h) % 7) as f32);
        // A reset within a chunk, and within a block of it.
        g[[0, 1, 107]] = f32::NEG_INFINITY;
        let shapes = [p.q_shape(), p.k_shape(), p.v_shape(), p.o_shape()];
        let mut seed = 0;
        let mut next = |shape| {
            seed += 1;
            noise(seed, shape)
        };
        Case {
            tensors: shapes.map(|shape| next(shape).mapv(bf16::from_f32)),
            tangents: shapes.map(|shape| next(shape).mapv(bf16::from_f32)),
            states: [p.state_shape(); 2].map(&mut next),
            state_tangents: [p.state_shape(); 2].map(&mut next),
            ddg: Array3::from_shape_fn([b, h, n], |(_, h, t)| {
                ((5 * t + h) % 11) as f32 / 80.0 - 0.06
            }),
            g,
            g_gamma: Array1::from_vec(vec![-0.01, -0.2]),
            problem: problem.clone(),
        }
    }

    /// Every result by its name, in f32.
    fn results(&self, options: &Options) -> Vec<(&'static str, Vec<f32>)> {
        let [q, k, v, dout] = &self.tensors;
        let mut inputs =
            Inputs::new(q.view(), k.view(), v.view()).initial_state(self.states[0].view());
        match self.problem.decay {
            Decay::None => (),
            Decay::PerHead => inputs = inputs.g_gamma(self.g_gamma.view()),
            Decay::PerToken => inputs = inputs.g(self.g.view()),
        }
        let cotangents = Cotangents::new(dout.view()).dfinal_state(self.states[1].view());
        let out = linear_attention::forward(&self.problem, &inputs, options).unwrap();
        let of = linear_attention::backward(&self.problem, &inputs, &cotangents, options).unwrap();
        let narrow = [("o", out.o), ("dq", of.dq), ("dk", of.dk), ("dv", of.dv)];
        let mut all: Vec<_> = narrow
            .into_iter()
            .map(|(name, x)| (name, x.iter().map(|x| x.to_f32()).collect()))
            .collect();
        all.push(("dscale", vec![of.dscale]));
        all.extend(out.final_state.map(|x| ("final_state", x.iter().copied().collect())));
        all.extend(of.dinitial_state.map(|x| ("dinitial_state", x.iter().copied().collect())));
        all.extend(of.dg.map(|x| ("dg", x.iter().copied().collect())));
        all.extend(of.dg_gamma.map(|x| ("dg_gamma", x.to_vec())));
        all.extend(self.seconds(&inputs, &cotangents, options));
        all
    }

    /// Every result of the second order.
    fn seconds(
        &self,
        inputs: &Inputs<'_, bf16>,
        cotangents: &Cotangents<'_, bf16>,
        options: &Options,
    ) -> Vec<(&'static str, Vec<f32>)> {
        let ([ddq, ddk, ddv, cot_o], [initial, last]) = (&self.tangents, &self.state_tangents);
        let ddg_gamma = Array1::from_vec(vec![0.02, -0.05]);
        let second = SecondCotangents {
            ddq: Some(ddq.view()),
            ddk: Some(ddk.view()),
            ddv: Some(ddv.view()),
            ddg_gamma: (self.problem.decay == Decay::PerHead).then(|| ddg_gamma.view()),
            ddg: (self.problem.decay == Decay::PerToken).then(|| self.ddg.view()),
            ddinitial_state: Some(initial.view()),
            ddscale: Some(0.3),
            cot_o: Some(cot_o.view()),
            cot_final_state: Some(last.view()),
        };
        let of =
            linear_attention::double_backward(&self.problem, inputs, cotangents, &second, options);
        let of = of.unwrap();
        let narrow = [("gq", of.gq), ("gk", of.gk), ("gv", of.gv), ("gdout", of.gdout)];
        let list = |x: Array4<bf16>| x.iter().map(|x| x.to_f32()).collect();
        let mut all: Vec<_> = narrow.into_iter().map(|(name, x)| (name, list(x))).collect();
        all.push(("gscale", vec![of.gscale]));
        let states = [("ginitial_state", of.ginitial_state), ("gdfinal_state", of.gdfinal_state)];
        for (name, x) in states {
            all.extend(x.map(|x| (name, x.iter().copied().collect())));
        }
        all.extend(of.gg.map(|x| ("gg", x.iter().copied().collect())));
        all.extend(of.gg_gamma.map(|x| ("gg_gamma", x.to_vec())));
        all
    }
}

/// Results that are stored in bf16.
const NARROW: [&str; 8] = ["o", "dq", "dk", "dv", "gq", "gk", "gv", "gdout"];

fn flash(level: Level) -> Options {
    Options { level, precision: Precision::Flash, ..Options::default() }
}

fn strict() -> Options {
    Options { level: Level::available()[0], ..Options::default() }
}

/// Two roundings of each term, to 8 bits or to 16: of sums of many terms that is seldom near the roundoff of the
/// largest. Results of bf16 are rounded once more.
#[test]
fn results_are_near_those_in_f32() {
    let precisions = [Precision::Flash, Precision::Split2];
    for case in problems().iter().map(Case::new) {
        let exact = case.results(&strict());
        for (level, (tokens, precision)) in Level::emulated()
            .into_iter()
            .flat_map(|x| [None, Some(40)].map(|tokens| (x, tokens)))
            .flat_map(|(x, tokens)| precisions.map(|precision| (x, (tokens, precision))))
        {
            let blocking = tokens.map(|tokens| Blocking { queries: tokens, keys: 8 });
            let got = case.results(&Options { blocking, precision, ..flash(level) });
            assert_eq!(got.len(), exact.len());
            for ((name, got), (_, exact)) in got.iter().zip(&exact) {
                let size = exact.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                let apart =
                    got.iter().zip(exact).fold(0.0, |most: f32, (x, y)| most.max((x - y).abs()));
                let what =
                    format!("{level}, {tokens:?}, {precision:?}, {:?}: {name}", case.problem);
                let narrow = NARROW.contains(name);
                let part = match precision {
                    Precision::Flash => 1.0 / 64.0,
                    _ if narrow => 1.0 / 128.0,
                    _ => 1.0 / (64.0 * 256.0),
                };
                assert!(apart < size * part, "{what} {apart} of {size}");
                let exact_sum = name.ends_with("state") && case.problem.decay == Decay::None;
                let coarse = narrow || got.len() == 1;
                let may_agree = exact_sum || coarse && precision == Precision::Split2;
                assert!(apart > 0.0 || may_agree, "{what}: nothing was rounded");
            }
        }
    }
}

/// Neither threads nor strides change a bit.
#[test]
fn no_bit_depends_on_threads_or_strides() {
    for (case, level) in problems().iter().map(Case::new).zip(Level::emulated().into_iter().cycle())
    {
        let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let of = |threads, case: &Case| pool(threads).install(|| case.results(&flash(level)));
        let usual = of(1, &case);
        assert!(usual == of(5, &case), "{level}: threads");
        let columns = |x: &Array4<bf16>| {
            let mut y = Array4::from_elem(x.dim().f(), bf16::ZERO);
            y.assign(x);
            y
        };
        let apart = Case {
            tensors: case.tensors.each_ref().map(columns),
            tangents: case.tangents.each_ref().map(columns),
            ..Case::new(&case.problem)
        };
        assert!(usual == of(1, &apart), "{level}: strides");
    }
}

/// A NaN reaches the tokens that read it, those of its sequence from it on up to a reset, and no gradient of tokens
/// that do not read it.
#[test]
fn what_is_not_finite_stays_where_it_is_read() {
    const AT: usize = 75;
    const RESET: usize = 107;
    let names = ["q", "k", "v", "dout"].into_iter().enumerate();
    for ((which, name), of_tangent) in names.flat_map(|x| [(x, false), (x, true)]) {
        let mut case = Case::new(&problem(Decay::PerToken, [40, 24]));
        let tensors = if of_tangent { &mut case.tangents } else { &mut case.tensors };
        tensors[which].slice_mut(ndarray::s![0, .., AT, 3]).fill(bf16::NAN);
        for level in Level::emulated() {
            let results = case.results(&flash(level));
            let finite = |name: &str, width: usize, key_heads: bool| {
                let (_, x) = results.iter().find(|(of, _)| *of == name).unwrap();
                // Of the head with a reset, the rows that are finite.
                let head = if key_heads { 1 } else { 3 };
                let rows = x[head * 205 * width..][..205 * width].chunks(width);
                rows.map(|row| row.iter().all(|x| x.is_finite())).collect::<Vec<_>>()
            };
            for (of, width, key_heads, seen) in [
                // The results that an operand of token AT, or its tangent, enters, by token.
                (["o", "gdout"], 24, false, [AT..AT + 1, AT..RESET, AT..RESET, 0..0]),
                (["dq", "gq"], 40, false, [0..0, AT..RESET, AT..RESET, AT..AT + 1]),
                (["dk", "gk"], 40, true, [0..AT + 1, 0..0, AT..AT + 1, 0..AT + 1]),
                (["dv", "gv"], 24, true, [0..AT + 1, AT..AT + 1, 0..0, 0..AT + 1]),
            ] {
                for (order, of) in of.into_iter().enumerate() {
                    let got = finite(of, width, key_heads);
                    let seen = if of_tangent && order == 0 { &(0..0) } else { &seen[which] };
                    let wanted: Vec<_> = (0..205).map(|t| !seen.contains(&t)).collect();
                    let first = got.iter().zip(&wanted).position(|(x, y)| x != y);
                    assert_eq!(first, None, "{level}: {of} with a NaN in {name}, {of_tangent}");
                }
            }
        }
    }
}
