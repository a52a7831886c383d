//! The second order of attention_lse: attention's, without values.

use super::{
    Cotangents, Inputs, Output, OutputTangents, SecondCotangents, SecondGradients,
    SecondGradientsMut, Tangents,
};
use crate::attention::forward::filled;
use crate::attention::second::{Direction, Second, SecondMut, check_moving, check_shape};
use crate::{Element, Options};
use etalon_problem::{AttentionLse, Error};

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
    let mut gq = filled(scores.q_shape(), T::ZERO, "gq")?;
    let mut gk = filled(scores.k_shape(), T::ZERO, "gk")?;
    let mut gdlse = filled(scores.row_shape(), 0.0f32, "gdlse")?;
    let heads = scores.extents.query_heads;
    let mut gsinks = scores.sinks.then(|| filled(heads, 0.0f32, "gsinks")).transpose()?;
    let mut gbias = scores.bias_shape().map(|shape| filled(shape, T::ZERO, "gbias")).transpose()?;
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
    gradients.check(problem)?;
    let SecondGradientsMut { gq, gk, gdlse, gsinks, gbias } = gradients;
    Second {
        scores: &problem.scores,
        q: &inputs.q,
        k: &inputs.k,
        sinks: inputs.sinks.as_ref(),
        bias: inputs.bias.as_ref(),
        lse: out.lse.view(),
        direction: Direction {
            q: second.ddq.as_ref(),
            k: second.ddk.as_ref(),
            sinks: second.ddsinks.as_ref(),
            bias: second.ddbias.as_ref(),
        },
        values: None,
        dlse: Some(&cotangents.dlse),
        cot_lse: second.cot_lse.as_ref(),
    }
    .run(SecondMut { gq, gk, gdlse, gsinks, gbias, ..SecondMut::default() }, options)
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
    let rows = problem.scores.row_shape();
    Error::expect_shape("lse", &rows, out.lse.shape())?;
    tangents.check(problem)?;
    let mut tlse = filled(rows, 0.0f32, "tlse")?;
    Second {
        scores: &problem.scores,
        q: &inputs.q,
        k: &inputs.k,
        sinks: inputs.sinks.as_ref(),
        bias: inputs.bias.as_ref(),
        lse: out.lse.view(),
        direction: Direction {
            q: tangents.tq.as_ref(),
            k: tangents.tk.as_ref(),
            sinks: tangents.tsinks.as_ref(),
            bias: tangents.tbias.as_ref(),
        },
        values: None,
        dlse: None,
        cot_lse: None,
    }
    .run(SecondMut { gdlse: Some(tlse.view_mut()), ..SecondMut::default() }, options)?;
    Ok(OutputTangents { tlse })
}

impl<T> SecondCotangents<'_, T> {
    fn check(&self, problem: &AttentionLse) -> Result<(), Error> {
        let SecondCotangents { ddq, ddk, ddsinks, ddbias, cot_lse } = self;
        let moving = [
            ddq.as_ref().map(|x| x.shape()),
            ddk.as_ref().map(|x| x.shape()),
            ddsinks.as_ref().map(|x| x.shape()),
            ddbias.as_ref().map(|x| x.shape()),
        ];
        check_moving(&problem.scores, ["ddq", "ddk", "ddsinks", "ddbias"], moving)?;
        let rows = problem.scores.row_shape();
        check_shape("cot_lse", &rows, cot_lse.as_ref().map(|x| x.shape()))
    }
}

impl<T> SecondGradientsMut<'_, T> {
    fn check(&self, problem: &AttentionLse) -> Result<(), Error> {
        let SecondGradientsMut { gq, gk, gdlse, gsinks, gbias } = self;
        let moving = [
            gq.as_ref().map(|x| x.shape()),
            gk.as_ref().map(|x| x.shape()),
            gsinks.as_ref().map(|x| x.shape()),
            gbias.as_ref().map(|x| x.shape()),
        ];
        check_moving(&problem.scores, ["gq", "gk", "gsinks", "gbias"], moving)?;
        let rows = problem.scores.row_shape();
        check_shape("gdlse", &rows, gdlse.as_ref().map(|x| x.shape()))
    }
}

impl<T> Tangents<'_, T> {
    fn check(&self, problem: &AttentionLse) -> Result<(), Error> {
        let Tangents { tq, tk, tsinks, tbias } = self;
        let moving = [
            tq.as_ref().map(|x| x.shape()),
            tk.as_ref().map(|x| x.shape()),
            tsinks.as_ref().map(|x| x.shape()),
            tbias.as_ref().map(|x| x.shape()),
        ];
        check_moving(&problem.scores, ["tq", "tk", "tsinks", "tbias"], moving)
    }
}
