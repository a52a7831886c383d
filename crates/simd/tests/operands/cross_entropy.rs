//! Linear cross-entropy: its results have the same bits whatever the budget, the threads, the strides and
//! the gradients asked for; bad targets are named, and ignored tokens are not read.

use crate::common::wave;
use etalon_problem::{Error, LinearCrossEntropy, Pass, Reduction, TokenOutputs};
use etalon_simd::linear_cross_entropy::{
    Both, Cotangents, GradientsMut, Inputs, Output, OutputMut, SecondCotangents, SecondGradients,
    SecondGradientsMut, backward, backward_into, double_backward, double_backward_into, forward,
    forward_backward, forward_into, plan,
};
use etalon_simd::{Options, Strategy, Workspace};
use half::bf16;
use ndarray::{Array1, Array2, ArrayD, ArrayView2, Axis, arr0, s};
use rayon::ThreadPoolBuilder;

/// Several bands of tokens and tiles of classes, multiples of nothing; every option.
fn everything() -> LinearCrossEntropy {
    let outputs = TokenOutputs { lse: true, logprob: true, entropy: true, argmax: true };
    LinearCrossEntropy::new(333, 261, 1300)
        .bias()
        .class_weights()
        .token_weights()
        .softcap(4.0)
        .temperature(0.7)
        .logit_scale(1.3)
        .label_smoothing(0.1)
        .lse_square_scale(0.01)
        .outputs(outputs)
}

/// Its operands.
struct Operands {
    problem: LinearCrossEntropy,
    h: Array2<f32>,
    w: Array2<f32>,
    bias: Array1<f32>,
    targets: Array1<i64>,
    class_weights: Array1<f32>,
    token_weights: Array1<f32>,
    dloss: ArrayD<f32>,
}

fn matrix([rows, cols]: [usize; 2], speed: f32) -> Array2<f32> {
    let all = wave([1, 1, rows, cols], speed);
    all.index_axis_move(Axis(0), 0).index_axis_move(Axis(0), 0)
}

impl Operands {
    fn new(problem: LinearCrossEntropy) -> Self {
        let LinearCrossEntropy { tokens, dim, vocab, ignore_index, .. } = problem;
        let row = |len: usize, speed: f32| matrix([1, len], speed).index_axis_move(Axis(0), 0);
        let target = |i: usize| if i % 7 == 3 { ignore_index } else { (i * 389 % vocab) as i64 };
        Operands {
            h: matrix([tokens, dim], 0.7),
            w: matrix([vocab, dim], 1.1) * 0.2,
            bias: row(vocab, 1.3),
            targets: (0..tokens).map(target).collect(),
            class_weights: row(vocab, 1.7).mapv(f32::abs),
            token_weights: row(tokens, 1.9).mapv(f32::abs),
            dloss: arr0(0.7).into_dyn(),
            problem,
        }
    }

    fn inputs<'a>(&'a self, h: ArrayView2<'a, f32>, w: ArrayView2<'a, f32>) -> Inputs<'a, f32> {
        Inputs {
            h,
            w,
            bias: Some(self.bias.view()),
            targets: self.targets.view(),
            class_weights: Some(self.class_weights.view()),
            token_weights: Some(self.token_weights.view()),
        }
    }

    /// The cotangents of everything that has one.
    fn cotangents(&self) -> Cotangents<'_, f32> {
        let by_token = self.token_weights.view();
        Cotangents {
            dloss: Some(self.dloss.view()),
            dlse: Some(by_token),
            dlogprob: Some(by_token),
            dentropy: Some(by_token),
        }
    }

    fn run(&self, h: ArrayView2<'_, f32>, w: ArrayView2<'_, f32>, options: &Options) -> Both<f32> {
        forward_backward(&self.problem, &self.inputs(h, w), &self.cotangents(), options).unwrap()
    }

    /// Calls a double backward pass with h and w also as their own tangents, the rows of w in reverse.
    fn call<R>(
        &self,
        h: ArrayView2<'_, f32>,
        w: ArrayView2<'_, f32>,
        pass: impl FnOnce(
            &Inputs<'_, f32>,
            &Cotangents<'_, f32>,
            &SecondCotangents<'_, f32>,
        ) -> Result<R, Error>,
    ) -> R {
        let by_token = self.token_weights.view();
        let second = SecondCotangents {
            ddh: Some(h),
            ddw: Some(w.slice_move(s![..;-1, ..])),
            ddbias: Some(self.class_weights.view()),
            cot_loss: Some(self.dloss.view()),
            cot_lse: Some(by_token),
            cot_logprob: Some(by_token),
            cot_entropy: Some(by_token),
        };
        pass(&self.inputs(h, w), &self.cotangents(), &second).unwrap()
    }

    fn second(
        &self,
        h: ArrayView2<'_, f32>,
        w: ArrayView2<'_, f32>,
        options: &Options,
    ) -> SecondGradients<f32> {
        self.call(h, w, |inputs, cotangents, second| {
            double_backward(&self.problem, inputs, cotangents, second, options)
        })
    }
}

