//! The bounds of gate G1 against kernels that are right, and against what they must notice.

mod adversary;
mod adversary_attention;
mod adversary_cross_entropy;
mod naive;
mod sharp;

use etalon_oracle::bounds::{Bounds, Values, bounds};
use etalon_oracle::gates;
use etalon_oracle::gates::Verdict;
use etalon_oracle::profile::Profile;
use etalon_oracle::tensor::{Data, Tensor, Tensors};
use etalon_problem::{
    Algorithm, Align, Attention, AttentionLse, Dtype, Extents, LinearCrossEntropy, Mask, Pass,
    Precision, Problem, Reduction, Sequences, TokenOutputs,
};
use naive::{Factors, Style, evaluate};
use ndarray::{ArrayD, Axis, IxDyn};

/// (C25) of one token and two classes, where tanh′ is taken as 1 − tanh²: it has lost ten digits, which
/// the bound has to grant.
#[test]
fn a_capped_slope_may_be_a_difference() {
    let (cap, x, ends) = (0.5, 5.0, [1.0, -1.1]);
    let problem = LinearCrossEntropy::new(1, 1, 2).softcap(cap).reduction(Reduction::Sum);
    let numbers = |list: &[f64], shape: &[usize]| {
        Tensor::round(&ArrayD::from_shape_vec(IxDyn(shape), list.to_vec()).unwrap(), Dtype::F64)
    };
    let target = Tensor { shape: vec![1], data: Data::I64(vec![0]) };
    let inputs = Tensors::from([
        ("h".to_string(), numbers(&[x], &[1, 1])),
        ("w".to_string(), numbers(&ends, &[2, 1])),
        ("targets".to_string(), target),
        ("dloss".to_string(), numbers(&[1.0], &[])),
        ("ddh".to_string(), numbers(&[1.0], &[1, 1])),
    ]);
    let profile = Profile::by_name("f64").unwrap();
    let bounds =
        bounds(&problem.into(), Pass::DoubleBackward, Dtype::F64, &profile, &inputs).unwrap();
    // (C2), (C4), (C11), (C21) to (C28), as they stand.
    let t = ends.map(|w| f64::tanh(w * x / cap));
    let slope = t.map(|t| 1.0 - t * t);
    let e = t.map(|t| (cap * t).exp());
    let p = e.map(|e_v| e_v / (e[0] + e[1]));
    let moved = [0, 1].map(|v| slope[v] * ends[v]);
    let mean = p[0] * moved[0] + p[1] * moved[1];
    let gh: f64 = [0, 1]
        .map(|v| {
            let dz = p[v] - f64::from(v == 0);
            let bend = -2.0 / cap * t[v] * slope[v] * ends[v];
            (slope[v] * p[v] * (moved[v] - mean) + bend * dz) * ends[v]
        })
        .iter()
        .sum();
    let found = &bounds.outputs["gh"];
    let (value, bound) = (found.value[[0, 0]], found.bound[[0, 0]]);
    assert!((gh - value).abs() <= bound, "{gh:e}, exact is {value:e} ± {bound:e}");
    // And it says something: the cap leaves e⁻²⁰ of slopes that are of the size of 1.
    assert!(bound < 1e-13, "{bound:e}");
}

/// (N96) P ⊙ U of two keys that count alike, as stored weights of 8 and 16 digits: the bound grants their roundings,
/// and not much more.
#[test]
fn stored_weights_of_the_second_order_round_once() {
    let e = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 1, keys: 2, dim: 1 };
    let problem: Problem = Attention::new(e).softmax_scale(1.0).into();
    let tensor = |list: &[f64]| numbers(list, &[1, 1, list.len(), 1]);
    let inputs = Values::from([
        ("q".to_string(), tensor(&[0.0])),
        ("k".to_string(), tensor(&[1.3, -1.3])),
        ("v".to_string(), tensor(&[1.0, 0.0])),
        ("tq".to_string(), tensor(&[1.0])),
    ]);
    // u = 0: to = P U v of the first key.
    let weight = 0.65;
    for (name, digits) in [("bf16-flash", 8), ("bf16-split2", 16)] {
        let profile = Profile::by_name(name).unwrap();
        let bounds = bounds(&problem, Pass::Jvp, Dtype::F32, &profile, &tensors(&inputs)).unwrap();
        let found = &bounds.outputs["to"];
        let (value, bound) = (found.value[[0, 0, 0, 0]], found.bound[[0, 0, 0, 0]]);
        // Cut off, the weight errs by all of the roundoff of its digits.
        let grid = 0.5f64.powi(digits);
        let cut = (weight / grid).floor() * grid;
        assert!((cut - value).abs() <= bound, "{name}: {cut}, exact is {value} ± {bound:e}");
        assert!(bound < 2.0 * grid, "{name}: {bound:e}");
    }
}

