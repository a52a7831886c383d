//! Bounds that say something where nothing was required before, and reasons where nothing is.

use crate::{Random, bounds_of, inputs, numbers, tensors};
use etalon_oracle::bounds::{Bound, Bounds, NoBound, Values, bounds};
use etalon_oracle::gates;
use etalon_oracle::profile::Profile;
use etalon_oracle::tensor::{Data, Tensor, Tensors};
use etalon_problem::{
    Attention, Dtype, Extents, LinearCrossEntropy, Pass, Problem, Reduction, TokenOutputs,
};
use ndarray::ArrayD;

/// True where a result of `wrong` is out of bounds in every element.
fn notices(bound: &Bound, wrong: f64) -> bool {
    let mut elements = bound.value.iter().zip(&bound.bound);
    elements.all(|(value, bound)| (wrong - value).abs() > *bound)
}

/// q and k, so many times larger.
fn enlarge(values: &mut Values, factor: f64) {
    for name in ["q", "k"] {
        values.get_mut(name).unwrap().mapv_inplace(|x| Dtype::F32.round(factor * x));
    }
}

fn one_head(queries: usize, keys: usize, dim: usize) -> Problem {
    let e = Extents { batch: 1, query_heads: 1, key_heads: 1, queries, keys, dim };
    Attention::new(e).into()
}

/// Gives q and k one channel as real activations have.
fn massive(values: &mut Values, storage: Dtype, random: &mut Random, dim: usize) {
    for (name, size) in [("q", 448.0), ("k", -547.0)] {
        let rows = values.get_mut(name).unwrap().as_slice_mut().unwrap().chunks_mut(dim);
        rows.for_each(|row| row[0] = storage.round(size + random.normal()));
    }
}

/// Scores that err by more than 1: o keeps to the hull of the values, and lse to the scores.
#[test]
fn an_average_of_uncertain_weights_keeps_to_its_values() {
    let (problem, mut random) = (one_head(8, 16, 16), Random(3));
    let mut peaked = inputs(&problem, Dtype::F32, 1.0, 21);
    peaked.get_mut("q").unwrap().mapv_inplace(|q| 16.0 * q);
    let mut channel = inputs(&problem, Dtype::Bf16, 1.0, 22);
    massive(&mut channel, Dtype::Bf16, &mut random, 16);
    for (values, storage, profile) in
        [(peaked, Dtype::F32, "f32-tf32"), (channel, Dtype::Bf16, "bf16-flash")]
    {
        let [forward, backward] = bounds_of(&problem, storage, profile, &values);
        assert!(notices(&forward.outputs["o"], 1000.0), "{profile}");
        assert!(notices(&forward.outputs["lse"], 0.0) || profile == "f32-tf32", "{profile}");
        let all = backward.outputs.values().chain(forward.outputs.values());
        assert!(all.flat_map(|x| &x.bound).all(|b| *b < f64::INFINITY), "{profile}");
    }
}

/// A row of zeros is no average of values around 4, however uncertain their weights.
#[test]
fn zeros_are_no_average_of_values_that_have_a_mean() {
    let (problem, mut random) = (one_head(8, 16, 16), Random(4));
    let mut values = inputs(&problem, Dtype::Bf16, 1.0, 23);
    massive(&mut values, Dtype::Bf16, &mut random, 16);
    values.get_mut("v").unwrap().mapv_inplace(|v| Dtype::Bf16.round(4.0 + v / 4.0));
    let [forward, _] = bounds_of(&problem, Dtype::Bf16, "bf16-flash", &values);
    assert!(notices(&forward.outputs["o"], 0.0));
}

/// 200,000 keys have n u = 0.015.
#[test]
fn long_rows_are_judged() {
    let problem = one_head(1, 200_000, 1);
    let values = inputs(&problem, Dtype::F32, 1.0, 24);
    let [forward, backward] = bounds_of(&problem, Dtype::F32, "f32-strict", &values);
    assert!(notices(&forward.outputs["o"], 1000.0) && notices(&forward.outputs["lse"], 0.0));
    let bound = &forward.outputs["lse"];
    assert!(bound.bound.iter().all(|b| *b < 0.1), "{:?}", bound.bound); // of 12
    assert!(notices(&backward.outputs["dq"], 1000.0));
}

fn entropies(outputs: TokenOutputs, tokens: usize, vocab: usize) -> LinearCrossEntropy {
    let mut problem = LinearCrossEntropy::new(tokens, 1, vocab).reduction(Reduction::Mean);
    problem.outputs = outputs;
    problem
}

const ALL: TokenOutputs = TokenOutputs { lse: true, logprob: true, entropy: true, argmax: true };