/// Budgets for one pass, for two sweeps, and for the least that there is.
const BUDGETS: [usize; 4] = [64 << 20, 6 << 20, 3 << 20, 0];

#[test]
fn no_bit_depends_on_the_budget_or_on_threads() {
    let x = Operands::new(everything());
    let wanted = x.run(x.h.view(), x.w.view(), &Options::default());
    let wanted_second = x.second(x.h.view(), x.w.view(), &Options::default());
    for threads in [1, 2, 5] {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        for memory_budget in BUDGETS {
            let options = Options { memory_budget, ..Options::default() };
            let got = pool.install(|| x.run(x.h.view(), x.w.view(), &options));
            assert_eq!(got, wanted, "{threads} threads, {memory_budget} bytes");
            let got = pool.install(|| x.second(x.h.view(), x.w.view(), &options));
            assert_eq!(got, wanted_second, "{threads} threads, {memory_budget} bytes");
        }
    }
}

#[test]
fn every_strategy_is_planned_and_a_larger_budget_is_never_worse() {
    let problem = LinearCrossEntropy::new(2000, 64, 60_000);
    for (pass, most) in [(Pass::Backward, 96), (Pass::DoubleBackward, 192)] {
        let strategy = |memory_budget| {
            let options = Options { memory_budget, ..Options::default() };
            let plan = plan::<bf16>(&problem, pass, &options).unwrap();
            (plan.products, plan.strategy)
        };
        let all: Vec<_> = (0..most).map(|megabytes| strategy(megabytes << 20)).collect();
        for strategy in [Strategy::OnePass, Strategy::Recompute, Strategy::Separate] {
            assert!(all.iter().any(|(_, found)| *found == Some(strategy)), "{strategy:?}: {all:?}");
        }
        assert!(all.is_sorted_by(|x, y| x.0 >= y.0), "{all:?}");
    }
}

#[test]
fn no_bit_depends_on_strides() {
    let x = Operands::new(everything());
    let wanted = x.run(x.h.view(), x.w.view(), &Options::default());
    let transposed = |x: &Array2<f32>| x.t().as_standard_layout().into_owned();
    let (h, w) = (transposed(&x.h), transposed(&x.w));
    assert_eq!(x.run(h.t(), w.t(), &Options::default()), wanted);
    let second = x.second(x.h.view(), x.w.view(), &Options::default());
    assert_eq!(x.second(h.t(), w.t(), &Options::default()), second);
    // Results between elements that belong to somebody else: dw is then summed elsewhere.
    let problem = &x.problem;
    let cotangents = x.cotangents();
    for memory_budget in BUDGETS {
        let options = Options { memory_budget, ..Options::default() };
        let mut dh = Array2::from_elem((problem.tokens, 2 * problem.dim), 7.0);
        let mut dw = Array2::from_elem((problem.vocab, 2 * problem.dim), 7.0);
        let places = GradientsMut {
            dh: Some(dh.slice_mut(s![.., ..;2])),
            dw: Some(dw.slice_mut(s![.., ..;2])),
            dbias: None,
        };
        let inputs = x.inputs(x.h.view(), x.w.view());
        backward_into(&Workspace::new(), problem, &inputs, &cotangents, places, &options).unwrap();
        for (got, wanted) in [(&dh, &wanted.1.dh), (&dw, &wanted.1.dw)] {
            assert_eq!(Some(got.slice(s![.., ..;2]).to_owned()), *wanted, "{memory_budget} bytes");
            assert!(got.slice(s![.., 1..;2]).iter().all(|&x| x == 7.0), "between two elements");
        }
        let places = SecondGradientsMut {
            gh: Some(dh.slice_mut(s![.., ..;2])),
            gw: Some(dw.slice_mut(s![.., ..;2])),
            ..SecondGradientsMut::default()
        };
        x.call(x.h.view(), x.w.view(), |inputs, first, cotangents| {
            let workspace = Workspace::new();
            double_backward_into(&workspace, problem, inputs, first, cotangents, places, &options)
        });
        for (got, wanted) in [(&dh, &second.gh), (&dw, &second.gw)] {
            assert_eq!(got.slice(s![.., ..;2]), *wanted, "{memory_budget} bytes");
            assert!(got.slice(s![.., 1..;2]).iter().all(|&x| x == 7.0), "between two elements");
        }
    }
}

