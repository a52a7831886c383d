//! The second order in bf16, and the gradients of lazy attention, by the rules of the instructions on every machine,
//! beside the same in f32.

use etalon_problem::{
    Align, Attention, AttentionLse, BiasExtents, Blocking, DistanceBias, Extents, LazyAttention,
    Mask, Pass, Precision as Kind, Problem, Role, Views, ViewsMut,
};
use etalon_simd::{Level, Mode, Options, Precision, run};
use half::bf16;
use ndarray::{ArrayD, ShapeBuilder};
use std::collections::BTreeMap;

/// Tensors by name, those of the storage type and those of f32.
#[derive(Clone, Default)]
struct Tensors {
    stored: BTreeMap<&'static str, ArrayD<bf16>>,
    wide: BTreeMap<&'static str, ArrayD<f32>>,
}

/// Results by name, in f32.
type Results = BTreeMap<&'static str, Vec<f32>>;

/// Numbers of no pattern, below 1.
fn noise(seed: usize, shape: &[usize]) -> ArrayD<f32> {
    let mut t = 131 * seed;
    ArrayD::from_shape_simple_fn(shape, || {
        t += 1;
        ((t * t % 7919) as f32 * 0.7351).sin()
    })
}

impl Tensors {
    /// Places of the results of a pass, filled with what is no result.
    fn places(problem: &Problem, pass: Pass) -> Self {
        let mut all = Tensors::default();
        for operand in problem.operands(pass).into_iter().filter(|x| x.role == Role::Output) {
            match operand.precision {
                Kind::Storage => {
                    let place = ArrayD::from_elem(operand.shape, bf16::NAN);
                    all.stored.insert(operand.name, place);
                }
                _ => _ = all.wide.insert(operand.name, ArrayD::from_elem(operand.shape, f32::NAN)),
            }
        }
        all
    }

    fn views(&self) -> Views<'_> {
        let mut views = Views::new();
        self.stored.iter().for_each(|(name, x)| views.push(name, x.into()));
        self.wide.iter().for_each(|(name, x)| views.push(name, x.into()));
        views
    }

    fn views_mut(&mut self) -> ViewsMut<'_> {
        let mut views = ViewsMut::new();
        self.stored.iter_mut().for_each(|(name, x)| views.push(name, x.into()));
        self.wide.iter_mut().for_each(|(name, x)| views.push(name, x.into()));
        views
    }

    fn results(&self) -> Results {
        let stored =
            self.stored.iter().map(|(name, x)| (*name, x.iter().map(|x| x.to_f32()).collect()));
        stored
            .chain(self.wide.iter().map(|(name, x)| (*name, x.iter().copied().collect())))
            .collect()
    }
}

/// The operands of a pass, with what the forward pass in f32 saves.
fn operands(problem: &Problem, pass: Pass) -> Tensors {
    let mut all = Tensors::default();
    for (seed, operand) in problem.operands(pass).into_iter().enumerate() {
        let input = matches!(operand.role, Role::Input | Role::Cotangent | Role::OptionalCotangent);
        if !input {
            continue;
        }
        let mut x = noise(seed, &operand.shape);
        if operand.name == "tau" {
            x.fill(-1.5);
        }
        match operand.precision {
            Kind::Storage => _ = all.stored.insert(operand.name, x.mapv(bf16::from_f32)),
            _ => _ = all.wide.insert(operand.name, x),
        }
    }
    let mut saved = Tensors::places(problem, Pass::Forward);
    let mut inputs = all.clone();
    let needs: Vec<_> = problem.operands(Pass::Forward).iter().map(|x| x.name).collect();
    inputs.stored.retain(|name, _| needs.contains(name));
    inputs.wide.retain(|name, _| needs.contains(name));
    run(problem, Pass::Forward, &inputs.views(), &mut saved.views_mut(), &strict()).unwrap();
    for operand in problem.operands(pass).iter().filter(|x| x.role == Role::Saved) {
        saved
            .stored
            .remove(operand.name)
            .into_iter()
            .for_each(|x| _ = all.stored.insert(operand.name, x));
        saved
            .wide
            .remove(operand.name)
            .into_iter()
            .for_each(|x| _ = all.wide.insert(operand.name, x));
    }
    all
}

fn strict() -> Options {
    Options { level: Level::available()[0], ..Options::default() }
}

fn rounding(level: Level, precision: Precision) -> Options {
    let blocking = Some(Blocking { queries: 64, keys: 96 });
    Options { level, precision, blocking, ..Options::default() }
}

