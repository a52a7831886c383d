//! The passes of attention: tensors checked, results allocated.

use super::tensors::{
    Cotangents, Gradients, GradientsMut, Inputs, Output, OutputMut, OutputRef, OutputTangents,
    OutputTangentsMut, SecondCotangents, SecondGradients, SecondGradientsMut, Tangents,
};
use crate::element::Tensor;
use crate::memory::zeros;
use crate::plan::Plan;
use crate::{Element, Options, Workspace, softmax};
use etalon_problem::{Algorithm, Attention, Error, Pass};
use ndarray::arr0;

/// o and lse of a problem (F1)–(F5).
pub fn forward<T: Element>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    options: &Options,
) -> Result<Output<T>, Error> {
    let inputs = inputs.erased(problem)?;
    let mut o = zeros(problem.o_shape(), "o")?;
    let mut lse = zeros(problem.scores.row_shape(), "lse")?;
    write_output(inputs, OutputMut::<T> { o: o.view_mut(), lse: lse.view_mut() }, options)?;
    Ok(Output { o, lse })
}

/// As [`forward`], into arrays of the caller. On an error nothing has been written.
pub fn forward_into<T: Element>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    out: OutputMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    write_output(inputs.erased(problem)?, out, options)
}

fn write_output<T: Element>(
    inputs: softmax::Inputs<'_>,
    out: OutputMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    inputs.check_like_outputs(["o", "lse"], [Some(out.o.shape()), Some(out.lse.shape())])?;
    softmax::Forward { inputs, gradient: false }.run(
        &Workspace::new(),
        Some(out.o.into()),
        out.lse,
        options,
    )
}

/// dq, dk, dv and, where the problem has them, dsinks and dbias (B1)–(B9), from the outputs of the
/// forward pass.
pub fn backward<'a, T: Element>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    out: impl Into<OutputRef<'a, T>>,
    cotangents: &Cotangents<'_, T>,
    options: &Options,
) -> Result<Gradients<T>, Error> {
    let inputs = inputs.erased(problem)?;
    let scores = &problem.scores;
    let mut dq = zeros(scores.q_shape(), "dq")?;
    let mut dk = zeros(scores.k_shape(), "dk")?;
    let mut dv = zeros(problem.v_shape(), "dv")?;
    let heads = scores.extents.query_heads;
    let mut dsinks = scores.sinks.then(|| zeros(heads, "dsinks")).transpose()?;
    let mut dbias = scores.bias_shape().map(|shape| zeros(shape, "dbias")).transpose()?;
    let gradients = GradientsMut {
        dq: Some(dq.view_mut()),
        dk: Some(dk.view_mut()),
        dv: Some(dv.view_mut()),
        dsinks: dsinks.as_mut().map(|dsinks| dsinks.view_mut()),
        dbias: dbias.as_mut().map(|dbias| dbias.view_mut()),
    };
    write_gradients(inputs, out.into(), cotangents, gradients, options)?;
    Ok(Gradients { dq, dk, dv, dsinks, dbias })
}

/// As [`backward`], into arrays of the caller, and only the gradients that are asked for: dv alone
/// needs no dP. On an error nothing has been written.
pub fn backward_into<'a, T: Element>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    out: impl Into<OutputRef<'a, T>>,
    cotangents: &Cotangents<'_, T>,
    gradients: GradientsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    write_gradients(inputs.erased(problem)?, out.into(), cotangents, gradients, options)
}

fn write_gradients<T: Element>(
    inputs: softmax::Inputs<'_>,
    out: OutputRef<'_, T>,
    cotangents: &Cotangents<'_, T>,
    gradients: GradientsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    let pass = softmax::Backward {
        inputs,
        o: Some(out.o.into()),
        gradient: None,
        lse: out.lse,
        dout: Some(cotangents.dout.into()),
        dlse: cotangents.dlse,
    };
    let gradients = gradients.erased();
    pass.check(&gradients)?;
    pass.run(&Workspace::new(), gradients, options)
}

