//! Every pass is that of attention whose values have no elements: dP = T = 0, δ = −dlse and
//! z = −cot_lse. Of its formulas remain
//!
//! ```text
//! (L1)  lse_i    = ln(Σ_j e^{S_ij} + e^{sink})           with S of (F1), (F2)
//! (L2)  dS_ij    = dlse_i P_ij                           which is (B3)
//! (B8)  dsink    = Σ_i π_i dlse_i
//! (D8)  X_ij     = Ṗ_ij dlse_i + P_ij cot_lse_i
//! (D14) gsink    = Σ_i π_i [(ddsink − u_i) dlse_i + cot_lse_i]
//! (J2)  tlse_i   = u_i
//! ```
//!
//! and (B4)–(B6), (B9), (D1), (D2), (D4), (D7), (D9)–(D11), (D13) and (D15) as they are.

use super::{
    Cotangents, Gradients, Inputs, Output, OutputTangents, SecondCotangents, SecondGradients,
    Tangents,
};
use crate::attention;
use crate::scalar::Real;
use etalon_problem::{Attention, AttentionLse, Error};
use ndarray::{ArrayView4, Axis};

/// lse.
pub fn forward<T: Real>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
) -> Result<Output<T>, Error> {
    problem.check()?;
    let attention::Output { lse, .. } =
        attention::forward::any_width(&without_values(problem), &valueless(inputs))?;
    Ok(Output { lse, gradient: None })
}

/// The gradients of <dlse, lse> by the inputs.
pub fn backward<T: Real>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
) -> Result<Gradients<T>, Error> {
    problem.check()?;
    let attention::Gradients { dq, dk, dsinks, dbias, .. } = attention::backward::any_width(
        &without_values(problem),
        &valueless(inputs),
        &outputless(inputs, cotangents),
    )?;
    Ok(Gradients { dq, dk, dsinks, dbias })
}

/// The gradients of a loss of the gradients (and of lse) by everything they come from: those of
/// <ddq, dq> + <ddk, dk> + <ddsinks, dsinks> + <ddbias, dbias> + <cot_lse, lse>.
pub fn double_backward<T: Real>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
) -> Result<SecondGradients<T>, Error> {
    problem.check()?;
    let &SecondCotangents { ddq, ddk, ddsinks, ddbias, cot_lse } = second;
    let absent = attention::SecondCotangents::default();
    let attention::SecondGradients { gq, gk, gdlse, gsinks, gbias, .. } =
        attention::double_backward::any_width(
            &without_values(problem),
            &valueless(inputs),
            &outputless(inputs, cotangents),
            &attention::SecondCotangents { ddq, ddk, ddsinks, ddbias, cot_lse, ..absent },
        )?;
    Ok(SecondGradients { gq, gk, gdlse, gsinks, gbias })
}

/// The motion of lse when the inputs move along the tangents.
pub fn jvp<T: Real>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
    tangents: &Tangents<'_, T>,
) -> Result<OutputTangents<T>, Error> {
    problem.check()?;
    let &Tangents { tq, tk, tsinks, tbias } = tangents;
    let attention::OutputTangents { tlse, .. } = attention::jvp::any_width(
        &without_values(problem),
        &valueless(inputs),
        &attention::Tangents { tq, tk, tsinks, tbias, ..Default::default() },
    )?;
    Ok(OutputTangents { tlse })
}

/// The same scores as those of attention whose values have no elements.
fn without_values(problem: &AttentionLse) -> Attention {
    Attention { scores: problem.scores.clone(), value_dim: 0 }
}

fn valueless<'a, T: Real>(inputs: &'a Inputs<'_, T>) -> attention::Inputs<'a, T> {
    let Inputs { q, k, sinks, bias } = inputs;
    attention::Inputs {
        q: q.view(),
        k: k.view(),
        v: no_elements(k.view()),
        sinks: sinks.as_ref().map(|sinks| sinks.view()),
        bias: bias.as_ref().map(|bias| bias.view()),
    }
}

fn outputless<'a, T: Real>(
    inputs: &'a Inputs<'_, T>,
    cotangents: &'a Cotangents<'_, T>,
) -> attention::Cotangents<'a, T> {
    attention::Cotangents { dout: no_elements(inputs.q.view()), dlse: Some(cotangents.dlse.view()) }
}

/// As many rows as an operand has, without elements.
fn no_elements<T>(rows: ArrayView4<'_, T>) -> ArrayView4<'_, T> {
    rows.split_at(Axis(3), 0).0
}
