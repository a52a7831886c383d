//! Linear cross-entropy in bf16, with the instructions where they are there, and by their rules.

use etalon_problem::{LinearCrossEntropy, TokenOutputs};
use etalon_simd::linear_cross_entropy::{
    Cotangents, GradientsMut, Inputs, SecondCotangents, SecondGradientsMut, backward_into,
    double_backward_into, forward,
};
use etalon_simd::{Level, Options, Precision, Workspace};
use half::bf16;
use ndarray::{Array1, Array2, ArrayD, ArrayView2, ShapeBuilder, arr0, s};

/// The levels of this machine, and those that the feature `emulation` adds.
fn levels() -> Vec<Level> {
    let all = Level::of_pairs().to_vec();
    #[cfg(feature = "emulation")]
    let all = [&all[..], &Level::emulated()].concat();
    if all.is_empty() {
        println!("skipped: {}", Level::lacks("avx512bf16"));
    }
    all
}

fn rounding(level: Level, precision: Precision) -> Options {
    Options { level, precision, ..Options::default() }
}

struct Operands {
    problem: LinearCrossEntropy,
    h: Array2<bf16>,
    w: Array2<bf16>,
    targets: Array1<i64>,
    dloss: ArrayD<f32>,
}

impl Operands {
    fn new([tokens, dim, vocab]: [usize; 3]) -> Self {
        let wave = |x: usize, y: usize| ((17 * x + 5 * y) as f32 * 0.37).sin();
        let target = |i: usize| if i == 7 { -100 } else { (i * 389 % vocab) as i64 };
        Operands {
            problem: LinearCrossEntropy {
                wide_gradients: true,
                ..LinearCrossEntropy::new(tokens, dim, vocab)
            },
            h: Array2::from_shape_fn((tokens, dim), |(i, c)| bf16::from_f32(wave(i, c))),
            w: Array2::from_shape_fn((vocab, dim), |(v, c)| bf16::from_f32(wave(c, v * v))),
            targets: (0..tokens).map(target).collect(),
            dloss: arr0(100.0).into_dyn(),
        }
    }

    fn inputs<'a>(&'a self, h: ArrayView2<'a, bf16>, w: ArrayView2<'a, bf16>) -> Inputs<'a, bf16> {
        Inputs::new(h, w, self.targets.view())
    }

    /// dh and dw in f32.
    fn gradients(
        &self,
        h: ArrayView2<'_, bf16>,
        w: ArrayView2<'_, bf16>,
        options: &Options,
    ) -> [Array2<f32>; 2] {
        let mut all = [self.h.dim(), self.w.dim()].map(Array2::zeros);
        let [dh, dw] = all.each_mut().map(|x| Some(x.view_mut()));
        let places = GradientsMut { dh, dw, ..GradientsMut::default() };
        let cotangents = Cotangents::default().dloss(self.dloss.view());
        let (workspace, inputs) = (Workspace::new(), self.inputs(h, w));
        backward_into(&workspace, &self.problem, &inputs, &cotangents, places, options).unwrap();
        all
    }

    /// da of every token and class, in f64.
    fn exact(&self) -> Array2<f64> {
        let [h, w] = [&self.h, &self.w].map(|x| x.mapv(f64::from));
        let counted = self.targets.iter().filter(|&&y| y >= 0).count() as f64;
        let mut da = h.dot(&w.t());
        for (mut row, &y) in da.outer_iter_mut().zip(&self.targets) {
            let sum: f64 = row.iter().map(|z| z.exp()).sum();
            row.mapv_inplace(|z| z.exp() / sum);
            match usize::try_from(y) {
                Ok(y) => row[y] -= 1.0,
                Err(_) => row.fill(0.0),
            }
        }
        da * (self.dloss.sum() as f64 / counted)
    }
}

/// Operands that move.
#[derive(Clone, Copy, Debug)]
struct Moves {
    h: bool,
    w: bool,
}

/// Results of the second order that are asked for.
#[derive(Clone, Copy, Debug)]
struct Asked {
    gh: bool,
    gw: bool,
    gbias: bool,
    outputs: bool,
}

const ALL: Asked = Asked { gh: true, gw: true, gbias: true, outputs: true };

const NONE: Asked = Asked { gh: false, gw: false, gbias: false, outputs: false };

/// gh, gw, gbias, and gdlse and gdentropy, in f32; 0 where they were not asked for.
#[derive(Clone, Debug, PartialEq)]
struct Second {
    gh: Array2<f32>,
    gw: Array2<f32>,
    gbias: Array1<f32>,
    gdlse: Array1<f32>,
    gdentropy: Array1<f32>,
}

impl Operands {
    /// A problem with a bias, a cap and smoothing.
    fn with_options(shape: [usize; 3]) -> Self {
        let mut x = Operands::new(shape);
        let outputs = TokenOutputs { lse: true, entropy: true, ..TokenOutputs::default() };
        x.problem = x.problem.bias().softcap(4.0).label_smoothing(0.1).outputs(outputs);
        x
    }