/// h, w and targets of class 0; `dloss` = 1.
fn cross_entropy(problem: &LinearCrossEntropy, h: &[f64], w: &[f64]) -> Tensors {
    let values = Values::from([
        ("h".to_string(), numbers(h, &[problem.tokens, problem.dim])),
        ("w".to_string(), numbers(w, &[problem.vocab, problem.dim])),
        ("dloss".to_string(), numbers(&[1.0], &[])),
    ]);
    let mut inputs = tensors(&values);
    let targets = Data::I64(vec![0; problem.tokens]);
    inputs.insert("targets".to_string(), Tensor { shape: vec![problem.tokens], data: targets });
    inputs
}

fn both(problem: &LinearCrossEntropy, profile: &str, inputs: &Tensors) -> [Bounds; 2] {
    let (problem, profile) = (problem.clone().into(), Profile::by_name(profile).unwrap());
    let of = |pass| bounds(&problem, pass, Dtype::F32, &profile, inputs).unwrap();
    [of(Pass::Forward), of(Pass::Backward)]
}

/// CPUs that multiply bf16 read 2⁻¹³⁰ as 0, which times 2¹⁰⁰ is 2⁻³⁰; nobody else does.
#[test]
fn subnormal_operands_may_be_lost_in_bf16() {
    let problem = entropies(ALL, 1, 2);
    let (least, large) = (0.5f64.powi(130), 2f64.powi(100));
    // The logits are 2⁻³⁰ and 0; dh is −½ and ½ of the elements of w, dw of those of h.
    let inputs = cross_entropy(&problem, &[large], &[least, 0.0]);
    let [flushed, kept] = ["bf16-flash", "f32-strict"].map(|name| both(&problem, name, &inputs));
    let lse = |of: &[Bounds; 2]| of[0].outputs["logprob"].bound.iter().copied().next().unwrap();
    assert!(lse(&flushed) > lse(&kept) + 0.5f64.powi(32), "{} {}", lse(&flushed), lse(&kept));
    let dh = |of: &[Bounds; 2]| of[1].outputs["dh"].bound.iter().copied().next().unwrap();
    assert!(dh(&flushed) >= 0.5 * least + dh(&kept), "{} {}", dh(&flushed), dh(&kept));
    let inputs = cross_entropy(&problem, &[least], &[large, 0.0]);
    let dw =
        |name| both(&problem, name, &inputs)[1].outputs["dw"].bound.iter().copied().next().unwrap();
    assert!(dw("bf16-flash") >= 0.5 * least + dw("f32-strict"));
}

/// Vocabularies of 152k and 262k classes.
#[test]
fn large_vocabularies_are_judged() {
    for vocab in [151_936, 262_144] {
        let (problem, mut random) = (entropies(ALL, 1, vocab), Random(5));
        let w: Vec<f64> = (0..vocab).map(|_| Dtype::F32.round(random.normal())).collect();
        let [forward, backward] =
            both(&problem, "f32-strict", &cross_entropy(&problem, &[1.0], &w));
        let outputs = &forward.outputs;
        assert!(notices(&outputs["loss"], 1000.0) && notices(&outputs["lse"], 0.0), "{vocab}");
        assert!(notices(&outputs["entropy"], 0.0), "{vocab}");
        assert!(outputs.values().all(|x| x.no_bound.is_empty()), "{vocab}");
        // dh is of the size of 1, and the sum of as many terms.
        assert!(notices(&backward.outputs["dh"], 10.0), "{vocab}");
    }
}

/// A class within both errors of the largest is as right as that, one out of reach is wrong.
#[test]
fn argmax_is_a_set_of_classes() {
    let problem = entropies(ALL, 1, 4);
    // Off by 2⁻²², by 2⁻¹² and by 1: an f32 kernel may confuse the first two, one of tf32 three.
    let w = [1.0, 1.0 - 0.5f64.powi(22), 1.0 - 0.5f64.powi(12), 0.0];
    for (profile, right) in [("f32-strict", vec![0, 1]), ("f32-tf32", vec![0, 1, 2])] {
        let [forward, _] = both(&problem, profile, &cross_entropy(&problem, &[1.0], &w));
        let argmax = &forward.outputs["argmax"];
        assert_eq!(argmax.as_right[&0], right, "{profile}");
        assert!(argmax.no_bound.is_empty());
        // One of two or three: no distance tells.
        assert_eq!(argmax.bound[[0]], f64::INFINITY);
        for (class, share) in [(0, 0.0), (1, 0.0), (3, f64::INFINITY)] {
            let got = ArrayD::from_elem(vec![1], f64::from(class));
            assert_eq!(gates::margins(argmax, &got), [share], "{profile} {class}");
        }
    }
    // Logits of 0 are exact: of equals the first.
    let [forward, _] = both(&problem, "f32-tf32", &cross_entropy(&problem, &[0.0], &w));
    assert!(forward.outputs["argmax"].as_right.is_empty());
}