/// (N96) da and x of linear cross-entropy, of two equal logits: the bound grants that each is rounded once, and not
/// much more.
#[test]
fn stored_gradients_of_logits_round_once() {
    let outputs = TokenOutputs { lse: true, ..TokenOutputs::default() };
    let problem: Problem = LinearCrossEntropy::new(1, 1, 2).bias().outputs(outputs).into();
    let inputs = Values::from([
        ("h".to_string(), numbers(&[0.0], &[1, 1])),
        ("w".to_string(), numbers(&[1.3, -1.3], &[2, 1])),
        ("bias".to_string(), numbers(&[0.0, 0.0], &[2])),
        ("dlse".to_string(), numbers(&[1.3], &[1])),
        ("ddh".to_string(), numbers(&[1.0], &[1, 1])),
    ]);
    let mut inputs = tensors(&inputs);
    let target = Tensor { shape: vec![1], data: Data::I64(vec![0]) };
    inputs.insert("targets".to_string(), target);
    for (name, digits) in [("bf16-flash", 8), ("bf16-split2", 16)] {
        let profile = Profile::by_name(name).unwrap();
        let pass = Pass::DoubleBackward;
        let bounds = bounds(&problem, pass, Dtype::F32, &profile, &inputs).unwrap();
        // gw = da ddh with da = p dlse, and gbias = x with x = p ȧ dlse, of the first class.
        let [gw, gbias] = [("gw", 0.65), ("gbias", 0.845)].map(|(output, weight)| {
            let found = &bounds.outputs[output];
            (weight, *found.value.first().unwrap(), *found.bound.first().unwrap())
        });
        for (weight, value, bound) in [gw, gbias] {
            let grid = 0.5f64.powi(digits);
            let cut = (weight / grid).floor() * grid;
            assert!((cut - value).abs() <= bound, "{name}: {cut}, exact is {value} ± {bound:e}");
            assert!(bound < 2.0 * grid, "{name}: {bound:e}");
        }
    }
}

/// An array of numbers.
fn numbers(list: &[f64], shape: &[usize]) -> ArrayD<f64> {
    ArrayD::from_shape_vec(IxDyn(shape), list.to_vec()).unwrap()
}

/// Normally distributed numbers, reproducibly: a counter through a mixing function.
struct Random(u64);

impl Random {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// One of the numbers from 0 to n − 1.
    fn below(&mut self, n: usize) -> usize {
        (self.uniform() * n as f64) as usize
    }

    fn sign(&mut self) -> f64 {
        if self.uniform() < 0.5 { -1.0 } else { 1.0 }
    }

    fn normal(&mut self) -> f64 {
        let (u, v) = (1.0 - self.uniform(), self.uniform());
        (-2.0 * u.ln()).sqrt() * (2.0 * std::f64::consts::PI * v).cos()
    }
}

/// Operands of both passes, rounded to the types in which they are stored; q and k `peak` times
/// larger than normal, so that single keys gain weight.
fn inputs(problem: &Problem, dtype: Dtype, peak: f64, seed: u64) -> Values {
    let mut random = Random(seed);
    let mut values = Values::new();
    for operand in problem.operands(Pass::Backward) {
        if !operand.role.is_given() {
            continue;
        }
        let stored = match operand.precision {
            Precision::Storage => dtype,
            Precision::Wide if dtype == Dtype::F64 => dtype,
            Precision::Wide => Dtype::F32,
            Precision::Integer => continue, // attention has none
        };
        let scale = if ["q", "k"].contains(&operand.name) { peak } else { 1.0 };
        let list = (0..operand.len()).map(|_| stored.round(scale * random.normal())).collect();
        let array = ArrayD::from_shape_vec(IxDyn(&operand.shape), list).unwrap();
        values.insert(operand.name.to_string(), array);
    }
    values
}

/// The operands as a tier gets them.
fn tensors(values: &Values) -> Tensors {
    values.iter().map(|(name, x)| (name.clone(), Tensor::round(x, Dtype::F64))).collect()
}

