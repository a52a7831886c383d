//! Every pass of the softmax algorithms by name.

use super::operands::Operands;
use super::wave::Places;
use super::{backward, double_backward, forward};
use crate::named::{Inputs, float_place, place};
use crate::tiles::check_counts;
use crate::workspace::Region;
use crate::{Options, Workspace};
use etalon_problem::{Error, Pass, Scores, Views, ViewsMut};
use ndarray::{ArrayView, ArrayViewMut, Dimension, IntoDimension, Ix4};

/// Runs a pass; its inputs and the places of its outputs have been checked.
pub fn run(
    workspace: &Workspace,
    scores: &Scores,
    pass: Pass,
    inputs: &Views<'_>,
    out: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    check_counts(scores.extents.batch, scores.extents.query_heads)?;
    let mut operands = Operands::of(scores, pass, Inputs(inputs))?;
    if pass == Pass::Forward {
        return run_forward(workspace, &operands, out, options);
    }
    // What the forward pass did not save is computed anew; o is not rounded to the storage type.
    let (mut o, mut lse) = (None, None);
    if operands.v.is_some() && operands.o.is_none() {
        let e = &scores.extents;
        let shape = [e.batch, e.query_heads, e.queries, operands.value_dim()];
        o = Some(Kept::new(workspace, shape, "o")?);
    }
    if operands.lse.is_none() || o.is_some() {
        let lse = lse.insert(Kept::new(workspace, scores.row_shape(), "lse")?);
        let o = o.as_mut().map(|o| o.view_mut().map(Into::into)).transpose()?;
        forward::run(workspace, &operands, (o, lse.view_mut()?), false, options)?;
    }
    if let Some(o) = &o {
        operands.o = Some(o.view()?.into());
    }
    if let Some(lse) = &lse {
        operands.lse = Some(lse.view()?);
    }
    let places = places(out, pass)?;
    match pass {
        Pass::Backward => backward::run(workspace, &operands, places, options),
        _ => double_backward::run(workspace, &operands, places, options),
    }
}

fn run_forward(
    workspace: &Workspace,
    operands: &Operands<'_>,
    out: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    let mut unwanted;
    let lse = match float_place(out, "lse")? {
        Some(lse) => lse,
        None => {
            unwanted = Kept::new(workspace, operands.scores.row_shape(), "lse")?;
            unwanted.view_mut()?
        }
    };
    let gradient = float_place::<Ix4>(out, "gradient")?;
    let derivative = gradient.is_some();
    let o = match gradient {
        Some(gradient) => Some(gradient.into()),
        None => place(out, "o")?,
    };
    forward::run(workspace, operands, (o, lse), derivative, options)
}

/// The places of the results of a pass behind the forward pass.
fn places<'o>(out: &mut ViewsMut<'o>, pass: Pass) -> Result<Places<'o>, Error> {
    let [q, k, v, sinks, bias] = match pass {
        Pass::Backward => ["dq", "dk", "dv", "dsinks", "dbias"],
        _ => ["gq", "gk", "gv", "gsinks", "gbias"],
    };
    let [dout, dlse] = if pass == Pass::Jvp { ["to", "tlse"] } else { ["gdout", "gdlse"] };
    Ok(Places {
        queries: [place(out, q)?, place(out, dout)?],
        numbers: float_place(out, dlse)?,
        keys: [place(out, k)?, place(out, v)?],
        with_keys: None,
        sinks: float_place(out, sinks)?,
        bias: place(out, bias)?,
    })
}

/// An array in memory of a workspace.
struct Kept<D: Dimension> {
    memory: Region,
    shape: D,
    what: &'static str,
}

impl<D: Dimension> Kept<D> {
    /// Its elements hold anything.
    fn new(
        workspace: &Workspace,
        shape: impl IntoDimension<Dim = D>,
        what: &'static str,
    ) -> Result<Self, Error> {
        let shape = shape.into_dimension();
        let len = shape.slice().iter().fold(1, |len: usize, &extent| len.saturating_mul(extent));
        Ok(Kept { memory: workspace.room(len, what)?, shape, what })
    }

    fn view(&self) -> Result<ArrayView<'_, f32, D>, Error> {
        let view = ArrayView::from_shape(self.shape.clone(), &self.memory[..]);
        view.map_err(|error| Error::value(self.what, "an addressable array", error))
    }

    fn view_mut(&mut self) -> Result<ArrayViewMut<'_, f32, D>, Error> {
        let view = ArrayViewMut::from_shape(self.shape.clone(), &mut self.memory[..]);
        view.map_err(|error| Error::value(self.what, "an addressable array", error))
    }
}
