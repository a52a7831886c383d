//! Decays of linear attention: a state of 1 over one token without a key, and a key of 1 over one token.

use super::super::inputs::fill;
use super::{Errors, narrowed, rounded_exp, walk};
use crate::laws::flaw::{Flaw, Judgement};
use crate::laws::trial::Trial;
use crate::tensor::Tensors;
use etalon_problem::{Decay, LinearAttention, LinearExtents, Pass, Problem};

/// Roundings behind a decay: the products with the state, with σ and with the query, a sum with k v = 0,
/// and the result.
const BEHIND_DECAY: f64 = 5.0;

/// The largest x of a decay e^−x.
const LARGEST: f64 = 80.0;

/// Of the walk every second point: each head and each batch element has a task of its own.
const EVERY: usize = 2;

/// Batch elements of one token whose decays are per token, and key heads with one each.
pub(crate) fn decay_probe(trial: &Trial<'_>) -> Judgement {
    let points: Vec<f64> = walk(trial, LARGEST).into_iter().step_by(EVERY).collect();
    let mut errors = Errors::of(trial.case.dtype);
    let behind = BEHIND_DECAY + narrowed(trial.profile(), trial.case.dtype);
    for (decay, batch, heads) in
        [(Decay::PerToken, points.len(), 1), (Decay::PerHead, 1, points.len())]
    {
        // The second token of two has the key of the first.
        for (pass, tokens) in [(Pass::Forward, 1), (Pass::Step, 1), (Pass::Forward, 2)] {
            let extents =
                LinearExtents { batch, query_heads: heads, key_heads: heads, tokens, dim: 1 };
            let problem = LinearAttention::new(extents).decay(decay).initial_state().final_state();
            let outputs = decays(trial, &problem.into(), pass, &points)?;
            for name in ["o", "final_state"] {
                let Some(got) = outputs.get(name) else { continue };
                let got = got.to_f64(name)?;
                let each = if name == "o" { tokens } else { 1 };
                for (&x, &got) in points.iter().zip(got.iter().skip(each - 1).step_by(each)) {
                    let limit = rounded_exp(trial.profile(), x) + x + behind;
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
    let two = matches!(problem, Problem::LinearAttention(x) if x.extents.tokens == 2);
    let inputs = fill(trial.case, problem, pass, |x, at| match x.name {
        "q" => 1.0,
        "initial_state" => f64::from(u8::from(!two)),
        "k" | "v" if two => f64::from(u8::from(at[2] == 0)),
        // Of batch elements or of heads there are as many as points.
        "g" => -points[at[0].max(at[1])],
        "g_gamma" => -points[at[0]],
        _ => 0.0,
    });
    trial.ask_pass(problem, pass, &inputs)
}