fn bounds_of(problem: &Problem, dtype: Dtype, profile: &str, inputs: &Values) -> [Bounds; 2] {
    let profile = Profile::by_name(profile).unwrap();
    [Pass::Forward, Pass::Backward]
        .map(|pass| bounds(problem, pass, dtype, &profile, &tensors(inputs)).unwrap())
}

/// Problems that between them use every option.
fn problems() -> Vec<(&'static str, Problem)> {
    let e = Extents { batch: 2, query_heads: 4, key_heads: 2, queries: 33, keys: 41, dim: 24 };
    let packed = Sequences::Packed { cu_query: vec![0, 9, 9, 30], cu_key: vec![0, 17, 20, 41] };
    let one = Extents { batch: 1, ..e };
    vec![
        ("plain", Attention::new(e).into()),
        ("causal", Attention::new(e).value_dim(40).mask(Mask::causal()).into()),
        ("cap", Attention::new(e).softcap(2.0).mask(Mask::window(5, 2)).into()),
        ("sinks", Attention::new(e).sinks().mask(Mask::Causal { align: Align::TopLeft }).into()),
        ("bias", Attention::new(e).bias(1, 4).softcap(20.0).into()),
        ("broadcast", Attention::new(e).bias(1, 1).sinks().mask(Mask::causal()).into()),
        ("packed", Attention::new(one).sinks().mask(Mask::causal()).sequences(packed).into()),
        ("scale", Attention::new(e).softmax_scale(-1.5).bias(2, 1).into()),
        ("lse", AttentionLse::new(e).mask(Mask::causal()).into()),
        ("lse cap", AttentionLse::new(e).softcap(3.0).sinks().bias(2, 4).into()),
    ]
}

#[test]
fn honest_kernels_stay_within_their_bounds() {
    let cases = [
        (Dtype::F32, Dtype::F32, "f32-strict"),
        (Dtype::Bf16, Dtype::F32, "f32-strict"),
        (Dtype::F16, Dtype::F32, "f32-strict"),
        (Dtype::Bf16, Dtype::Bf16, "bf16-flash"),
        (Dtype::F16, Dtype::F16, "f16-flash"),
        (Dtype::F32, Dtype::F32, "f32-tf32"),
        (Dtype::F32, Dtype::F32, "f32-bf16x3"),
    ];
    for (name, problem) in problems() {
        let lse_alone = problem.algorithm() == Algorithm::AttentionLse;
        for (storage, stored, profile) in cases {
            for (seed, peak, tile) in [(1, 1.0, 1000), (2, 1.0, 8), (3, 3.0, 16), (4, 0.1, 8)] {
                let inputs = inputs(&problem, storage, peak, seed);
                let bounds = bounds_of(&problem, storage, profile, &inputs);
                for (forward_gradient, by_head) in [(false, false), (true, false), (false, true)] {
                    let forward_gradient = forward_gradient && lse_alone;
                    let factors = match profile {
                        "f32-tf32" => Factors::TenBits,
                        "f32-bf16x3" => Factors::TwoParts,
                        _ => Factors::Whole,
                    };
                    let style = Style { storage, stored, tile, forward_gradient, by_head, factors };
                    let got = tensors(&evaluate::<f32>(&problem, &inputs, style));
                    for bounds in &bounds {
                        let judgement = gates::g1(bounds, &got);
                        let margin = judgement.margin;
                        assert_eq!(judgement.verdict, Verdict::Pass, "{name} {profile} {style:?}");
                        // An honest kernel must not come out infinitely better than its bound. With
                        // narrowed factors, scores of the size of 200 err by more than a tenth, and
                        // such rows carry no requirement.
                        let lost = factors == Factors::TenBits && peak > 1.0;
                        assert!(
                            lost || margin > 5e-3,
                            "{name} {profile} {style:?}: margin {margin:e}"
                        );
                    }
                }
            }
        }
    }
}

/// Products that read ten bits are no f32 arithmetic, nor that of two numbers in bf16.
#[test]
fn narrowed_factors_are_out_of_the_strict_bounds() {
    let e = Extents { batch: 1, query_heads: 2, key_heads: 2, queries: 33, keys: 41, dim: 24 };
    let problem: Problem = Attention::new(e).into();
    let inputs = inputs(&problem, Dtype::F32, 1.0, 13);
    for profile in ["f32-strict", "f32-bf16x3"] {
        let style = Style { factors: Factors::TenBits, ..Style::plain(Dtype::F32) };
        let got = tensors(&evaluate::<f32>(&problem, &inputs, style));
        for bounds in bounds_of(&problem, Dtype::F32, profile, &inputs) {
            let verdict = gates::g1(&bounds, &got).verdict;
            assert!(matches!(verdict, Verdict::Fail(_)), "{profile}");
        }
    }
}

