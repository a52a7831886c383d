//! The forward pass: attention's, without values; or with k in their place, which gives ∂lse/∂q.

use super::{Inputs, Output};
use crate::attention::forward::{Forward, Values, zeros};
use crate::{Element, Mode, Options};
use etalon_problem::{AttentionLse, Error};

/// lse of a problem (L1), and under [`Mode::ForwardGradient`] also ∂lse/∂q = σ Σ_j P S′ k.
pub fn forward<T: Element>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
    options: &Options,
) -> Result<Output, Error> {
    inputs.check(problem)?;
    let mut lse = zeros(problem.scores.row_shape(), "lse")?;
    let mut gradient = match options.mode {
        Mode::ForwardGradient => Some(zeros(problem.scores.q_shape(), "gradient")?),
        _ => None,
    };
    Forward {
        scores: &problem.scores,
        q: &inputs.q,
        k: &inputs.k,
        sinks: inputs.sinks.as_ref(),
        bias: inputs.bias.as_ref(),
        values: if gradient.is_some() { Values::K } else { Values::None },
    }
    .run(gradient.as_mut().map(|gradient| gradient.view_mut()), lse.view_mut(), options)?;
    Ok(Output { lse, gradient })
}
