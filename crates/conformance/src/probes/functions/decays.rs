//! Decays of linear attention: a state of 1 over one token without a key.

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
        let extents =
            LinearExtents { batch, query_heads: heads, key_heads: heads, tokens: 1, dim: 1 };
        let problem = LinearAttention::new(extents).decay(decay).initial_state().final_state();
        let problem: Problem = problem.into();
        for pass in [Pass::Forward, Pass::Step] {
            let outputs = decays(trial, &problem, pass, &points)?;
            for name in ["o", "final_state"] {
                let Some(got) = outputs.get(name) else { continue };
                let got = got.to_f64(name)?;
                for (&x, &got) in points.iter().zip(&got) {
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
    let inputs = fill(trial.case, problem, pass, |x, at| match x.name {
        "q" | "initial_state" => 1.0,
        // One of the two axes has as many entries as there are points.
        "g" | "g_gamma" => -points[at.iter().sum::<usize>()],
        _ => 0.0,
    });
    trial.ask_pass(problem, pass, &inputs)
}
