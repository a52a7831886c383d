//! Every pass by name.

use super::decays::Logs;
use super::forward::Forward;
use super::operands::{Operands, Results};
use super::schedule::Schedule;
use super::step::Step;
use super::two_sided::TwoSidedSweep;
use crate::element::Tensor;
use crate::known::Known;
use crate::memory::zeros;
use crate::named::{Inputs, float_place, place};
use crate::{Options, Workspace};
use etalon_problem::{Error, LinearAttention, Pass, Views, ViewsMut};
use ndarray::{Axis, Ix0, Ix2, Ix3, Ix4};

/// Runs a pass; its inputs and the places of its outputs have been checked.
pub fn run(
    workspace: &Workspace,
    known: &Known,
    problem: &LinearAttention,
    inputs: &Views<'_>,
    out: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    let pass = known.pass;
    let operands = operands(Inputs(inputs), pass)?;
    if pass == Pass::Step {
        return step(workspace, problem, operands, out, options);
    }
    operands.log_decays.check(&known.tokens)?;
    let schedule = Schedule::new(problem, &known.tokens, pass, options, operands.dtypes())?;
    if pass == Pass::Forward {
        let (o, state) = (place(out, "o")?, float_place(out, "final_state")?);
        return Forward { schedule, operands }.run(workspace, o, state);
    }
    TwoSidedSweep::run(workspace, schedule, operands, results(out, pass)?)
}

/// The inputs and cotangents of a pass, those that are there. One token gets an axis of tokens; second
/// cotangents are tangents.
fn operands<'a>(x: Inputs<'a, '_>, pass: Pass) -> Result<Operands<'a>, Error> {
    let step = pass == Pass::Step;
    let tensor = |name| -> Result<Option<Tensor<'a, Ix4>>, Error> {
        Ok(if step { x.tensor::<Ix3>(name)?.map(Tensor::with_tokens) } else { x.tensor(name)? })
    };
    let g = match step {
        true => x.float::<Ix2>("g")?.map(|g| g.insert_axis(Axis(2))),
        false => x.float("g")?,
    };
    Ok(Operands {
        q: [tensor("q")?, tensor("ddq")?],
        k: [tensor("k")?, tensor("ddk")?],
        v: [tensor("v")?, tensor("ddv")?],
        dout: [tensor("dout")?, tensor("cot_o")?],
        log_decays: Logs { by_head: x.float("g_gamma")?, by_token: g },
        log_tangents: Logs { by_head: x.float("ddg_gamma")?, by_token: x.float("ddg")? },
        initial: [x.float("initial_state")?, x.float("ddinitial_state")?],
        last: [x.float("dfinal_state")?, x.float("cot_final_state")?],
        ddscale: x.float::<Ix0>("ddscale")?.map_or(0.0, |x| x[()]),
    })
}

/// The places of the results of a backward or double backward pass.
fn results<'o>(out: &mut ViewsMut<'o>, pass: Pass) -> Result<Results<'o>, Error> {
    let name = |first, second| if pass == Pass::Backward { first } else { second };
    let g = float_place::<Ix3>(out, name("dg", "gg"))?;
    let scale = float_place::<Ix0>(out, name("dscale", "gscale"))?;
    Ok(Results {
        q: place(out, name("dq", "gq"))?,
        k: place(out, name("dk", "gk"))?,
        v: place(out, name("dv", "gv"))?,
        dout: place(out, "gdout")?,
        g: g.map(|g| g.insert_axis(Axis(3)).into()),
        g_gamma: float_place(out, name("dg_gamma", "gg_gamma"))?,
        initial: float_place(out, name("dinitial_state", "ginitial_state"))?,
        last: float_place(out, "gdfinal_state")?,
        scale: scale.map(|x| x.into_scalar()),
    })
}

/// One token; without an initial state where the final state lies.
fn step<'a>(
    workspace: &Workspace,
    problem: &'a LinearAttention,
    operands: Operands<'a>,
    out: &mut ViewsMut<'_>,
    options: &'a Options,
) -> Result<(), Error> {
    operands.log_decays.check_step()?;
    let mut no_place;
    let state = match float_place::<Ix4>(out, "final_state")? {
        Some(state) => state,
        None => {
            let e = &problem.extents;
            let shape = [e.batch, e.key_heads, e.dim, problem.value_dim];
            no_place = zeros::<f32, _>(shape, "final_state")?;
            no_place.view_mut()
        }
    };
    Step { problem, options, operands }.run(workspace, state, place(out, "o")?)
}