#[test]
fn an_f64_kernel_stays_within_the_f64_bounds() {
    for (name, problem) in problems() {
        let inputs = inputs(&problem, Dtype::F64, 1.0, 5);
        let got = tensors(&evaluate::<f64>(&problem, &inputs, Style::plain(Dtype::F64)));
        for bounds in bounds_of(&problem, Dtype::F64, "f64", &inputs) {
            assert_eq!(gates::g1(&bounds, &got).verdict, Verdict::Pass, "{name}");
        }
    }
}

#[test]
fn bounds_are_sharp() {
    for (name, problem) in problems() {
        let inputs = inputs(&problem, Dtype::F32, 1.0, 6);
        for bounds in bounds_of(&problem, Dtype::F32, "f32-strict", &inputs) {
            assert_eq!(gates::informative(&bounds), Ok(()), "{name}");
            for (output, bound) in &bounds.outputs {
                let rms = |x: &ArrayD<f64>| {
                    let finite: Vec<f64> = x.iter().copied().filter(|x| x.is_finite()).collect();
                    (finite.iter().map(|x| x * x).sum::<f64>() / finite.len() as f64).sqrt()
                };
                let relative = rms(&bound.bound) / rms(&bound.value);
                // 24 elements and 41 keys make some 200 roundings of 6e-8 each, on terms that
                // outweigh the sum fivefold; the gradients contain an own o and lse besides, or a δ
                // that is a sum over the keys.
                let largest = if ["o", "lse"].contains(&output.as_str()) { 1e-4 } else { 8e-4 };
                assert!(relative < largest, "{name} {output}: {relative:e}");
            }
            // With a scale of 1.5 most rows have one key that outweighs all others.
            let least = if name == "scale" { 0.2 } else { 0.99 };
            assert!(bounds.power.is_none_or(|power| power > least), "{name}: {:?}", bounds.power);
        }
    }
}

/// Mistakes, each of which the bounds must notice.
#[test]
fn mistakes_are_out_of_bounds() {
    let e = Extents { batch: 1, query_heads: 2, key_heads: 2, queries: 65, keys: 65, dim: 32 };
    let right = Attention::new(e).mask(Mask::causal());
    let scale = right.scores.scale();
    let right = Problem::from(right);
    // A 1 % error of the scale is larger than what bf16 weights may cost; 0.1 % is not, in bf16.
    let wrong: [(&str, Problem, &str); 4] = [
        ("one key too many", Attention::new(e).mask(Mask::window(None, 1)).into(), "bf16-flash"),
        ("first key forgotten", Attention::new(e).mask(Mask::window(63, 0)).into(), "f32-strict"),
        (
            "scale",
            Attention::new(e).mask(Mask::causal()).softmax_scale(0.97 * scale).into(),
            "bf16-flash",
        ),
        (
            "scale",
            Attention::new(e).mask(Mask::causal()).softmax_scale(0.999 * scale).into(),
            "f32-strict",
        ),
    ];
    for (name, wrong, profile) in wrong {
        let storage = if profile == "f32-strict" { Dtype::F32 } else { Dtype::Bf16 };
        let inputs = inputs(&right, storage, 1.0, 7);
        let style = Style { tile: 16, ..Style::plain(storage) };
        let got = tensors(&evaluate::<f32>(&wrong, &inputs, style));
        for bounds in bounds_of(&right, storage, profile, &inputs) {
            let verdict = gates::g1(&bounds, &got).verdict;
            assert!(matches!(verdict, Verdict::Fail(_)), "{name} passes as {profile}");
        }
    }
}

