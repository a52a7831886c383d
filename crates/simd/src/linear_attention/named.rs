//! Every pass by name.

use super::backward::First;
use super::decays::Logs;
use super::double_backward::Second;
use super::forward::Forward;
use super::operands::{Known, Operands, Results};
use super::schedule::Schedule;
use super::scratch::Wanted;
use super::step::Step;
use super::two_sided::{Body, TwoSidedSweep};
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
    let mut operands = operands(x)?;
    operands.log_decays.check(&known.sequences)?;
    let schedule = Schedule::new(problem, &known.sequences, pass, options)?;
    match pass {
        Pass::Forward => {
            let state = float_place(out, "final_state")?;
            let mut unwanted;
            let o = match place(out, "o")? {
                Some(o) => o,
                None => {
                    unwanted = zeros::<f32, _>(problem.o_shape(), "o")?;
                    unwanted.view_mut().into()
                }
            };
            Forward { schedule, operands }.run(workspace, o, state)
        }
        Pass::Backward => {
            let names = ["dq", "dk", "dv", "", "dg", "dg_gamma", "dinitial_state", ""];
            let results = results(out, names, "dscale")?;
            sweep(workspace, schedule, operands, &First, results)
        }
        _ => {
            tangents(x, &mut operands)?;
            let names =
                ["gq", "gk", "gv", "gdout", "gg", "gg_gamma", "ginitial_state", "gdfinal_state"];
            let results = results(out, names, "gscale")?;
            let body = Second { scale: results.scale.is_some() };
            sweep(workspace, schedule, operands, &body, results)
        }
    }
}

/// The inputs, and the first cotangents where they are there.
fn operands<'a>(x: Inputs<'a, '_>) -> Result<Operands<'a>, Error> {
    Ok(Operands {
        q: [x.tensor("q")?, None],
        k: [x.tensor("k")?, None],
        v: [x.tensor("v")?, None],
        dout: [x.tensor("dout")?, None],
        log_decays: Logs { by_head: x.float("g_gamma")?, by_token: x.float("g")? },
        initial: [x.float("initial_state")?, None],
        last: [x.float("dfinal_state")?, None],
        ..Operands::default()
    })
}

/// Adds the second cotangents, as tangents.
fn tangents<'a>(x: Inputs<'a, '_>, operands: &mut Operands<'a>) -> Result<(), Error> {
    operands.q[1] = x.tensor("ddq")?;
    operands.k[1] = x.tensor("ddk")?;
    operands.v[1] = x.tensor("ddv")?;
    operands.dout[1] = x.tensor("cot_o")?;
    operands.log_tangents =
        Some(Logs { by_head: x.float("ddg_gamma")?, by_token: x.float("ddg")? });
    operands.initial[1] = x.float("ddinitial_state")?;
    operands.last[1] = x.float("cot_final_state")?;
    operands.scale[1] = x.float::<Ix0>("ddscale")?.map_or(0.0, |x| x[()]);
    Ok(())
}

/// The places of results: by q, k, v, dout, g, g_gamma, and the states at both ends.
fn results<'o>(
    out: &mut ViewsMut<'o>,
    [q, k, v, dout, g, g_gamma, initial, last]: [&str; 8],
    scale: &str,
) -> Result<Results<'o>, Error> {
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
    let e = &problem.extents;
    let (mut no_state, mut no_o);
    let state = match float_place::<Ix4>(out, "final_state")? {
        Some(state) => state,
        None => {
            let shape = [e.batch, e.key_heads, e.dim, problem.value_dim];
            no_state = zeros::<f32, _>(shape, "final_state")?;
            no_state.view_mut()
        }
    };
    let o = match place::<Ix3>(out, "o")? {
        Some(o) => o,
        None => {
            no_o = zeros::<f32, _>([e.batch, e.query_heads, problem.value_dim], "o")?;
            no_o.view_mut().into()
        }
    };
    Step { problem, options, operands }.run(workspace, state, o)
}

/// Runs a backward or double backward pass, its operands checked.
fn sweep<'a>(
    workspace: &Workspace,
    schedule: Schedule<'a>,
    mut operands: Operands<'a>,
    body: &'a dyn Body,
    results: Results<'_>,
) -> Result<(), Error> {
    operands.scale[0] = schedule.problem.scale as f32;
    let (q, scale) = (results.q.is_some(), results.scale.is_some());
    let wanted = Wanted {
        q,
        dq: scale || q && (schedule.order == 1 || operands.scale[1] != 0.0),
        k: results.k.is_some(),
        v: results.v.is_some(),
        g: results.g.is_some() || results.g_gamma.is_some(),
        dout: results.dout.is_some(),
    };
    TwoSidedSweep { schedule, operands, wanted, body }.run(workspace, results)
}