#[test]
fn each_gradient_alone_has_the_bits_of_all() {
    let x = Operands::new(everything());
    let inputs = x.inputs(x.h.view(), x.w.view());
    let (_, all) = x.run(x.h.view(), x.w.view(), &Options::default());
    let cotangents = x.cotangents();
    for which in 0..3 {
        let mut dh = Array2::zeros(x.problem.h_shape());
        let mut dw = Array2::zeros(x.problem.w_shape());
        let mut dbias = Array1::zeros(x.problem.vocab);
        let places = GradientsMut {
            dh: (which == 0).then_some(dh.view_mut()),
            dw: (which == 1).then_some(dw.view_mut()),
            dbias: (which == 2).then_some(dbias.view_mut()),
        };
        let workspace = Workspace::new();
        let options = Options::default();
        backward_into(&workspace, &x.problem, &inputs, &cotangents, places, &options).unwrap();
        match which {
            0 => assert_eq!(Some(dh), all.dh),
            1 => assert_eq!(Some(dw), all.dw),
            _ => assert_eq!(Some(dbias), all.dbias),
        }
    }
}

#[test]
fn wide_gradients_are_those_that_narrow_ones_round() {
    let x = Operands::new(everything());
    let [h, w] = [&x.h, &x.w].map(|x| x.mapv(bf16::from_f32));
    let bias = x.bias.mapv(bf16::from_f32);
    let inputs = Inputs {
        bias: Some(bias.view()),
        class_weights: Some(x.class_weights.view()),
        token_weights: Some(x.token_weights.view()),
        ..Inputs::new(h.view(), w.view(), x.targets.view())
    };
    let cotangents = Cotangents::default().dloss(x.dloss.view());
    let wide = x.problem.clone().wide_gradients();
    for memory_budget in BUDGETS {
        let options = Options { memory_budget, ..Options::default() };
        let (_, narrow) = forward_backward(&x.problem, &inputs, &cotangents, &options).unwrap();
        let mut dh = Array2::<f32>::zeros(x.problem.h_shape());
        let mut dw = Array2::<f32>::zeros(x.problem.w_shape());
        let mut dbias = Array1::<f32>::zeros(x.problem.vocab);
        let places = GradientsMut {
            dh: Some(dh.view_mut()),
            dw: Some(dw.view_mut()),
            dbias: Some(dbias.view_mut()),
        };
        let workspace = Workspace::new();
        backward_into(&workspace, &wide, &inputs, &cotangents, places, &options).unwrap();
        assert_eq!(narrow.dh, Some(dh.mapv(bf16::from_f32)), "{memory_budget} bytes");
        assert_eq!(narrow.dw, Some(dw.mapv(bf16::from_f32)), "{memory_budget} bytes");
        assert_eq!(narrow.dbias, Some(dbias.mapv(bf16::from_f32)), "{memory_budget} bytes");
    }
    // They have places of f32 alone.
    let error = backward(&wide, &inputs, &cotangents, &Options::default()).unwrap_err();
    assert_eq!(error.to_string(), "`dh` must hold f32, unless h holds f64, found bf16");
}