/// Operands of a pair that is not visible can be no reason for a looser bound.
#[test]
fn poison_behind_the_mask_changes_no_bound() {
    let e = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 4, keys: 6, dim: 8 };
    let window = Mask::Window { left: Some(1), right: Some(0), align: Align::TopLeft };
    let problem: Problem = Attention::new(e).mask(window).into(); // keys 4 and 5 are never seen
    let clean = inputs(&problem, Dtype::F32, 1.0, 8);
    let mut poisoned = clean.clone();
    for (name, poison) in [("k", f64::NAN), ("v", f64::INFINITY)] {
        poisoned.get_mut(name).unwrap().slice_axis_mut(Axis(2), (4..).into()).fill(poison);
    }
    let clean = bounds_of(&problem, Dtype::F32, "f32-strict", &clean);
    let poisoned = bounds_of(&problem, Dtype::F32, "f32-strict", &poisoned);
    for (clean, poisoned) in clean.iter().zip(&poisoned) {
        for (name, bound) in &clean.outputs {
            assert_eq!(bound.bound, poisoned.outputs[name].bound, "{name}");
            assert_eq!(bound.value, poisoned.outputs[name].value, "{name}");
        }
    }
}

/// No requirement is stated where the arithmetic may overflow, and the case says so.
#[test]
fn overflowing_sums_carry_no_requirement() {
    let e = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 3, keys: 3, dim: 2 };
    let problem: Problem = Attention::new(e).softmax_scale(1e-40).into();
    let mut inputs = inputs(&problem, Dtype::F32, 1.0, 9);
    for name in ["q", "k"] {
        inputs.get_mut(name).unwrap().fill(1e20); // q·k is 2e40 before it is scaled to 2
    }
    for bounds in bounds_of(&problem, Dtype::F32, "f32-strict", &inputs) {
        for (name, bound) in &bounds.outputs {
            assert!(bound.bound.iter().all(|&b| b == f64::INFINITY), "{name}");
        }
        assert!(gates::informative(&bounds).is_err());
    }
}

#[test]
fn passes_without_bounds_say_so() {
    let e = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 1, keys: 1, dim: 1 };
    let problem: Problem = AttentionLse::new(e).into();
    let inputs = inputs(&problem, Dtype::F32, 1.0, 10);
    let profile = Profile::by_name("f16-flash").unwrap();
    let error = bounds(&problem, Pass::Jvp, Dtype::F32, &profile, &tensors(&inputs)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a bound of attention_lse jvp is not supported: `f16-flash` stores weights in a low \
         precision"
    );
}

#[test]
fn extents_of_zero_have_bounds_too() {
    let e = Extents { batch: 1, query_heads: 2, key_heads: 1, queries: 3, keys: 4, dim: 2 };
    let empty = [
        Extents { batch: 0, ..e },
        Extents { query_heads: 0, ..e },
        Extents { queries: 0, ..e },
        Extents { keys: 0, ..e },
    ];
    for e in empty {
        let (batch, heads) = (e.batch, e.query_heads);
        let problems: [Problem; 2] = [
            Attention::new(e).sinks().bias(batch, heads).into(),
            AttentionLse::new(e).sinks().bias(1, 1).into(),
        ];
        for problem in problems {
            let inputs = inputs(&problem, Dtype::F32, 1.0, 11);
            let got = tensors(&evaluate::<f32>(&problem, &inputs, Style::plain(Dtype::F32)));
            for bounds in bounds_of(&problem, Dtype::F32, "f32-strict", &inputs) {
                assert_eq!(gates::g1(&bounds, &got).verdict, Verdict::Pass, "{e:?}");
            }
        }
    }
}

/// NaN and ∞ in what is seen: the class of every result decides, and nothing panics.
#[test]
fn non_finite_inputs_leave_classes_to_judge() {
    for (name, problem) in problems() {
        for (operand, poison) in [("q", f64::NAN), ("k", f64::INFINITY), ("bias", f64::INFINITY)] {
            let mut inputs = inputs(&problem, Dtype::F32, 1.0, 12);
            let Some(array) = inputs.get_mut(operand) else { continue };
            let Some(first) = array.iter_mut().next() else { continue };
            *first = poison;
            let got = tensors(&evaluate::<f32>(&problem, &inputs, Style::plain(Dtype::F32)));
            for bounds in bounds_of(&problem, Dtype::F32, "f32-strict", &inputs) {
                let judgement = gates::g1(&bounds, &got);
                assert_eq!(judgement.verdict, Verdict::Pass, "{name} {operand} {poison}");
                let classes = bounds.outputs.values().flat_map(|x| x.value.iter().zip(&x.bound));
                for (value, bound) in classes {
                    assert!(value.is_finite() || *bound == 0.0, "{name}: {value} ± {bound}");
                }
            }
        }
    }
}
