//! Every pass by name.

use super::decays::Logs;
use super::forward::Forward;
use super::operands::{Known, Operands, Results};
use super::schedule::Schedule;
use super::step::Step;
use super::two_sided::TwoSidedSweep;
use crate::element::Tensor;
use crate::memory::zeros;
use crate::named::{Inputs, float_place, place};
use crate::{Options, Workspace};
use etalon_problem::{Error, LinearAttention, Pass, Views, ViewsMut};
use ndarray::{Axis, Ix0, Ix2, Ix3, Ix4};

/// Runs a pass; its inputs and the places of its outputs have been checked.
pub fn run(
    workspace: &Workspace,
    problem: &LinearAttention,
    pass: Pass,
    inputs: &Views<'_>,
    out: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    let (x, known) = (Inputs(inputs), Known::of(workspace, problem, pass)?);
    if pass == Pass::Step {
        return step(workspace, problem, x, out, options);
    }
    let operands = operands(x)?;
    operands.log_decays.check(&known.sequences)?;
    let schedule = Schedule::new(problem, &known.sequences, pass, options)?;
    if pass == Pass::Forward {
        let (o, state) = (place(out, "o")?, float_place(out, "final_state")?);
        return Forward { schedule, operands }.run(workspace, o, state);
    }
    TwoSidedSweep::run(workspace, schedule, operands, results(out, pass)?)
}

/// The inputs and cotangents of a pass, those that are there.
fn operands<'a>(x: Inputs<'a, '_>) -> Result<Operands<'a>, Error> {
    let tangents = Logs { by_head: x.float("ddg_gamma")?, by_token: x.float("ddg")? };
    let ddscale = x.float::<Ix0>("ddscale")?.map_or(0.0, |x| x[()]);
    Ok(Operands {
        q: [x.tensor("q")?, x.tensor("ddq")?],
        k: [x.tensor("k")?, x.tensor("ddk")?],
        v: [x.tensor("v")?, x.tensor("ddv")?],
        dout: [x.tensor("dout")?, x.tensor("cot_o")?],
        log_decays: Logs { by_head: x.float("g_gamma")?, by_token: x.float("g")? },
        log_tangents: tangents,
        initial: [x.float("initial_state")?, x.float("ddinitial_state")?],
        last: [x.float("dfinal_state")?, x.float("cot_final_state")?],
        ddscale,
    })
}

/// The places of the results of a backward or double backward pass.
fn results<'o>(out: &mut ViewsMut<'o>, pass: Pass) -> Result<Results<'o>, Error> {
    let [q, k, v, dout, g, g_gamma, initial, last, scale] = match pass {
        Pass::Backward => ["dq", "dk", "dv", "", "dg", "dg_gamma", "dinitial_state", "", "dscale"],
        _ => [
            "gq",
            "gk",
            "gv",
            "gdout",
            "gg",
            "gg_gamma",
            "ginitial_state",
            "gdfinal_state",
            "gscale",
        ],
    };
    let g = float_place::<Ix3>(out, g)?;
    Ok(Results {
        q: place(out, q)?,
        k: place(out, k)?,
        v: place(out, v)?,
        dout: place(out, dout)?,
        g: g.map(|g| g.insert_axis(Axis(3)).into()),
        g_gamma: float_place(out, g_gamma)?,
        initial: float_place(out, initial)?,
        last: float_place(out, last)?,
        scale: float_place::<Ix0>(out, scale)?.map(|x| x.into_scalar()),
    })
}

/// One token; without an initial state where the final state lies.
fn step(
    workspace: &Workspace,
    problem: &LinearAttention,
    x: Inputs<'_, '_>,
    out: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    let token = |name| -> Result<[Option<Tensor<'_, Ix4>>; 2], Error> {
        Ok([Some(x.needed::<Ix3>(name)?.with_tokens()), None])
    };
    let g = x.float::<Ix2>("g")?.map(|g| g.insert_axis(Axis(2)));
    let log_decays = Logs { by_head: x.float("g_gamma")?, by_token: g };
    log_decays.check_step()?;
    let (q, k, v) = (token("q")?, token("k")?, token("v")?);
    let initial = [x.float("initial_state")?, None];
    let operands = Operands { q, k, v, log_decays, initial, ..Operands::default() };
    let mut no_state;
    let state = match float_place::<Ix4>(out, "final_state")? {
        Some(state) => state,
        None => {
            let e = &problem.extents;
            let shape = [e.batch, e.key_heads, e.dim, problem.value_dim];
            no_state = zeros::<f32, _>(shape, "final_state")?;
            no_state.view_mut()
        }
    };
    Step { problem, options, operands }.run(workspace, state, place(out, "o")?)
}
