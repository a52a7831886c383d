//! The passes for tensors of one element type: each with results of its own, with results in arrays of
//! the caller, and with a workspace that the caller keeps.

use super::forward::Forward;
use super::operands::Known;
use super::schedule::Schedule;
use super::step::Step;
use super::two_sided::TwoSidedSweep;
use super::{
    Cotangents, Gradients, GradientsMut, Inputs, Output, OutputMut, SecondCotangents,
    SecondGradients, SecondGradientsMut, StepInputs, StepOutput,
};
use crate::memory::zeros;
use crate::{Element, Options, Workspace};
use etalon_problem::{Decay, Error, LinearAttention, Pass};
use ndarray::{Array1, Array3, ArrayView4, ArrayViewMut3, ArrayViewMut4};

/// o and, where the problem asks for it, the final state.
pub fn forward<T: Element>(
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    options: &Options,
) -> Result<Output<T>, Error> {
    let workspace = Workspace::new();
    Known::of(&workspace, problem, Pass::Forward)?;
    let mut o = zeros(problem.o_shape(), "o")?;
    let state = || zeros(problem.state_shape(), "final_state");
    let mut final_state = problem.final_state.then(state).transpose()?;
    let final_view = final_state.as_mut().map(|state| state.view_mut());
    let out = OutputMut { o: o.view_mut(), final_state: final_view };
    forward_in(&workspace, problem, inputs, out, options)?;
    Ok(Output { o, final_state })
}

/// As [`forward`], into arrays of the caller. On an error nothing has been written.
pub fn forward_into<T: Element>(
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    out: OutputMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    forward_in(&Workspace::new(), problem, inputs, out, options)
}

/// As [`forward_into`], with memory of a workspace.
pub fn forward_in<T: Element>(
    workspace: &Workspace,
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    out: OutputMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    let known = Known::of(workspace, problem, Pass::Forward)?;
    let operands = inputs.operands(&known)?;
    let final_shape = out.final_state.as_ref().map(|x| x.shape());
    let (expected, given) = (problem.final_state, final_shape.is_some());
    Error::expect_presence("final_state", "final_state", expected, given)?;
    known.check(&[("o", Some(out.o.shape())), ("final_state", final_shape)])?;
    let schedule = Schedule::new(problem, &known.sequences, Pass::Forward, options)?;
    Forward { schedule, operands }.run(workspace, Some(out.o.into()), out.final_state)
}

/// The gradients of the inputs.
pub fn backward<T: Element>(
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    options: &Options,
) -> Result<Gradients<T>, Error> {
    let workspace = Workspace::new();
    Known::of(&workspace, problem, Pass::Backward)?;
    let mut dq = zeros(problem.q_shape(), "dq")?;
    let mut dk = zeros(problem.k_shape(), "dk")?;
    let mut dv = zeros(problem.v_shape(), "dv")?;
    let (mut dg_gamma, mut dg) = by_decay(problem, ["dg_gamma", "dg"])?;
    let state = || zeros(problem.state_shape(), "dinitial_state");
    let mut dinitial_state = problem.initial_state.then(state).transpose()?;
    let mut dscale = 0.0;
    let place = GradientsMut {
        dq: Some(dq.view_mut()),
        dk: Some(dk.view_mut()),
        dv: Some(dv.view_mut()),
        dg_gamma: dg_gamma.as_mut().map(|x| x.view_mut()),
        dg: dg.as_mut().map(|x| x.view_mut()),
        dinitial_state: dinitial_state.as_mut().map(|x| x.view_mut()),
        dscale: Some(&mut dscale),
    };
    backward_in(&workspace, problem, inputs, cotangents, place, options)?;
    Ok(Gradients { dq, dk, dv, dg_gamma, dg, dinitial_state, dscale })
}

/// As [`backward`], into arrays of the caller, and only what is asked for. On an error nothing has
/// been written.
pub fn backward_into<T: Element>(
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    gradients: GradientsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    backward_in(&Workspace::new(), problem, inputs, cotangents, gradients, options)
}

/// As [`backward_into`], with memory of a workspace.
pub fn backward_in<T: Element>(
    workspace: &Workspace,
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    gradients: GradientsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    let known = Known::of(workspace, problem, Pass::Backward)?;
    let mut operands = inputs.operands(&known)?;
    cotangents.add_to(&known, &mut operands)?;
    let results = gradients.results(&known)?;
    let schedule = Schedule::new(problem, &known.sequences, Pass::Backward, options)?;
    TwoSidedSweep::run(workspace, schedule, operands, results)
}