/// Nothing left to average: the loss is exactly 0, and no gradient passes.
#[test]
fn nothing_to_average_is_exact() {
    let mut problem = entropies(TokenOutputs::default(), 1, 3);
    problem.token_weights = true;
    problem.nothing_left = etalon_problem::NothingLeft::Zero;
    let mut inputs = cross_entropy(&problem, &[1.0], &[1.0, 2.0, 3.0]);
    let zero = Tensor::round(&numbers(&[0.0], &[1]), Dtype::F32);
    inputs.insert("token_weights".to_string(), zero);
    let [forward, backward] = both(&problem, "f32-strict", &inputs);
    assert!(notices(&forward.outputs["loss"], 1e-30));
    assert!(notices(&backward.outputs["dh"], 1e-30));
}

/// Elements without a bound are counted, each under the reason that is its own.
#[test]
fn every_element_without_a_bound_has_its_reason() {
    let counted = |bounds: &Bounds, reasons: &[NoBound]| {
        for (name, bound) in &bounds.outputs {
            let none = bound.bound.iter().filter(|b| **b == f64::INFINITY).count();
            assert_eq!(bound.no_bound.values().sum::<usize>(), none, "{name}");
            assert!(bound.no_bound.keys().all(|x| reasons.contains(x)), "{name}: {bound:?}");
        }
        bounds.outputs.values().map(|x| x.no_bound.values().sum::<usize>()).sum::<usize>()
    };
    // Scores of 10⁹ err by hundreds: gradients are free, o keeps to its hull and lse has a bound.
    let problem = one_head(2, 4, 2);
    let mut values = inputs(&problem, Dtype::F32, 1.0, 25);
    enlarge(&mut values, 3e4);
    let [forward, backward] = bounds_of(&problem, Dtype::F32, "f32-strict", &values);
    assert_eq!(counted(&forward, &[]), 0);
    assert!(counted(&backward, &[NoBound::Exponential]) > 0);
    // Scores of 10³⁹ overflow.
    enlarge(&mut values, 1e15);
    let both_passes = bounds_of(&problem, Dtype::F32, "f32-strict", &values);
    assert!(both_passes.iter().all(|bounds| counted(bounds, &[NoBound::Sum]) > 0));
    // Weights that cancel to 2⁻²³ of their size.
    let mut problem = entropies(TokenOutputs::default(), 3, 3);
    problem.token_weights = true;
    let mut inputs = cross_entropy(&problem, &[1.0, 2.0, 3.0], &[1.0, 2.0, 3.0]);
    let weights = numbers(&[1.0, -1.0, 0.5f64.powi(24)], &[3]);
    inputs.insert("token_weights".to_string(), Tensor::round(&weights, Dtype::F32));
    let [forward, backward] = both(&problem, "f32-strict", &inputs);
    assert_eq!(counted(&forward, &[NoBound::Divisor]), 1); // the loss
    assert!(counted(&backward, &[NoBound::Divisor]) > 0);
}

/// A bias of −∞ under a cap is a logit at the end of the cap, as exact as tanh is there.
#[test]
fn a_class_at_the_end_of_the_cap_is_certain() {
    let mut problem = entropies(ALL, 1, 3).softcap(5.0);
    problem.bias = true;
    let mut inputs = cross_entropy(&problem, &[1.0], &[1.0, 2.0, 3.0]);
    let bias = numbers(&[0.0, f64::NEG_INFINITY, 0.0], &[3]);
    inputs.insert("bias".to_string(), Tensor::round(&bias, Dtype::F32));
    let [forward, _] = both(&problem, "f32-strict", &inputs);
    assert!(forward.outputs["lse"].bound.iter().all(|b| *b < 1e-4));
}

/// A score that may be anything within its cap moves lse by no more than the cap allows.
#[test]
fn a_cap_bounds_what_it_caps() {
    let e = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 2, keys: 4, dim: 2 };
    let problem: Problem = Attention::new(e).softcap(5.0).into();
    let mut values = inputs(&problem, Dtype::F32, 1.0, 26);
    enlarge(&mut values, 3e4);
    for bounds in bounds_of(&problem, Dtype::F32, "f32-tf32", &values) {
        assert!(bounds.outputs.values().all(|x| x.no_bound.is_empty()));
        if let Some(lse) = bounds.outputs.get("lse") {
            assert!(lse.bound.iter().all(|b| *b < 10.5), "{:?}", lse.bound);
        }
    }
}
