//! The second order of attention_lse: attention's, without values.

use super::{
    Cotangents, Inputs, Output, OutputTangents, SecondCotangents, SecondGradients,
    SecondGradientsMut, Tangents,
};
use crate::attention;
use crate::attention::forward::zeros;
use crate::attention::second::{Direction, Second, check_shape};
use crate::{Element, Options};
use etalon_problem::{AttentionLse, Error};
use ndarray::ArrayViewMut3;

/// The gradients of ⟨ddq, dq⟩ + … + ⟨cot_lse, lse⟩ by everything that the backward pass reads, from
/// the output of the forward pass. [`crate::Mode`] changes nothing.
pub fn double_backward<T: Element>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
    out: &Output,
    cotangents: &Cotangents<'_>,
    second: &SecondCotangents<'_, T>,
    options: &Options,
) -> Result<SecondGradients<T>, Error> {
    inputs.check(problem)?;
    let scores = &problem.scores;
    let mut gq = zeros(scores.q_shape(), "gq")?;
    let mut gk = zeros(scores.k_shape(), "gk")?;
    let mut gdlse = zeros(scores.row_shape(), "gdlse")?;
    let heads = scores.extents.query_heads;
    let mut gsinks = scores.sinks.then(|| zeros(heads, "gsinks")).transpose()?;
    let mut gbias = scores.bias_shape().map(|shape| zeros(shape, "gbias")).transpose()?;
    let place = SecondGradientsMut {
        gq: Some(gq.view_mut()),
        gk: Some(gk.view_mut()),
        gdlse: Some(gdlse.view_mut()),
        gsinks: gsinks.as_mut().map(|gsinks| gsinks.view_mut()),
        gbias: gbias.as_mut().map(|gbias| gbias.view_mut()),
    };
    double_backward_into(problem, inputs, out, cotangents, second, place, options)?;
    Ok(SecondGradients { gq, gk, gdlse, gsinks, gbias })
}

/// As [`double_backward`], into arrays of the caller, and only what is asked for. On an error
/// nothing has been written.
pub fn double_backward_into<T: Element>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
    out: &Output,
    cotangents: &Cotangents<'_>,
    second: &SecondCotangents<'_, T>,
    gradients: SecondGradientsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    inputs.check(problem)?;
    let rows = problem.scores.row_shape();
    Error::expect_shape("lse", &rows, out.lse.shape())?;
    Error::expect_shape("dlse", &rows, cotangents.dlse.shape())?;
    second.check(problem)?;
    let SecondGradientsMut { gq, gk, gdlse, gsinks, gbias } = gradients;
    let gradients =
        attention::SecondGradientsMut { gq, gk, gv: None, gdout: None, gdlse, gsinks, gbias };
    gradients.check_scores(&problem.scores)?;
    Second {
        scores: &problem.scores,
        q: &inputs.q,
        k: &inputs.k,
        sinks: inputs.sinks.as_ref(),
        bias: inputs.bias.as_ref(),
        lse: out.lse.view(),
        direction: second.direction(),
        values: None,
        dlse: Some(&cotangents.dlse),
        cot_lse: second.cot_lse.as_ref(),
    }
    .run(gradients, options)
}

/// How lse moves when the inputs move along the tangents (J2), from the output of the forward pass.
pub fn jvp<T: Element>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
    out: &Output,
    tangents: &Tangents<'_, T>,
    options: &Options,
) -> Result<OutputTangents, Error> {
    inputs.check(problem)?;
    let mut tlse = zeros(problem.scores.row_shape(), "tlse")?;
    jvp_into(problem, inputs, out, tangents, tlse.view_mut(), options)?;
    Ok(OutputTangents { tlse })
}

/// As [`jvp`], into an array of the caller, `[B, Hq, N]`. On an error nothing has been written.
pub fn jvp_into<T: Element>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
    out: &Output,
    tangents: &Tangents<'_, T>,
    tlse: ArrayViewMut3<'_, f32>,
    options: &Options,
) -> Result<(), Error> {
    inputs.check(problem)?;
    let rows = problem.scores.row_shape();
    Error::expect_shape("lse", &rows, out.lse.shape())?;
    Error::expect_shape("tlse", &rows, tlse.shape())?;
    tangents.direction().check(&problem.scores, ["tq", "tk", "tsinks", "tbias"])?;
    let moved = attention::SecondGradientsMut { gdlse: Some(tlse), ..Default::default() };
    Second {
        scores: &problem.scores,
        q: &inputs.q,
        k: &inputs.k,
        sinks: inputs.sinks.as_ref(),
        bias: inputs.bias.as_ref(),
        lse: out.lse.view(),
        direction: tangents.direction(),
        values: None,
        dlse: None,
        cot_lse: None,
    }
    .run(moved, options)
}

impl<T> SecondCotangents<'_, T> {
    fn direction(&self) -> Direction<'_, T> {
        Direction {
            q: self.ddq.as_ref(),
            k: self.ddk.as_ref(),
            sinks: self.ddsinks.as_ref(),
            bias: self.ddbias.as_ref(),
        }
    }

    fn check(&self, problem: &AttentionLse) -> Result<(), Error> {
        let rows = problem.scores.row_shape();
        self.direction().check(&problem.scores, ["ddq", "ddk", "ddsinks", "ddbias"])?;
        check_shape("cot_lse", &rows, self.cot_lse.as_ref().map(|x| x.shape()))
    }
}

impl<T> Tangents<'_, T> {
    fn direction(&self) -> Direction<'_, T> {
        Direction {
            q: self.tq.as_ref(),
            k: self.tk.as_ref(),
            sinks: self.tsinks.as_ref(),
            bias: self.tbias.as_ref(),
        }
    }
}