/// The gradients of ⟨ddq, dq⟩ + … + ⟨cot_o, o⟩ + ⟨cot_final_state, H_n⟩ by everything that the
/// backward pass reads.
pub fn double_backward<T: Element>(
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
    options: &Options,
) -> Result<SecondGradients<T>, Error> {
    let workspace = Workspace::new();
    Known::of(&workspace, problem, Pass::DoubleBackward)?;
    let mut gq = zeros(problem.q_shape(), "gq")?;
    let mut gk = zeros(problem.k_shape(), "gk")?;
    let mut gv = zeros(problem.v_shape(), "gv")?;
    let (mut gg_gamma, mut gg) = by_decay(problem, ["gg_gamma", "gg"])?;
    let state = |name| zeros(problem.state_shape(), name);
    let mut ginitial_state = problem.initial_state.then(|| state("ginitial_state")).transpose()?;
    let mut gscale = 0.0;
    let mut gdout = zeros(problem.o_shape(), "gdout")?;
    let mut gdfinal_state = problem.final_state.then(|| state("gdfinal_state")).transpose()?;
    let place = SecondGradientsMut {
        gq: Some(gq.view_mut()),
        gk: Some(gk.view_mut()),
        gv: Some(gv.view_mut()),
        gg_gamma: gg_gamma.as_mut().map(|x| x.view_mut()),
        gg: gg.as_mut().map(|x| x.view_mut()),
        ginitial_state: ginitial_state.as_mut().map(|x| x.view_mut()),
        gscale: Some(&mut gscale),
        gdout: Some(gdout.view_mut()),
        gdfinal_state: gdfinal_state.as_mut().map(|x| x.view_mut()),
    };
    double_backward_in(&workspace, problem, inputs, cotangents, second, place, options)?;
    Ok(SecondGradients { gq, gk, gv, gg_gamma, gg, ginitial_state, gscale, gdout, gdfinal_state })
}

/// As [`double_backward`], into arrays of the caller, and only what is asked for. On an error nothing
/// has been written.
pub fn double_backward_into<T: Element>(
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
    gradients: SecondGradientsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    let workspace = Workspace::new();
    double_backward_in(&workspace, problem, inputs, cotangents, second, gradients, options)
}

/// As [`double_backward_into`], with memory of a workspace.
pub fn double_backward_in<T: Element>(
    workspace: &Workspace,
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
    gradients: SecondGradientsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    let known = Known::of(workspace, problem, Pass::DoubleBackward)?;
    let mut operands = inputs.operands(&known)?;
    cotangents.add_to(&known, &mut operands)?;
    second.add_to(&known, &mut operands)?;
    let results = gradients.results(&known)?;
    let schedule = Schedule::new(problem, &known.sequences, Pass::DoubleBackward, options)?;
    TwoSidedSweep::run(workspace, schedule, operands, results)
}

/// o of the next token and the states after it, from `initial_state` `[B, Hk, D, E]`, those before it.
pub fn step<T: Element>(
    problem: &LinearAttention,
    inputs: &StepInputs<'_, T>,
    initial_state: ArrayView4<'_, f32>,
    options: &Options,
) -> Result<StepOutput<T>, Error> {
    let workspace = Workspace::new();
    inputs.operands(&*Known::of(&workspace, problem, Pass::Step)?, initial_state.shape())?;
    let e = &problem.extents;
    let mut o = zeros([e.batch, e.query_heads, problem.value_dim], "o")?;
    let mut state = zeros(initial_state.raw_dim(), "final_state")?;
    state.assign(&initial_state);
    step_in(&workspace, problem, inputs, state.view_mut(), o.view_mut(), options)?;
    Ok(StepOutput { o, final_state: state })
}

/// As [`step`], with the states where they are: `state` `[B, Hk, D, E]` becomes those after the token,
/// and `o` `[B, Hq, E]` is written. On an error nothing has been.
pub fn step_into<T: Element>(
    problem: &LinearAttention,
    inputs: &StepInputs<'_, T>,
    state: ArrayViewMut4<'_, f32>,
    o: ArrayViewMut3<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    step_in(&Workspace::new(), problem, inputs, state, o, options)
}

/// As [`step_into`], with memory of a workspace.
pub fn step_in<T: Element>(
    workspace: &Workspace,
    problem: &LinearAttention,
    inputs: &StepInputs<'_, T>,
    state: ArrayViewMut4<'_, f32>,
    o: ArrayViewMut3<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    let known = Known::of(workspace, problem, Pass::Step)?;
    let operands = inputs.operands(&known, state.shape())?;
    known.check(&[("o", Some(o.shape()))])?;
    Step { problem, options, operands }.run(workspace, state, Some(o.into()))
}

/// The gradients by the log-decays of heads and of tokens, of which a problem has at most one.
type ByDecay = (Option<Array1<f32>>, Option<Array3<f32>>);

/// Zeros for the gradients by the log-decays.
fn by_decay(problem: &LinearAttention, [g_gamma, g]: [&str; 2]) -> Result<ByDecay, Error> {
    let per_head = || zeros(problem.extents.key_heads, g_gamma);
    let per_token = || zeros(problem.g_shape(), g);
    Ok((
        (problem.decay == Decay::PerHead).then(per_head).transpose()?,
        (problem.decay == Decay::PerToken).then(per_token).transpose()?,
    ))
}
