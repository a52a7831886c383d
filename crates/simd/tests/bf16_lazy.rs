//! The forward pass of lazy attention in bf16, by the rules of the instructions on every machine, beside the same in
//! f32.

use etalon_problem::{Blocking, Extents, LazyAttention, Mask, Sequences, Views};
use etalon_simd::lazy_attention::{self, Cotangents, Inputs, Output};
use etalon_simd::{Level, Mode, Options, Precision};
use half::bf16;
use ndarray::{Array1, Array2, Array4, ShapeBuilder};

/// Numbers of no pattern, at most `size`.
fn noise(seed: usize, shape: [usize; 4], size: f32) -> Array4<bf16> {
    Array4::from_shape_fn(shape, |(b, h, i, d)| {
        let x = (1 + seed + 131 * b + 177 * h + 1009 * i + 7 * d) as f32;
        bf16::from_f32(size * (x * 0.7351).sin())
    })
}

/// Two query heads to a key head, and widths that fill no block.
fn problem(queries: usize, keys: usize, width: usize) -> LazyAttention {
    let extents = Extents { batch: 1, query_heads: 4, key_heads: 2, queries, keys, dim: 40 };
    LazyAttention::new(extents).bias(width).value_dim(24)
}

/// Several tiles of either side, sequences that fill none, keys ahead of the queries.
fn problems() -> Vec<LazyAttention> {
    let packed = Sequences::Packed { cu_query: vec![0, 30, 70], cu_key: vec![0, 80, 133] };
    vec![
        problem(70, 133, 40),
        problem(70, 133, 200).mask(Mask::Full),
        problem(70, 133, 5).mask(Mask::window(Some(50), 5)).sequences(packed),
    ]
}

struct Case {
    problem: LazyAttention,
    q: Array4<bf16>,
    k: Array4<bf16>,
    v: Array4<bf16>,
    bias: Array2<f32>,
    tau: Array1<f32>,
}

impl Case {
    fn new(problem: LazyAttention) -> Self {
        let [heads, width] = problem.bias_shape().unwrap();
        Case {
            q: noise(1, problem.scores.q_shape(), 1.0),
            k: noise(2, problem.scores.k_shape(), 1.0),
            v: noise(3, problem.v_shape(), 1.0),
            bias: Array2::from_shape_fn((heads, width), |(_, d)| -0.05 * d as f32),
            tau: Array1::from_shape_fn(heads, |h| [-1.0, -0.6, 0.3, -2.5][h % 4]),
            problem,
        }
    }

    /// All scores nearly alike.
    fn flat(problem: LazyAttention, spread: f32) -> Self {
        let shape = problem.scores.q_shape();
        let mut case = Case { q: noise(1, shape, spread), ..Case::new(problem) };
        case.bias.fill(0.0);
        case
    }

    fn inputs(&self) -> Inputs<'_, bf16> {
        let Case { q, k, v, bias, tau, .. } = self;
        Inputs::new(q.view(), k.view(), v.view(), tau.view()).bias(bias.view())
    }

    fn forward(&self, options: &Options) -> Output<bf16> {
        lazy_attention::forward(&self.problem, &self.inputs(), options).unwrap()
    }
}

/// Σ a P v is written too.
fn rounding(level: Level, precision: Precision) -> Options {
    let blocking = Some(Blocking { queries: 64, keys: 96 });
    Options { level, precision, blocking, mode: Mode::ForwardGradient, ..Options::default() }
}

fn strict() -> Options {
    rounding(Level::available()[0], Precision::Strict)
}

/// Levels by the rules of the instructions, each with what it rounds.
fn choices() -> Vec<(Level, Precision)> {
    let of = |level| [Precision::Flash, Precision::Split2].map(|precision| (level, precision));
    Level::emulated().into_iter().flat_map(of).collect()
}

fn largest<'a>(x: impl IntoIterator<Item = &'a f32>) -> f32 {
    x.into_iter().fold(0.0, |most, x| most.max(x.abs()))
}

/// The largest difference, over the largest number of the first.
fn apart<'a>(
    x: impl IntoIterator<Item = &'a f32> + Clone,
    y: impl IntoIterator<Item = &'a f32>,
) -> f32 {
    let apart = x.clone().into_iter().zip(y).map(|(x, y)| x - y);
    let apart: Vec<f32> = apart.filter(|x| !x.is_nan()).collect();
    largest(&apart) / largest(x)
}

/// Weights are rounded to 8 bits: of sums of at most 133 that is seldom near 2⁻⁸ of the largest. Of two pieces they
/// have 16.
#[test]
fn results_are_near_those_in_f32() {
    for case in problems().into_iter().map(Case::new) {
        let out = case.forward(&strict());
        for (level, precision) in choices() {
            let rounded = case.forward(&rounding(level, precision));
            let what = format!("{level}, {precision}: {:?}", case.problem);
            // Of rows that see nothing both are −∞.
            assert!(apart(&out.lse, &rounded.lse) < 1e-6, "{what}: lse");
            let [o, of_rounded] = [&out.o, &rounded.o].map(|o| o.mapv(f32::from));
            assert!(apart(&o, &of_rounded) < 1.0 / 64.0, "{what}: o");
            let changed = out.o.iter().zip(&rounded.o).filter(|(x, y)| x != y).count();
            let few = changed * 50 < out.o.len();
            assert_eq!(few, precision == Precision::Split2, "{what}: {changed} of o");
            let [pv, of_rounded] = [&out, &rounded].map(|out| out.pv_sum.as_ref().unwrap());
            let most = if precision == Precision::Split2 { 1e-5 } else { 2e-3 };
            let apart = apart(pv, of_rounded);
            assert!(apart < most, "{what}: Σ a P v {apart}");
        }
    }
}