/// The gradients of ⟨ddq, dq⟩ + … + ⟨cot_o, o⟩ + ⟨cot_lse, lse⟩ by everything that the backward
/// pass reads (D1)–(D15), from the outputs of the forward pass. [`crate::Mode`] changes nothing.
pub fn double_backward<'a, T: Element>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    out: impl Into<OutputRef<'a, T>>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
    options: &Options,
) -> Result<SecondGradients<T>, Error> {
    let inputs = inputs.erased(problem)?;
    let scores = &problem.scores;
    let mut gq = zeros(scores.q_shape(), "gq")?;
    let mut gk = zeros(scores.k_shape(), "gk")?;
    let mut gv = zeros(problem.v_shape(), "gv")?;
    let mut gdout = zeros(problem.o_shape(), "gdout")?;
    let mut gdlse = zeros(scores.row_shape(), "gdlse")?;
    let heads = scores.extents.query_heads;
    let mut gsinks = scores.sinks.then(|| zeros(heads, "gsinks")).transpose()?;
    let mut gbias = scores.bias_shape().map(|shape| zeros(shape, "gbias")).transpose()?;
    let gradients = SecondGradientsMut {
        gq: Some(gq.view_mut()),
        gk: Some(gk.view_mut()),
        gv: Some(gv.view_mut()),
        gdout: Some(gdout.view_mut()),
        gdlse: Some(gdlse.view_mut()),
        gsinks: gsinks.as_mut().map(|gsinks| gsinks.view_mut()),
        gbias: gbias.as_mut().map(|gbias| gbias.view_mut()),
    };
    write_second(inputs, out.into(), (cotangents, second), gradients, options)?;
    Ok(SecondGradients { gq, gk, gv, gdout, gdlse, gsinks, gbias })
}

/// As [`double_backward`], into arrays of the caller, and only what is asked for. On an error
/// nothing has been written.
pub fn double_backward_into<'a, T: Element>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    out: impl Into<OutputRef<'a, T>>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
    gradients: SecondGradientsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    let inputs = inputs.erased(problem)?;
    write_second(inputs, out.into(), (cotangents, second), gradients, options)
}

fn write_second<T: Element>(
    inputs: softmax::Inputs<'_>,
    out: OutputRef<'_, T>,
    (cotangents, second): (&Cotangents<'_, T>, &SecondCotangents<'_, T>),
    gradients: SecondGradientsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    let pass = softmax::DoubleBackward {
        inputs,
        direction: second.direction(),
        o: Some(out.o.into()),
        lse: out.lse,
        dout: Some(cotangents.dout.into()),
        dlse: cotangents.dlse,
        cot_o: second.cot_o.map(Into::into),
        cot_lse: second.cot_lse,
    };
    let gradients = gradients.erased();
    pass.check(&gradients)?;
    pass.run(&Workspace::new(), gradients, options)
}

/// The tangents of o and lse along tangents of the inputs (J1), (J2), from the outputs of the forward
/// pass.
pub fn jvp<'a, T: Element>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    out: impl Into<OutputRef<'a, T>>,
    tangents: &Tangents<'_, T>,
    options: &Options,
) -> Result<OutputTangents<T>, Error> {
    let inputs = inputs.erased(problem)?;
    let mut to = zeros(problem.o_shape(), "to")?;
    let mut tlse = zeros(problem.scores.row_shape(), "tlse")?;
    let moved = OutputTangentsMut { to: Some(to.view_mut()), tlse: Some(tlse.view_mut()) };
    write_tangents(inputs, out.into(), tangents, moved, options)?;
    Ok(OutputTangents { to, tlse })
}

/// As [`jvp`], into arrays of the caller. On an error nothing has been written.
pub fn jvp_into<'a, T: Element>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    out: impl Into<OutputRef<'a, T>>,
    tangents: &Tangents<'_, T>,
    moved: OutputTangentsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    write_tangents(inputs.erased(problem)?, out.into(), tangents, moved, options)
}

fn write_tangents<T: Element>(
    inputs: softmax::Inputs<'_>,
    out: OutputRef<'_, T>,
    tangents: &Tangents<'_, T>,
    OutputTangentsMut { to, tlse }: OutputTangentsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    let direction = tangents.direction();
    let pass = softmax::DoubleBackward::tangents(inputs, direction, Some(out.o.into()), out.lse);
    let moved = softmax::SecondGradients {
        gdout: to.map(Into::into),
        gdlse: tlse,
        ..softmax::SecondGradients::default()
    };
    pass.check_tangents(&moved)?;
    pass.run(&Workspace::new(), moved, options)
}

/// How a pass will work in rayon's current pool, every gradient being asked for and every cotangent
/// given; and what it allocates for it, [`Plan::workspace_bytes`].
pub fn plan<T: Element>(problem: &Attention, pass: Pass, options: &Options) -> Result<Plan, Error> {
    problem.check()?;
    let zero = arr0(T::ZERO);
    let zero = Tensor::from(zero.view());
    let value_dim = Some(problem.value_dim);
    softmax::plan(Algorithm::Attention, &problem.scores, value_dim, &zero, pass, options)
}
