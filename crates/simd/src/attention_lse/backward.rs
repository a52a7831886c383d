//! The backward pass: attention's, with dP = 0 and δ = −dlse; under
//! [`crate::Mode::ForwardGradient`] dq is the forward pass' ∂lse/∂q times dlse.

use super::{Cotangents, Gradients, GradientsMut, Inputs, Output};
use crate::attention;
use crate::attention::forward::zeros;
use crate::{Element, Options};
use etalon_problem::{AttentionLse, Error};
use ndarray::{Zip, s};

/// dq, dk and, where the problem has them, dsinks and dbias (L2), from the output of the forward
/// pass.
pub fn backward<T: Element>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
    out: &Output,
    cotangents: &Cotangents<'_>,
    options: &Options,
) -> Result<Gradients<T>, Error> {
    inputs.check(problem)?;
    let scores = &problem.scores;
    let mut dq = zeros(scores.q_shape(), "dq")?;
    let mut dk = zeros(scores.k_shape(), "dk")?;
    let heads = scores.extents.query_heads;
    let mut dsinks = scores.sinks.then(|| zeros(heads, "dsinks")).transpose()?;
    let mut dbias = scores.bias_shape().map(|shape| zeros(shape, "dbias")).transpose()?;
    let gradients = GradientsMut {
        dq: Some(dq.view_mut()),
        dk: Some(dk.view_mut()),
        dsinks: dsinks.as_mut().map(|dsinks| dsinks.view_mut()),
        dbias: dbias.as_mut().map(|dbias| dbias.view_mut()),
    };
    backward_into(problem, inputs, out, cotangents, gradients, options)?;
    Ok(Gradients { dq, dk, dsinks, dbias })
}

/// As [`backward`], into arrays of the caller, and only the gradients that are asked for. On an
/// error nothing has been written.
pub fn backward_into<T: Element>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
    out: &Output,
    cotangents: &Cotangents<'_>,
    gradients: GradientsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    inputs.check(problem)?;
    let scores = &problem.scores;
    Error::expect_shape("lse", &scores.row_shape(), out.lse.shape())?;
    Error::expect_shape("dlse", &scores.row_shape(), cotangents.dlse.shape())?;
    if let Some(gradient) = &out.gradient {
        Error::expect_shape("gradient", &scores.q_shape(), gradient.shape())?;
    }
    let GradientsMut { dq, dk, dsinks, dbias } = gradients;
    let mut gradients = attention::GradientsMut { dq, dk, dv: None, dsinks, dbias };
    attention::check_gradients(scores, &gradients)?;
    let ready = out.gradient.as_ref().and_then(|gradient| Some((gradient, gradients.dq.take()?)));
    attention::Backward {
        scores,
        q: &inputs.q,
        k: &inputs.k,
        values: None,
        lse: out.lse.view(),
        dlse: Some(&cotangents.dlse),
        sinks: inputs.sinks.as_ref(),
        bias: inputs.bias.as_ref(),
    }
    .run(gradients, options)?;
    let Some((gradient, mut dq)) = ready else { return Ok(()) };
    dq.fill(T::ZERO);
    for sequence in scores.sequences() {
        let rows = sequence.query_start..sequence.query_start + sequence.queries;
        let lse = out.lse.slice(s![sequence.batch, .., rows.clone()]);
        let dlse = cotangents.dlse.slice(s![sequence.batch, .., rows.clone()]);
        let gradient = gradient.slice(s![sequence.batch, .., rows.clone(), ..]);
        let mut dq = dq.slice_mut(s![sequence.batch, .., rows, ..]);
        Zip::from(dq.lanes_mut(ndarray::Axis(2)))
            .and(gradient.lanes(ndarray::Axis(2)))
            .and(&lse)
            .and(&dlse)
            .for_each(|dq, gradient, &lse, &dlse| {
                if lse == f32::NEG_INFINITY {
                    return; // the row saw nothing, whatever its dlse
                }
                for (dq, g) in dq.into_iter().zip(gradient) {
                    *dq = T::from_f32(dlse * g);
                }
            });
    }
    Ok(())
}