/// Sums of a P v do not err by the rounding of P, where e is far smaller.
#[test]
fn sums_of_weights_are_exact_where_little_is_left_of_them() {
    let mut case = Case::flat(problem(70, 133, 1).mask(Mask::Full), 0.03);
    case.tau.fill(-1.0);
    let out = case.forward(&strict());
    let [o, pv] = [out.o.mapv(f32::from), out.pv_sum.unwrap()];
    let left = largest(&o) / largest(&pv);
    assert!(left < 0.1, "{left}: a case that shows something");
    for (level, precision) in choices() {
        let rounded = case.forward(&rounding(level, precision));
        let apart = apart(&pv, &rounded.pv_sum.unwrap());
        assert!(apart < 1e-4, "{level}, {precision}: {apart}");
    }
}

/// All pairs lie within rounding of their thresholds: the sum of the forward pass is one over the pairs that the
/// backward pass holds for active.
#[test]
fn both_passes_hold_the_same_pairs_for_active() {
    let mut case = Case::flat(problem(70, 133, 20), 1e-6);
    case.tau.fill(-1.0);
    let dout = noise(4, case.problem.o_shape(), 1.0);
    for (level, precision) in choices() {
        let options = rounding(level, precision);
        let saved = case.forward(&options);
        let plain = Output { pv_sum: None, ..case.forward(&options) };
        let [with, without] = [&saved, &plain].map(|out| {
            let cotangents = Cotangents::new(dout.view());
            lazy_attention::backward(&case.problem, &case.inputs(), out, &cotangents, &options)
                .unwrap()
                .dq
                .mapv(f32::from)
        });
        assert!(apart(&with, &without) < 1.0 / 64.0, "{level}, {precision}: roundings alone");
    }
}

/// Neither threads, nor strides, nor what there is room for change a bit.
#[test]
fn no_bit_depends_on_threads_strides_or_room() {
    for (level, precision) in choices() {
        let options = rounding(level, precision);
        for case in problems().into_iter().map(Case::new) {
            let usual = case.forward(&options);
            let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
            assert!(usual == pool.install(|| case.forward(&options)), "{level}: threads");
            let columns = |x: &Array4<bf16>| {
                let mut y = Array4::from_elem(x.dim().f(), bf16::ZERO);
                y.assign(x);
                y
            };
            let [q, k, v] = [&case.q, &case.k, &case.v].map(columns);
            assert!(usual == Case { q, k, v, ..case }.forward(&options), "{level}: strides");
        }
    }
    // A tile of many queries has no room for the weights of all its keys.
    let case = Case::new(problem(900, 450, 1000).mask(Mask::Full));
    let level = Level::emulated()[0];
    let [one, other] = [64, 900].map(|queries| {
        let blocking = Some(Blocking::new(queries, 64));
        case.forward(&Options { blocking, ..rounding(level, Precision::Flash) })
    });
    assert!(one == other);
}

/// A NaN among the values shows where a pair with it is active, and nowhere else.
#[test]
fn values_that_nothing_attends_to_are_not_read() {
    let mut case = Case::new(problem(70, 133, 200));
    case.v.slice_mut(ndarray::s![.., .., ..40, ..]).fill(bf16::NAN);
    let out = case.forward(&strict());
    let holes = |x: &Array4<f32>| x.mapv(f32::is_nan);
    let [o, pv] = [out.o.mapv(f32::from), out.pv_sum.unwrap()].map(|x| holes(&x));
    assert!(o.iter().any(|x| *x) && o.iter().any(|x| !*x), "a case that shows something");
    for (level, precision) in choices() {
        let rounded = case.forward(&rounding(level, precision));
        assert_eq!(holes(&rounded.o.mapv(f32::from)), o, "{level}, {precision}");
        assert_eq!(holes(&rounded.pv_sum.unwrap()), pv, "{level}, {precision}");
    }
}

/// Scores are rounded nowhere, and neither are the weights of statistics.
#[test]
fn statistics_are_those_in_f32() {
    for case in problems().into_iter().map(Case::new) {
        let Case { problem, q, k, v, bias, tau } = &case;
        let inputs = Views::new().with("q", q).with("k", k).with("v", v);
        let inputs = inputs.with("bias", bias).with("tau", tau);
        let stats = |options: &Options| {
            let stats =
                lazy_attention::stats(problem, &inputs, Blocking::new(33, 17), options).unwrap();
            [stats.element_density, stats.tile_density, stats.surviving_mass, stats.inactive_mass]
        };
        let strict = stats(&strict());
        for (level, precision) in choices() {
            let found = stats(&rounding(level, precision));
            let near = strict.iter().zip(found).all(|(x, y)| (x - y).abs() < 1e-5);
            assert!(near, "{level}, {precision}: {found:?} for {strict:?}");
        }
    }
}
