//! Every pass of the softmax algorithms by name.

use super::operands::Operands;
use super::wave::Places;
use super::{backward, double_backward, forward, lazy_backward, lazy_double_backward, streamed};
use crate::known::Known;
use crate::named::{Inputs, float_place, place};
use crate::workspace::Region;
use crate::{Options, Workspace};
use etalon_problem::{Error, Pass, Scores, Views, ViewsMut};
use ndarray::{ArrayViewMut, Dimension, IntoDimension, Ix4};

/// Runs a pass; its inputs and the places of its outputs have been checked.
pub fn run(
    workspace: &Workspace,
    known: &Known,
    scores: &Scores,
    inputs: &Views<'_>,
    out: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    let mut operands = Operands::of(known, scores, Inputs(inputs))?;
    if known.pass == Pass::Forward {
        return run_forward(workspace, &operands, out, options);
    }
    // Results that the forward pass did not save are computed anew; o is not rounded to the storage type.
    let (mut memory_of_o, mut memory_of_lse) = (None, None);
    let (mut o, mut lse) = (None, None);
    // Later passes of lazy attention do not read o.
    if operands.v.is_some() && operands.o.is_none() && operands.tau.is_none() {
        let e = &scores.extents;
        let shape = [e.batch, e.query_heads, e.queries, operands.value_dim()];
        o = Some(room(workspace, &mut memory_of_o, shape, "o")?);
    }
    if operands.lse.is_none() || o.is_some() {
        let lse = lse.insert(room(workspace, &mut memory_of_lse, scores.row_shape(), "lse")?);
        let o = o.as_mut().map(|o| o.view_mut().into());
        let places = streamed::Places { o, pv: None, lse: lse.view_mut() };
        forward::run(workspace, &operands, places, false, options)?;
    }
    operands.o = o.as_ref().map_or(operands.o, |o| Some(o.view().into()));
    operands.lse = lse.as_ref().map_or(operands.lse, |lse| Some(lse.view()));
    let lazy = operands.tau.is_some();
    let places = places(out, known.pass, lazy)?;
    match known.pass {
        Pass::Backward if lazy => lazy_backward::run(workspace, &operands, places, options),
        Pass::Backward => backward::run(workspace, &operands, places, options),
        _ if lazy => lazy_double_backward::run(workspace, &operands, places, options),
        _ => double_backward::run(workspace, &operands, places, options),
    }
}

fn run_forward(
    workspace: &Workspace,
    operands: &Operands<'_>,
    out: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    let mut unwanted = None;
    let lse = match float_place(out, "lse")? {
        Some(lse) => lse,
        None => room(workspace, &mut unwanted, operands.scores.row_shape(), "lse")?,
    };
    let gradient = float_place::<Ix4>(out, "gradient")?;
    let derivative = gradient.is_some();
    let o = match gradient {
        Some(gradient) => Some(gradient.into()),
        None => place(out, "o")?,
    };
    let pv = float_place::<Ix4>(out, "pv_sum")?.map(Into::into);
    forward::run(workspace, operands, streamed::Places { o, pv, lse }, derivative, options)
}

/// The places of the results of a pass behind the forward pass.
fn places<'o>(out: &mut ViewsMut<'o>, pass: Pass, lazy: bool) -> Result<Places<'o>, Error> {
    let [q, k, v, sinks, bias, tau] = match pass {
        Pass::Backward => ["dq", "dk", "dv", "dsinks", "dbias", "dtau"],
        _ => ["gq", "gk", "gv", "gsinks", "gbias", "gtau"],
    };
    let [dout, dlse] = if pass == Pass::Jvp { ["to", "tlse"] } else { ["gdout", "gdlse"] };
    Ok(Places {
        queries: [place(out, q)?, place(out, dout)?],
        numbers: float_place(out, dlse)?,
        keys: [place(out, k)?, place(out, v)?],
        with_keys: None,
        sinks: float_place(out, sinks)?,
        bias: if lazy { None } else { place(out, bias)? },
        distances: if lazy { float_place(out, bias)? } else { None },
        tau: float_place(out, tau)?,
    })
}

/// An array in memory of a workspace, which `memory` holds; its elements are anything.
fn room<'m, D: Dimension>(
    workspace: &Workspace,
    memory: &'m mut Option<Region>,
    shape: impl IntoDimension<Dim = D>,
    what: &str,
) -> Result<ArrayViewMut<'m, f32, D>, Error> {
    let shape = shape.into_dimension();
    let len = shape.slice().iter().fold(1, |len: usize, &extent| len.saturating_mul(extent));
    let memory = memory.insert(workspace.room(len, what)?);
    let array = ArrayViewMut::from_shape(shape, memory);
    array.map_err(|error| Error::value(what, "an addressable array", error))
}