    /// The second order, of which h and w, their rows in reverse, are the tangents of h and w.
    fn second(
        &self,
        [h, w]: [ArrayView2<'_, bf16>; 2],
        (moves, asked): (Moves, Asked),
        options: &Options,
    ) -> Second {
        let LinearCrossEntropy { tokens, vocab, .. } = self.problem;
        let by_token = Array1::from_shape_fn(tokens, |i| (i as f32 * 0.61).cos());
        let bias = Array1::from_shape_fn(vocab, |v| bf16::from_f32((v as f32 * 0.83).cos()));
        let inputs = Inputs { bias: Some(bias.view()), ..self.inputs(h, w) };
        let cotangents = Cotangents {
            dloss: Some(self.dloss.view()),
            dlse: Some(by_token.view()),
            dentropy: Some(by_token.view()),
            ..Cotangents::default()
        };
        let second = SecondCotangents {
            ddh: moves.h.then(|| h.slice_move(s![..;-1, ..])),
            ddw: moves.w.then(|| w.slice_move(s![..;-1, ..])),
            ddbias: Some(bias.view()),
            cot_loss: Some(self.dloss.view()),
            cot_entropy: Some(by_token.view()),
            ..SecondCotangents::default()
        };
        let mut all = Second {
            gh: Array2::zeros(h.dim()),
            gw: Array2::zeros(w.dim()),
            gbias: Array1::zeros(vocab),
            gdlse: Array1::zeros(tokens),
            gdentropy: Array1::zeros(tokens),
        };
        let places = SecondGradientsMut {
            gh: asked.gh.then(|| all.gh.view_mut()),
            gw: asked.gw.then(|| all.gw.view_mut()),
            gbias: asked.gbias.then(|| all.gbias.view_mut()),
            gdlse: asked.outputs.then(|| all.gdlse.view_mut()),
            gdentropy: asked.outputs.then(|| all.gdentropy.view_mut()),
            ..SecondGradientsMut::default()
        };
        let (workspace, problem) = (Workspace::new(), &self.problem);
        double_backward_into(&workspace, problem, &inputs, &cotangents, &second, places, options)
            .unwrap();
        all
    }
}

/// Odd numbers of tokens that count, of elements and of classes, in several bands and tiles.
const SEVERAL: [usize; 3] = [198, 71, 301];

/// Two of each.
const SHORT: [usize; 3] = [130, 37, 270];

/// Bands of which a task has several, on one thread.
const LONG: [usize; 3] = [1300, 24, 40];

/// More elements than a thread copies at a time.
const WIDE: [usize; 3] = [40, 1100, 37];

/// Twice what the rounding of da may do leaves room for sums in f32; strict gradients are closer by far.
#[test]
fn gradients_are_those_of_rounded_gradients_of_logits() {
    let x = Operands::new(SEVERAL);
    let da = x.exact();
    let [h, w] = [&x.h, &x.w].map(|x| x.mapv(f64::from));
    let exact = [da.dot(&w), da.t().dot(&h)];
    let sizes =
        [da.mapv(f64::abs).dot(&w.mapv(f64::abs)), da.t().mapv(f64::abs).dot(&h.mapv(f64::abs))];
    let worst = |options: &Options| {
        let got = x.gradients(x.h.view(), x.w.view(), options);
        let of = |(got, (exact, size)): (Array2<f32>, (&Array2<f64>, &Array2<f64>))| {
            let errors = got.iter().zip(exact).map(|(&got, exact)| (f64::from(got) - exact).abs());
            errors
                .zip(size)
                .map(|(error, size)| if *size > 0.0 { error / size } else { error })
                .fold(0.0, f64::max)
        };
        let [dh, dw] = got;
        [of((dh, (&exact[0], &sizes[0]))), of((dw, (&exact[1], &sizes[1])))]
    };
    for level in levels() {
        for worst in worst(&rounding(level, Precision::Flash)) {
            assert!((1.0 / 8192.0..1.0 / 256.0).contains(&worst), "{level}: {worst:e}");
        }
        for worst in worst(&rounding(level, Precision::Split2)) {
            assert!(worst < 1.0 / 32768.0, "{level}, two pieces: {worst:e}");
        }
        for worst in worst(&Options { level, ..Options::default() }) {
            assert!(worst < 1e-5, "{level}, strict: {worst:e}");
        }
    }
}

/// The same elements, column by column.
fn columns(x: &Array2<bf16>) -> Array2<bf16> {
    let mut y = Array2::from_elem(x.dim().f(), bf16::ZERO);
    y.assign(x);
    y
}

/// Loss and gradients have the same bits with the least budget and with one that keeps all logits, on one thread and
/// on several, and of operands whose elements lie apart.
#[test]
fn no_bit_depends_on_budget_threads_or_strides() {
    let precisions = [Precision::Flash, Precision::Split2];
    let choices = |shape| precisions.map(|precision| (shape, precision));
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let choices = [SEVERAL, LONG, WIDE].into_iter().flat_map(choices);
    for ((shape, precision), level) in
        choices.flat_map(|x| levels().into_iter().map(move |y| (x, y)))
    {
        let x = Operands::new(shape);
        let (h, w) = (columns(&x.h), columns(&x.w));
        let usual = rounding(level, precision);
        let least = Options { memory_budget: 0, ..usual };
        let gradients = x.gradients(x.h.view(), x.w.view(), &usual);
        assert_eq!(gradients, x.gradients(h.view(), w.view(), &usual), "{level}: strides");
        assert_eq!(gradients, x.gradients(x.h.view(), x.w.view(), &least), "{level}: budget");
        let alone = pool.install(|| x.gradients(x.h.view(), x.w.view(), &usual));
        assert_eq!(gradients, alone, "{level}, {precision:?}: threads");
        let alone = pool.install(|| x.gradients(x.h.view(), x.w.view(), &least));
        assert_eq!(gradients, alone, "{level}, {precision:?}: one thread and the least budget");
        let loss = |h, w, options| forward(&x.problem, &x.inputs(h, w), options).unwrap().loss;
        let usual_loss = loss(x.h.view(), x.w.view(), &usual);
        assert_eq!(usual_loss, loss(h.view(), w.view(), &least), "{level}: loss");
    }
}

/// So has the second order, whatever moves; and each of its results alone has the bits of all.
#[test]
fn no_bit_of_the_second_order_depends_on_budget_threads_strides_or_what_is_asked_for() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let of = |shape, h, w| (shape, Moves { h, w });
    let choices = [
        of(SHORT, true, true),
        of(SHORT, true, false),
        of(SHORT, false, true),
        of(SHORT, false, false),
        of(LONG, true, true),
        of(WIDE, true, true),
        of(WIDE, false, true),
    ];
    let rounded = levels().into_iter().flat_map(|level| {
        [Precision::Flash, Precision::Split2].map(|precision| rounding(level, precision))
    });
    for (usual, (shape, moves)) in rounded.flat_map(|x| choices.map(|y| (x, y))) {
        let what = format!("{}, {shape:?}, {moves:?}", usual.name());
        let x = Operands::with_options(shape);
        let ours = [x.h.view(), x.w.view()];
        let (h, w) = (columns(&x.h), columns(&x.w));
        let least = Options { memory_budget: 0, ..usual };
        let all = x.second(ours, (moves, ALL), &usual);
        assert_eq!(all, x.second([h.view(), w.view()], (moves, ALL), &usual), "{what}: strides");
        let of = |asked, options: &Options| x.second(ours, (moves, asked), options);
        assert_eq!(all, of(ALL, &least), "{what}: budget");
        assert_eq!(all, pool.install(|| of(ALL, &usual)), "{what}: threads");
        assert_eq!(all, pool.install(|| of(ALL, &least)), "{what}: budget, one thread");
        if !(moves.h && moves.w) {
            continue;
        }
        assert_eq!(all.gw, of(Asked { gw: true, ..NONE }, &usual).gw, "{what}: gw alone");
        assert_eq!(all.gh, of(Asked { gh: true, ..NONE }, &least).gh, "{what}: gh alone");
        let gbias = of(Asked { gbias: true, ..NONE }, &least).gbias;
        assert_eq!(all.gbias, gbias, "{what}: gbias alone");
        let outputs = of(Asked { outputs: true, ..NONE }, &least);
        assert_eq!(all.gdlse, outputs.gdlse, "{what}: outputs alone");
        assert_eq!(all.gdentropy, outputs.gdentropy, "{what}: outputs alone");
    }
}

