//! The forward pass: attention's, without values; or with k in their place, which gives ∂lse/∂q.

use super::{Inputs, Output, OutputMut};
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
    let place = OutputMut {
        lse: lse.view_mut(),
        gradient: gradient.as_mut().map(|gradient| gradient.view_mut()),
    };
    forward_into(problem, inputs, place, options)?;
    Ok(Output { lse, gradient })
}

/// As [`forward`], into arrays of the caller, and ∂lse/∂q if there is a place for it, whatever the
/// mode. On an error nothing has been written.
pub fn forward_into<T: Element>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
    out: OutputMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    inputs.check(problem)?;
    let scores = &problem.scores;
    Error::expect_shape("lse", &scores.row_shape(), out.lse.shape())?;
    if let Some(gradient) = &out.gradient {
        Error::expect_shape("gradient", &scores.q_shape(), gradient.shape())?;
    }
    Forward {
        scores,
        q: &inputs.q,
        k: &inputs.k,
        sinks: inputs.sinks.as_ref(),
        bias: inputs.bias.as_ref(),
        values: if out.gradient.is_some() { Values::K } else { Values::None },
    }
    .run(out.gradient, out.lse, options)
}
