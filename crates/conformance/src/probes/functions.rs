//! Probes of exp, ln and tanh through a kernel's own interface, at many points. The scores are exact, so
//! that next to the error of the function there is only what a kernel rounds behind it.
//!
//! Two keys with scores 0 and −x, or x and 0, and one-hot values: o is 1/(1 + e^−x) and e^−x/(1 + e^−x),
//! whose quotient is the weight of the second key. n equal keys: lse is ln n. One key with a softcap of
//! 1: lse is tanh s. A state of 1 over one token without a key: o is e^g.

use super::inputs::fill;
use crate::laws::flaw::{Flaw, Judgement};
use crate::laws::trial::Trial;
use crate::profile::Profile;
use crate::tensor::Tensors;
use etalon_problem::{
    Attention, AttentionLse, Decay, Dtype, Extents, LinearAttention, LinearExtents, Mask, Pass,
    Problem, Scores,
};

/// Roundings behind a weight that do not cancel in the quotient of two elements of o: of each, a product
/// with a rounded reciprocal and the rounding of the result, and of one a rescale.
pub(super) const BEHIND: f64 = 6.0;

/// From 0 to 2 in steps of 1/256; then, as far as e^−x is a normal number of f32, in steps of 1/16.
pub(super) fn points() -> Vec<f64> {
    let near = (1..=512).map(|i| f64::from(i) / 256.0);
    near.chain((1..=1248).map(|i| 2.0 + f64::from(i) / 16.0)).collect()
}

/// Errors at many points: the worst share of the limit, as a judgement.
pub(super) struct Errors {
    roundoff: f64,
    margin: f64,
    worst: Option<String>,
}

impl Errors {
    /// Of results that are computed and stored in a type.
    pub(super) fn of(dtype: Dtype) -> Self {
        Errors { roundoff: dtype.unit_roundoff(), margin: 0.0, worst: None }
    }

    /// `got` may be off by `limit` roundoffs.
    pub(super) fn add(&mut self, what: &str, x: f64, got: f64, exact: f64, limit: f64) {
        let limit = limit * self.roundoff;
        let share = (got - exact).abs() / limit;
        // NaN is more than anything.
        if share.is_nan() || share > self.margin {
            self.margin = if share.is_nan() { f64::INFINITY } else { share };
            if self.margin > 1.0 {
                let text = format!("{what}({x}) = {got:e}, exact is {exact:e} ± {limit:e}");
                self.worst = Some(text);
            }
        }
    }

    pub(super) fn judgement(self) -> Judgement {
        self.worst.map_or(Ok(Some(self.margin)), |text| Err(Flaw::Fail(text)))
    }
}

/// A problem of one head of one batch element, each row a point.
fn extents(queries: usize, keys: usize) -> Extents {
    Extents { batch: 1, query_heads: 1, key_heads: 1, queries, keys, dim: 1 }
}

pub(super) fn declared(profile: &Profile, x: f64) -> f64 {
    profile.exp_constant + profile.exp_slope * x.abs()
}

/// What a product loses of its factors, in roundoffs of a type.
pub(super) fn narrowed(profile: &Profile, dtype: Dtype) -> f64 {
    2.0 * profile.factor / dtype.unit_roundoff()
}

/// Whether weights are kept as exactly as they are computed.
pub(super) fn keeps_weights(profile: &Profile) -> bool {
    profile.accumulator == Dtype::F32 && profile.p_store == Dtype::F32
}

pub(super) fn exp_probe(trial: &Trial<'_>) -> Judgement {
    if !keeps_weights(trial.profile()) {
        return Ok(None);
    }
    let (points, mut errors) = (points(), Errors::of(Dtype::F32));
    let behind = BEHIND + narrowed(trial.profile(), Dtype::F32);
    // The first key has the larger score, so that no maximum grows.
    for [sign, first, second] in [[-1.0, 0.0, 1.0], [1.0, 1.0, 0.0]] {
        let mut scores = Scores::new(extents(points.len(), 2));
        scores.softmax_scale = Some(1.0);
        let problem: Problem = Attention { scores, value_dim: 2 }.into();
        let inputs = fill(trial.case, &problem, Pass::Forward, |x, at| match x.name {
            "q" => sign * points[at[2]],
            "k" => [first, second][at[2]],
            _ => f64::from(u8::from(at[2] == at[3])),
        });
        let o = trial.ask(&problem, &inputs)?["o"].to_f64("o")?;
        for (i, &x) in points.iter().enumerate() {
            let got = o[[0, 0, i, 1]] / o[[0, 0, i, 0]] * x.exp();
            errors.add("e^−x · exp", -x, got, 1.0, declared(trial.profile(), x) + behind);
        }
    }
    errors.judgement()
}

