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
    let chains = Chains::new(problem, inputs);
    // (N21): for each output the sum M of the absolute terms, and as its tangent W, in which each
    // term is weighted with |G|, the size of the logarithm of the decay in it: d/dτ e^{(1−τ)G} = |G|
    // e^G at τ = 0.
    let absolute = |name: &str, x: f64| match name {
        "g" | "g_gamma" => Dual::new(x, -x),
        _ => Dual::constant(x.abs()),
    };
    let problem = problem.clone().scale(problem.scale.abs());
    let evaluate = |x: &_| linear_attention::evaluate(&problem, inputs.pass, x);
    let error = |name: &str, mass: &_| chains.error(name, mass);
    inputs.evaluated(&problem.clone().into(), absolute, evaluate, error)
}

/// How many roundings a term meets, and what its decay and underflow cost.
struct Chains<'a> {
    model: &'a Model,
    /// n: the tokens of the longest sequence.
    tokens: usize,
    /// (N22) of all results but those below.
    plain: usize,
    /// Of the gradients of decays, which sum over whole states.
    decay: usize,
    /// Added for results that sum over all tokens, and over all heads.
    over_tokens: usize,
    over_heads: usize,
    /// η of (N24).
    underflow: f64,
    overflows: bool,
}

impl<'a> Chains<'a> {
    fn new(problem: &LinearAttention, inputs: &Inputs<'a>) -> Self {
        let (e, model) = (&problem.extents, inputs.model);
        let longest = problem.list_sequences().iter().map(|s| s.tokens).max().unwrap_or(0);
        let tokens = if inputs.pass == Pass::Step { 1 } else { longest };
        let (group, dim, width) = (problem.group().max(1), e.dim, problem.value_dim);
        let sums = if inputs.pass == Pass::DoubleBackward { 3 } else { 1 };
        let plain = sums * ((group + 1) * tokens + dim + width + 12);
        let decay = plain + sums * (dim * width + tokens);
        let largest = largest(problem, inputs.operands);
        let terms = (plain * dim * width) as f64;
        let kept = model.eta_p.max(model.eta_ds);
        let kept = if model.u_p + model.u_ds > 0.0 { kept } else { 0.0 };
        Chains {
            model,
            tokens,
            plain,
            decay,
            over_tokens: e.batch * e.tokens,
            over_heads: e.batch * e.query_heads * e.tokens,
            underflow: (model.eta * terms * terms + kept * plain as f64) * largest,
            overflows: terms * terms * largest > model.limit,
        }
    }

    /// (N23): the error of a result whose terms have this mass.
    fn error(&self, name: &str, mass: &Dual<f64>) -> f64 {
        let &Dual { value: mass, tangent: weighted } = mass;
        if mass == 0.0 {
            return 0.0;
        }
        if self.overflows {
            return f64::INFINITY;
        }
        let chain = match name {
            "dg" | "gg" => self.decay,
            "dg_gamma" | "gg_gamma" => self.decay + self.over_tokens,
            "dscale" | "gscale" => self.plain + self.over_heads,
            _ => self.plain,
        };
        let Model { u, profile, .. } = *self.model;
        let stored = self.model.u_p + self.model.u_ds;
        let n = self.tokens as f64;
        let roundings = self.model.gamma(chain) + stored + (profile.exp_constant + 1.0) * n * u;
        let exponents = (profile.exp_slope + n) * u;
        roundings * mass + exponents * weighted + floor(mass, self.underflow)
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
