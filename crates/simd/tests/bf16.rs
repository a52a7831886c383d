//! Attention in bf16, by the rules of the instructions on every machine, beside the same in f32.

use etalon_problem::{Attention, BiasExtents, Blocking, Extents, Mask};
use etalon_simd::attention::{self, Cotangents, Inputs};
use etalon_simd::{Level, Mode, Options, Precision};
use half::bf16;
use ndarray::{Array, Array4, Dimension, ShapeBuilder, Zip};

/// Numbers of no pattern, below 1.
fn noise(seed: usize, shape: [usize; 4]) -> Array4<bf16> {
    Array4::from_shape_fn(shape, |(b, h, i, d)| {
        let x = (1 + seed + 131 * b + 177 * h + 1009 * i + 7 * d) as f32;
        bf16::from_f32((x * 0.7351).sin())
    })
}

/// The largest difference.
fn apart<D: Dimension>(x: &Array<bf16, D>, y: &Array<bf16, D>) -> f32 {
    let mut most = 0.0f32;
    Zip::from(x).and(y).for_each(|x, y| most = most.max((x.to_f32() - y.to_f32()).abs()));
    most
}

/// Lengths and widths that fill no block, two query heads to a key head, several tiles of either side.
fn problems() -> Vec<Attention> {
    let extents =
        Extents { batch: 1, query_heads: 2, key_heads: 1, queries: 70, keys: 133, dim: 40 };
    let masks = [Mask::Full, Mask::causal(), Mask::window(Some(20), 5)];
    let mut all: Vec<_> =
        masks.map(|mask| Attention { value_dim: 24, ..Attention::new(extents).mask(mask) }).into();
    let mut capped = all[1].clone();
    capped.scores.softcap = Some(2.0);
    all.push(capped);
    for bias in [BiasExtents { batch: 1, heads: 2 }, BiasExtents { batch: 1, heads: 1 }] {
        let mut raised = all[1].clone();
        raised.scores.bias = Some(bias);
        all.push(raised);
    }
    all
}

struct Case {
    problem: Attention,
    q: Array4<bf16>,
    k: Array4<bf16>,
    v: Array4<bf16>,
    dout: Array4<bf16>,
    bias: Option<Array4<bf16>>,
}

/// o, lse, dq, dk and dv.
type Results = (attention::Output<bf16>, attention::Gradients<bf16>);

impl Case {
    fn new(problem: &Attention) -> Self {
        Case {
            q: noise(1, problem.scores.q_shape()),
            k: noise(2, problem.scores.k_shape()),
            v: noise(3, problem.v_shape()),
            dout: noise(4, problem.o_shape()),
            bias: problem.scores.bias_shape().map(|shape| noise(5, shape)),
            problem: problem.clone(),
        }
    }

    fn results(&self, options: &Options) -> Results {
        let bias = self.bias.as_ref().map(|bias| bias.view());
        let inputs = Inputs { bias, ..Inputs::new(self.q.view(), self.k.view(), self.v.view()) };
        let out = attention::forward(&self.problem, &inputs, options).unwrap();
        let cotangents = Cotangents::new(self.dout.view());
        let gradients =
            attention::backward(&self.problem, &inputs, &out, &cotangents, options).unwrap();
        (out, gradients)
    }
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

/// The share of elements that differ.
fn changed<D: Dimension>(x: &Array<bf16, D>, y: &Array<bf16, D>) -> f64 {
    let differ = Zip::from(x).and(y).fold(0, |count, x, y| count + usize::from(x != y));
    differ as f64 / x.len() as f64
}

fn strict() -> Options {
    Options { level: Level::available()[0], ..Options::default() }
}

/// Weights and their gradients are rounded to 8 bits: of sums of at most 133 that is seldom near 2⁻⁸ of the largest.
/// Of two pieces they have 16 bits, and results are others only where those in f32 are nearly ties between numbers of
/// bf16, or where much cancels.
#[test]
fn results_are_near_those_in_f32() {
    for case in problems().iter().map(Case::new) {
        let (out, gradients) = case.results(&strict());
        for (level, precision) in choices() {
            let (rounded, of_rounded) = case.results(&rounding(level, precision));
            let what = format!("{level}, {precision}: {:?}", case.problem);
            let lse = Zip::from(&out.lse)
                .and(&rounded.lse)
                .fold(0.0, |most: f32, x, y| if x == y { most } else { most.max((x - y).abs()) });
            assert!(lse < 1e-5, "{what}: lse {lse}");
            let all = [
                (&out.o, &rounded.o),
                (&gradients.dq, &of_rounded.dq),
                (&gradients.dk, &of_rounded.dk),
                (&gradients.dv, &of_rounded.dv),
            ];
            for ((x, y), name) in all.into_iter().zip(["o", "dq", "dk", "dv"]) {
                let size = x.iter().fold(0.0, |most: f32, x| most.max(x.to_f32().abs()));
                let (apart, changed) = (apart(x, y), changed(x, y));
                assert!(apart < size / 64.0, "{what}: {name} {apart} of {size}");
                // Of two pieces 0.005 at the most, of one 0.064 at the least.
                let few = changed < 1.0 / 64.0;
                assert_eq!(few, precision == Precision::Split2, "{what}: {name} {changed}");
            }
            for (x, y) in gradients.dbias.iter().zip(&of_rounded.dbias) {
                let apart = apart(x, y);
                assert!(apart < 1.0 / 64.0, "{what}: dbias {apart}");
            }
        }
    }
}

/// Neither the mode, nor threads, nor strides change a bit.
#[test]
fn no_bit_depends_on_the_mode_threads_or_strides() {
    let choices = choices();
    for (case, &(level, precision)) in problems().iter().map(Case::new).zip(choices.iter().cycle())
    {
        let options = rounding(level, precision);
        let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let bits =
            |(out, gradients): Results| (out.o, out.lse, gradients.dq, gradients.dk, gradients.dv);
        let usual = bits(pool(1).install(|| case.results(&options)));
        let separate = Options { mode: Mode::Separate, ..options };
        assert!(usual == bits(case.results(&separate)), "{level}: mode");
        assert!(usual == bits(pool(3).install(|| case.results(&options))), "{level}: threads");
        let columns = |x: &Array4<bf16>| {
            let mut y = Array4::from_elem(x.dim().f(), bf16::ZERO);
            y.assign(x);
            y
        };
        let [q, k, v, dout] = [&case.q, &case.k, &case.v, &case.dout].map(columns);
        let (problem, bias) = (case.problem.clone(), case.bias.clone());
        let apart = Case { problem, q, k, v, dout, bias };
        assert!(usual == bits(apart.results(&options)), "{level}: strides");
    }
}
