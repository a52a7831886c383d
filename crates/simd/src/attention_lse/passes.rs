//! The passes of attention_lse: attention's without values, its tensors checked, its results
//! allocated.

use super::tensors::{
    Cotangents, Gradients, GradientsMut, Inputs, Output, OutputMut, OutputRef, OutputTangents,
    SecondCotangents, SecondGradients, SecondGradientsMut, Tangents,
};
use crate::element::Tensor;
use crate::memory::zeros;
use crate::plan::Plan;
use crate::{Element, Mode, Options, Workspace, softmax};
use etalon_problem::{Algorithm, AttentionLse, Error, Pass};
use ndarray::{ArrayViewMut3, arr0};

/// lse of a problem (L1), and under [`Mode::ForwardGradient`] also ∂lse/∂q = σ Σ_j P S′ k.
pub fn forward<T: Element>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
    options: &Options,
) -> Result<Output, Error> {
    let inputs = inputs.erased(problem)?;
    let mut lse = zeros(problem.scores.row_shape(), "lse")?;
    let mut gradient = match options.mode {
        Mode::ForwardGradient => Some(zeros(problem.scores.q_shape(), "gradient")?),
        _ => None,
    };
    let out = OutputMut {
        lse: lse.view_mut(),
        gradient: gradient.as_mut().map(|gradient| gradient.view_mut()),
    };
    write_output(inputs, out, options)?;
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
    write_output(inputs.erased(problem)?, out, options)
}

fn write_output(
    inputs: softmax::Inputs<'_>,
    OutputMut { lse, gradient }: OutputMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    inputs.check_like_outputs(["o", "lse"], [None, Some(lse.shape())])?;
    if let Some(gradient) = &gradient {
        Error::expect_shape("gradient", &inputs.scores.q_shape(), gradient.shape())?;
    }
    let pass = softmax::Forward { inputs, gradient: gradient.is_some() };
    pass.run(&Workspace::new(), gradient.map(Into::into), lse, options)
}

/// dq, dk and, where the problem has them, dsinks and dbias (L2), from the output of the forward
/// pass: attention's with dP = 0 and δ = −dlse; if ∂lse/∂q was written, dq is dlse times it.
pub fn backward<'a, T: Element>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
    out: impl Into<OutputRef<'a>>,
    cotangents: &Cotangents<'_>,
    options: &Options,
) -> Result<Gradients<T>, Error> {
    let inputs = inputs.erased(problem)?;
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
    write_gradients(inputs, out.into(), cotangents, gradients, options)?;
    Ok(Gradients { dq, dk, dsinks, dbias })
}

/// As [`backward`], into arrays of the caller, and only the gradients that are asked for. On an
/// error nothing has been written.
pub fn backward_into<'a, T: Element>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
    out: impl Into<OutputRef<'a>>,
    cotangents: &Cotangents<'_>,
    gradients: GradientsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    write_gradients(inputs.erased(problem)?, out.into(), cotangents, gradients, options)
}

fn write_gradients<T: Element>(
    inputs: softmax::Inputs<'_>,
    out: OutputRef<'_>,
    cotangents: &Cotangents<'_>,
    gradients: GradientsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    let pass = softmax::Backward {
        inputs,
        o: None,
        gradient: out.gradient,
        lse: out.lse,
        dout: None,
        dlse: Some(cotangents.dlse),
    };
    let gradients = gradients.erased();
    pass.check(&gradients)?;
    pass.run(&Workspace::new(), gradients, options)
}