/// Levels by the rules of the instructions, each with what it rounds.
fn choices() -> Vec<(Level, Precision)> {
    let of = |level| [Precision::Flash, Precision::Split2].map(|precision| (level, precision));
    Level::emulated().into_iter().flat_map(of).collect()
}

/// Lengths and widths that fill no block, two query heads to a key head, several tiles of either side.
fn problems() -> Vec<(Problem, Pass)> {
    let extents =
        Extents { batch: 1, query_heads: 2, key_heads: 1, queries: 70, keys: 133, dim: 40 };
    let masks = [Mask::Full, Mask::causal(), Mask::window(Some(20), 5)];
    let mut all: Vec<(Problem, Pass)> = Vec::new();
    for (number, mask) in masks.into_iter().enumerate() {
        let mut attention = Attention::new(extents).value_dim(24).mask(mask.clone());
        attention.scores.softcap = (number == 1).then_some(2.0);
        attention.scores.bias = (number == 2).then_some(BiasExtents { batch: 1, heads: 1 });
        let mut lse = AttentionLse::new(extents).mask(mask.clone());
        lse.scores.softcap = (number == 2).then_some(2.0);
        let mut lazy = LazyAttention { value_dim: 24, ..LazyAttention::new(extents) };
        lazy.scores.mask = mask;
        let reach = DistanceBias { width: 50, align: Align::BottomRight };
        lazy.bias = (number == 1).then_some(reach);
        all.push((attention.clone().into(), Pass::DoubleBackward));
        all.push((attention.into(), Pass::Jvp));
        all.push((lse.into(), Pass::DoubleBackward));
        all.push((lazy.clone().into(), Pass::Backward));
        all.push((lazy.into(), Pass::DoubleBackward));
    }
    all
}

/// The results of a pass.
fn results((problem, pass): &(Problem, Pass), x: &Tensors, options: &Options) -> Results {
    let mut places = Tensors::places(problem, *pass);
    run(problem, *pass, &x.views(), &mut places.views_mut(), options).unwrap();
    places.results()
}

/// Weights are rounded to 8 bits, or to 16: of sums of at most 133 that is seldom near 2⁻⁸ of the largest, even where
/// the second order cancels.
#[test]
fn results_are_near_those_in_f32() {
    for case in problems() {
        let x = operands(&case.0, case.1);
        let exact = results(&case, &x, &strict());
        for (level, precision) in choices() {
            let rounded = results(&case, &x, &rounding(level, precision));
            let mut changed = 0;
            for (name, exact) in &exact {
                let what =
                    format!("{level}, {precision}: {} {} {name}", case.0.algorithm(), case.1);
                let size = exact.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                let differences = exact.iter().zip(&rounded[name]).map(|(x, y)| (x - y).abs());
                let apart = differences
                    .fold(0.0f32, |most, x| if x > most || x.is_nan() { x } else { most });
                let most = if precision == Precision::Split2 { 128.0 } else { 32.0 };
                assert!(apart <= size / most, "{what}: {apart} of {size}");
                changed += exact.iter().zip(&rounded[name]).filter(|(x, y)| x != y).count();
            }
            assert!(changed > 0, "{level}, {precision}: {} {}", case.0.algorithm(), case.1);
        }
    }
}

/// Neither threads, nor strides, nor the mode change a bit.
#[test]
fn no_bit_depends_on_threads_strides_or_the_mode() {
    let choices = choices();
    for (case, &(level, precision)) in problems().iter().zip(choices.iter().cycle()) {
        let options = rounding(level, precision);
        let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut x = operands(&case.0, case.1);
        let bits = |results: Results| -> BTreeMap<_, Vec<u32>> {
            let bits = |(name, x): (_, Vec<f32>)| (name, x.into_iter().map(f32::to_bits).collect());
            results.into_iter().map(bits).collect()
        };
        let what = format!("{level}, {precision}: {} {}", case.0.algorithm(), case.1);
        let usual = bits(pool(1).install(|| results(case, &x, &options)));
        assert!(usual == bits(pool(3).install(|| results(case, &x, &options))), "{what}: threads");
        let separate = Options { mode: Mode::Separate, ..options };
        assert!(usual == bits(results(case, &x, &separate)), "{what}: mode");
        for x in x.stored.values_mut() {
            let mut columns = ArrayD::from_elem(x.raw_dim().f(), bf16::ZERO);
            columns.assign(x);
            *x = columns;
        }
        assert!(usual == bits(results(case, &x, &options)), "{what}: strides");
    }
}
