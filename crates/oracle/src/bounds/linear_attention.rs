//! The bounds of linear_attention. Every result is a sum of products of operands and decays, and
//! the reference itself, run on absolute values, says how large those terms are together.

use super::inputs::{Errors, Inputs};
use super::model::{Model, floor};
use crate::tensor::Values;
use etalon_problem::{Error, LinearAttention, Pass};
use etalon_reference::linear_attention;
use etalon_reference::scalar::Dual;
use ndarray::ArrayD;

/// The errors of its outputs.
pub(super) fn errors(problem: &LinearAttention, inputs: &Inputs<'_>) -> Result<Errors, Error> {
    measured(problem, inputs, |problem, number, error| {
        // Of this algorithm alone: the others are never compiled for these numbers.
        let reference = |x: &_| linear_attention::evaluate(problem, inputs.pass, x);
        inputs.evaluated(&problem.clone().into(), number, reference, error)
    })
}

/// The errors that `evaluate` finds of a problem whose scale is not negative: it is given the number of an element of
/// an operand, and the error of a result, both by the name of the tensor.
pub(super) fn measured<R>(
    problem: &LinearAttention,
    inputs: &Inputs<'_>,
    evaluate: impl FnOnce(
        &LinearAttention,
        &dyn Fn(&str, f64) -> Dual<f64>,
        &dyn Fn(&str, &Dual<f64>) -> f64,
    ) -> Result<R, Error>,
) -> Result<R, Error> {
    let &Inputs { pass, model, operands, .. } = inputs;
    let longest = problem.list_sequences().iter().map(|s| s.tokens).max().unwrap_or(0);
    let tokens = if pass == Pass::Step { 1 } else { longest };
    let (dim, width) = (problem.extents.dim, problem.value_dim);
    let sums = if pass == Pass::DoubleBackward { 3 } else { 1 };
    let plain = sums * ((problem.group().max(1) + 1) * tokens + dim + width + 12); // (N22)
    let largest = largest(problem, operands);
    let terms = plain as f64 * dim as f64 * width as f64;
    let kept = [model.eta_ds, model.score.eta, model.weight.eta, model.dp.eta];
    let kept = kept.into_iter().fold(model.eta_p, f64::max);
    let kept = if model.stores_low() { kept } else { 0.0 };
    let underflow = (model.eta * terms * terms + kept * plain as f64) * largest; // η of (N24)
    let overflows = terms * terms * largest > model.limit;
    // The relative error of a logarithm of a decay.
    let exponents = (model.profile.exp_slope + tokens as f64) * model.u;
    // (N23): the error of a result whose terms have this mass.
    let error = |name: &str, &Dual { value: mass, tangent: weighted }: &Dual<f64>| {
        if mass == 0.0 {
            return 0.0;
        }
        if overflows {
            return f64::INFINITY;
        }
        let Model { u, profile, .. } = *model;
        let weights = model.u_p + model.score.u + model.weight.u;
        let (stored, n) = (weights + model.u_ds + model.dp.u, tokens as f64);
        // A term passes through two products, whatever the form, and (N22) counts it for each sum.
        let products = (2 * sums - 1) as f64 * model.factors;
        let gamma = model.gamma(plain + further(problem, sums, tokens, name));
        // A decay may be the product of n exponentials.
        let decays = ((profile.exp_constant + 1.0) * n * u).exp_m1();
        let others = products + stored + decays * (1.0 + products + stored);
        let roundings = gamma + others * (1.0 + gamma);
        roundings * mass + exponents * (1.0 + roundings) * weighted + floor(mass, underflow)
    };
    // (N21): for each output the sum M of the absolute terms, and as its tangent W, in which each
    // term is weighted with |G|, the size of the logarithm of the decay in it: d/dτ e^{(1−τ)G} = |G|
    // e^{(1−τ)G}, at the τ by which a logarithm may err.
    let absolute = |name: &str, x: f64| match name {
        "g" | "g_gamma" => Dual::new(x * (1.0 - exponents.min(1.0)), -x),
        _ => Dual::constant(x.abs()),
    };
    let positive = problem.clone().scale(problem.scale.abs());
    evaluate(&positive, &absolute, &error)
}

/// The roundings beyond (N22) of outputs that sum over more: over whole states, all tokens or all heads.
/// A result is that of so many `sums`; the longest sequence has so many tokens.
fn further(problem: &LinearAttention, sums: usize, tokens: usize, output: &str) -> usize {
    let e = &problem.extents;
    let states = sums * (e.dim * problem.value_dim + tokens);
    match output {
        "dg" | "gg" => states,
        "dg_gamma" | "gg_gamma" => states + e.batch * e.tokens,
        "dscale" | "gscale" => e.batch * e.query_heads * e.tokens,
        _ => 0,
    }
}

/// The product of the largest element of each operand, each at least 1: no term is larger than this
/// times the number of terms.
fn largest(problem: &LinearAttention, inputs: &Values) -> f64 {
    let operands = inputs.iter().filter(|(name, _)| !name.starts_with('g'));
    let largest = |values: &ArrayD<f64>| {
        values.iter().filter(|x| x.is_finite()).fold(1.0f64, |most, x| most.max(x.abs()))
    };
    operands.map(|(_, values)| largest(values)).product::<f64>() * problem.scale.abs().max(1.0)
}