/// Equal keys of [`log_probe`].
const KEYS: usize = 300;

pub(super) fn log_probe(trial: &Trial<'_>) -> Judgement {
    let mut scores = Scores::new(extents(KEYS, KEYS));
    scores.mask = Mask::causal();
    let lse = lse(trial, scores, |name, at| if name == "q" { 0.0 } else { (at[2] % 7) as f64 })?;
    let mut errors = Errors::of(Dtype::F32);
    for i in 0..KEYS {
        let n = (i + 1) as f64;
        // To base 2 a product with ln 2, which is rounded; and the result is.
        let limit = trial.profile().log * n.ln().max(1.0) + 3.0 * n.ln();
        errors.add("ln", n, lse[i], n.ln(), limit.max(1.0));
    }
    errors.judgement()
}

pub(super) fn tanh_probe(trial: &Trial<'_>) -> Judgement {
    let points: Vec<f64> = (-512..=512).map(|i| f64::from(i) / 128.0).collect();
    let mut scores = Scores::new(extents(points.len(), 1));
    (scores.softmax_scale, scores.softcap) = (Some(1.0), Some(1.0));
    let lse = lse(trial, scores, |name, at| if name == "q" { points[at[2]] } else { 1.0 })?;
    let mut errors = Errors::of(Dtype::F32);
    for (&x, &got) in points.iter().zip(&lse) {
        let tau = x.tanh();
        // (N6), of a score that is exact: a reciprocal of the cap, the product with the cap; to base 2
        // three more roundings, and that of the result.
        let of_score = 3.0 * x.abs() * (1.0 - tau * tau);
        errors.add("tanh", x, got, tau, of_score + trial.profile().tanh + 6.0 * tau.abs());
    }
    errors.judgement()
}

/// lse of every row, of attention or attention_lse as the case has it; every value is 1.
fn lse(
    trial: &Trial<'_>,
    scores: Scores,
    element: impl Fn(&str, &[usize]) -> f64,
) -> Result<Vec<f64>, Flaw> {
    let problem: Problem = match trial.case.problem {
        Problem::AttentionLse(_) => AttentionLse { scores }.into(),
        _ => Attention { scores, value_dim: 1 }.into(),
    };
    let inputs = fill(trial.case, &problem, Pass::Forward, |x, at| match x.name {
        "v" => 1.0,
        name => element(name, at),
    });
    Ok(trial.ask(&problem, &inputs)?["lse"].to_f64("lse")?.into_iter().collect())
}

/// Roundings behind a decay: the products with the state, with σ and with the query, a sum with k v = 0,
/// and the result.
const BEHIND_DECAY: f64 = 5.0;

/// Batch elements of one token whose decays are per token, and key heads with one each.
pub(crate) fn decay_probe(trial: &Trial<'_>) -> Judgement {
    let points: Vec<f64> = points().into_iter().filter(|x| *x < 80.0).step_by(2).collect();
    let mut errors = Errors::of(trial.case.dtype);
    let behind = BEHIND_DECAY + narrowed(trial.profile(), trial.case.dtype);
    for (decay, batch, heads) in
        [(Decay::PerToken, points.len(), 1), (Decay::PerHead, 1, points.len())]
    {
        let extents =
            LinearExtents { batch, query_heads: heads, key_heads: heads, tokens: 1, dim: 1 };
        let problem = LinearAttention::new(extents).decay(decay).initial_state().final_state();
        let problem: Problem = problem.into();
        for pass in [Pass::Forward, Pass::Step] {
            let outputs = decays(trial, &problem, pass, &points)?;
            for name in ["o", "final_state"] {
                let got = outputs[name].to_f64(name)?;
                for (&x, &got) in points.iter().zip(&got) {
                    let limit = declared(trial.profile(), x) + x + behind;
                    errors.add("e^−x · exp", -x, got * x.exp(), 1.0, limit);
                }
            }
        }
    }
    errors.judgement()
}

fn decays(
    trial: &Trial<'_>,
    problem: &Problem,
    pass: Pass,
    points: &[f64],
) -> Result<Tensors, Flaw> {
    let inputs = fill(trial.case, problem, pass, |x, at| match x.name {
        "q" | "initial_state" => 1.0,
        // One of the two axes has as many entries as there are points.
        "g" | "g_gamma" => -points[at.iter().sum::<usize>()],
        _ => 0.0,
    });
    trial.ask_pass(problem, pass, &inputs)
}