/// The gradients of ⟨ddq, dq⟩ + … + ⟨cot_lse, lse⟩ by everything that the backward pass reads, from
/// the output of the forward pass. [`Mode`] changes nothing.
pub fn double_backward<'a, T: Element>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
    out: impl Into<OutputRef<'a>>,
    cotangents: &Cotangents<'_>,
    second: &SecondCotangents<'_, T>,
    options: &Options,
) -> Result<SecondGradients<T>, Error> {
    let inputs = inputs.erased(problem)?;
    let scores = &problem.scores;
    let mut gq = zeros(scores.q_shape(), "gq")?;
    let mut gk = zeros(scores.k_shape(), "gk")?;
    let mut gdlse = zeros(scores.row_shape(), "gdlse")?;
    let heads = scores.extents.query_heads;
    let mut gsinks = scores.sinks.then(|| zeros(heads, "gsinks")).transpose()?;
    let mut gbias = scores.bias_shape().map(|shape| zeros(shape, "gbias")).transpose()?;
    let gradients = SecondGradientsMut {
        gq: Some(gq.view_mut()),
        gk: Some(gk.view_mut()),
        gdlse: Some(gdlse.view_mut()),
        gsinks: gsinks.as_mut().map(|gsinks| gsinks.view_mut()),
        gbias: gbias.as_mut().map(|gbias| gbias.view_mut()),
    };
    write_second(inputs, out.into(), (cotangents, second), gradients, options)?;
    Ok(SecondGradients { gq, gk, gdlse, gsinks, gbias })
}

/// As [`double_backward`], into arrays of the caller, and only what is asked for. On an error
/// nothing has been written.
pub fn double_backward_into<'a, T: Element>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
    out: impl Into<OutputRef<'a>>,
    cotangents: &Cotangents<'_>,
    second: &SecondCotangents<'_, T>,
    gradients: SecondGradientsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    let inputs = inputs.erased(problem)?;
    write_second(inputs, out.into(), (cotangents, second), gradients, options)
}

fn write_second<T: Element>(
    inputs: softmax::Inputs<'_>,
    out: OutputRef<'_>,
    (cotangents, second): (&Cotangents<'_>, &SecondCotangents<'_, T>),
    gradients: SecondGradientsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    let pass = softmax::DoubleBackward {
        dlse: Some(cotangents.dlse),
        cot_lse: second.cot_lse,
        ..softmax::DoubleBackward::tangents(inputs, second.direction(), None, out.lse)
    };
    let gradients = gradients.erased();
    pass.check(&gradients)?;
    pass.run(&Workspace::new(), gradients, options)
}

/// The tangent of lse along tangents of the inputs (J2), from the output of the forward pass.
pub fn jvp<'a, T: Element>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
    out: impl Into<OutputRef<'a>>,
    tangents: &Tangents<'_, T>,
    options: &Options,
) -> Result<OutputTangents, Error> {
    let inputs = inputs.erased(problem)?;
    let mut tlse = zeros(problem.scores.row_shape(), "tlse")?;
    write_tangents(inputs, out.into(), tangents.direction(), tlse.view_mut(), options)?;
    Ok(OutputTangents { tlse })
}

/// As [`jvp`], into an array of the caller, `[B, Hq, N]`. On an error nothing has been written.
pub fn jvp_into<'a, T: Element>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
    out: impl Into<OutputRef<'a>>,
    tangents: &Tangents<'_, T>,
    tlse: ArrayViewMut3<'_, f32>,
    options: &Options,
) -> Result<(), Error> {
    write_tangents(inputs.erased(problem)?, out.into(), tangents.direction(), tlse, options)
}

fn write_tangents(
    inputs: softmax::Inputs<'_>,
    out: OutputRef<'_>,
    direction: softmax::Direction<'_>,
    tlse: ArrayViewMut3<'_, f32>,
    options: &Options,
) -> Result<(), Error> {
    let pass = softmax::DoubleBackward::tangents(inputs, direction, None, out.lse);
    let moved =
        softmax::SecondGradients { gdlse: Some(tlse), ..softmax::SecondGradients::default() };
    pass.check_tangents(&moved)?;
    pass.run(&Workspace::new(), moved, options)
}

/// How a pass will work in rayon's current pool, every gradient being asked for and every cotangent
/// given; and what it allocates for it, [`Plan::workspace_bytes`].
pub fn plan<T: Element>(
    problem: &AttentionLse,
    pass: Pass,
    options: &Options,
) -> Result<Plan, Error> {
    problem.check()?;
    let zero = arr0(T::ZERO);
    let zero = Tensor::from(zero.view());
    softmax::plan(Algorithm::AttentionLse, &problem.scores, None, &zero, pass, options)
}