#[test]
fn each_second_gradient_alone_has_the_bits_of_all() {
    let x = Operands::new(everything());
    let problem = &x.problem;
    let all = x.second(x.h.view(), x.w.view(), &Options::default());
    for memory_budget in BUDGETS {
        let options = Options { memory_budget, ..Options::default() };
        let write = |places: SecondGradientsMut<'_, f32>| {
            x.call(x.h.view(), x.w.view(), |inputs, cotangents, second| {
                let workspace = Workspace::new();
                double_backward_into(
                    &workspace, problem, inputs, cotangents, second, places, &options,
                )
            });
        };
        let mut gh = Array2::zeros(problem.h_shape());
        let place = Some(gh.view_mut());
        write(SecondGradientsMut { gh: place, ..SecondGradientsMut::default() });
        assert_eq!(gh, all.gh, "{memory_budget} bytes");
        let mut gw = Array2::zeros(problem.w_shape());
        let place = Some(gw.view_mut());
        write(SecondGradientsMut { gw: place, ..SecondGradientsMut::default() });
        assert_eq!(gw, all.gw, "{memory_budget} bytes");
        let mut gbias = Array1::zeros(problem.vocab);
        let place = Some(gbias.view_mut());
        write(SecondGradientsMut { gbias: place, ..SecondGradientsMut::default() });
        assert_eq!(Some(gbias), all.gbias, "{memory_budget} bytes");
        // Without gradients of h, w and bias one sweep is enough.
        let mut gdentropy = Array1::zeros(problem.tokens);
        let place = Some(gdentropy.view_mut());
        write(SecondGradientsMut { gdentropy: place, ..SecondGradientsMut::default() });
        assert_eq!(Some(gdentropy), all.gdentropy, "{memory_budget} bytes");
    }
}

#[test]
fn a_target_that_is_no_class_is_named_and_nothing_is_written() {
    let mut x = Operands::new(everything());
    for target in [1300, -1, i64::MAX, i64::MIN] {
        x.targets[5] = target;
        let mut loss = arr0(7.0).into_dyn();
        let out = OutputMut { loss: Some(loss.view_mut()), ..OutputMut::default() };
        let inputs = x.inputs(x.h.view(), x.w.view());
        let error = forward_into(&Workspace::new(), &x.problem, &inputs, out, &Options::default());
        let wanted = "`targets[5]` must be a class below 1300 or the ignored -100, found ";
        assert_eq!(error.unwrap_err().to_string(), format!("{wanted}{target}"));
        assert_eq!(loss[[]], 7.0);
    }
}

#[test]
fn without_tokens_that_count_gradients_are_written_as_zeros() {
    for tokens in [0, 5] {
        let problem = LinearCrossEntropy::new(tokens, 3, 4).reduction(Reduction::Sum);
        let (h, w) = (Array2::from_elem((tokens, 3), f32::NAN), Array2::<f32>::ones((4, 3)));
        let targets = Array1::from_elem(tokens, -100);
        let inputs = Inputs::new(h.view(), w.view(), targets.view());
        let Output { loss, n_valid, .. } = forward(&problem, &inputs, &Options::default()).unwrap();
        assert_eq!((loss[[]], n_valid), (0.0, 0));
        let (mut dh, mut dw) =
            (Array2::from_elem((tokens, 3), 7.0), Array2::from_elem((4, 3), 7.0));
        let places = GradientsMut { dh: Some(dh.view_mut()), dw: Some(dw.view_mut()), dbias: None };
        let (none, options) = (Cotangents::default(), Options::default());
        backward_into(&Workspace::new(), &problem, &inputs, &none, places, &options).unwrap();
        assert!(dh.iter().chain(&dw).all(|&x| x == 0.0));
    }
}

#[test]
fn a_confident_target_moves_by_what_is_left_of_its_probability() {
    // Logits of 16 and 0, along h: ż = (16, 0), and ż_y − μ = 16 (1 − p), with 1 − p = 1.1·10⁻⁷.
    let outputs = TokenOutputs { logprob: true, ..TokenOutputs::default() };
    let problem = LinearCrossEntropy::new(1, 1, 2).reduction(Reduction::Sum).outputs(outputs);
    let (h, w) = (Array2::<f32>::ones((1, 1)), ndarray::array![[16.0f32], [0.0]]);
    let (targets, one) = (Array1::from_elem(1, 0), arr0(1.0).into_dyn());
    let inputs = Inputs::new(h.view(), w.view(), targets.view());
    let cotangents = Cotangents::default().dloss(one.view());
    let along = SecondCotangents { ddh: Some(h.view()), ..SecondCotangents::default() };
    let got = double_backward(&problem, &inputs, &cotangents, &along, &Options::default()).unwrap();
    let p = 1.0 / (1.0 + (-16f64).exp());
    let close = |got: f32, wanted: f64| {
        assert!((f64::from(got) - wanted).abs() <= 1e-5 * wanted.abs(), "{got} and not {wanted}");
    };
    close(got.gdlogprob.unwrap()[0], 16.0 * (1.0 - p));
    close(got.gh[[0, 0]], 256.0 * p * (1.0 - p)); // the variance of z
    // x_v h + da_v ddh of the other class
    close(got.gw[[1, 0]], (1.0 - p) * (1.0 - 16.0 * p));
}