/// Of one piece and of two, gh, gw and gbias are off from those in f32 by what the pieces round, against their largest
/// elements.
#[test]
fn the_second_order_is_that_of_rounded_gradients_of_logits() {
    for (shape, level) in
        [SEVERAL, WIDE].into_iter().flat_map(|x| levels().into_iter().map(move |y| (x, y)))
    {
        let x = Operands::with_options(shape);
        let of = |options: &Options| {
            let moves = Moves { h: true, w: true };
            x.second([x.h.view(), x.w.view()], (moves, ALL), options)
        };
        let strict = of(&Options { level, ..Options::default() });
        let worst = |precision| {
            let got = of(&rounding(level, precision));
            let of = |got: &Array2<f32>, exact: &Array2<f32>| {
                let largest = exact.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                let errors = got.iter().zip(exact).map(|(x, y)| (x - y).abs());
                errors.fold(0.0, f32::max) / largest
            };
            let bias = |x: &Array1<f32>| x.clone().insert_axis(ndarray::Axis(0));
            let gbias = of(&bias(&got.gbias), &bias(&strict.gbias));
            [of(&got.gh, &strict.gh), of(&got.gw, &strict.gw), gbias]
        };
        let of_one = worst(Precision::Flash);
        let of_two = worst(Precision::Split2);
        assert!(of_one.iter().all(|x| (1e-4..5e-3).contains(x)), "{level}, {shape:?}: {of_one:?}");
        assert!(of_two.iter().all(|&x| x < 2e-5), "{level}, {shape:?}, two: {of_two:?}");
    }
}
