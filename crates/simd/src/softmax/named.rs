//! Every pass of the softmax algorithms by name.

use super::backward::{Backward, Gradients};
use super::double_backward::{Direction, DoubleBackward, SecondGradients};
use super::forward::Forward;
use super::inputs::Inputs;
use crate::element::Tensor;
use crate::named::{self, float_place, place};
use crate::tiles::check_counts;
use crate::workspace::Region;
use crate::{Options, Workspace};
use etalon_problem::{Error, Pass, Scores, Views, ViewsMut};
use ndarray::{ArrayView, ArrayView3, ArrayViewMut, Dimension, IntoDimension, Ix3, Ix4};

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
    let x = named::Inputs(inputs);
    let inputs = Inputs {
        scores,
        q: x.needed("q")?,
        k: x.needed("k")?,
        v: x.tensor("v")?,
        sinks: x.float("sinks")?,
        bias: x.tensor("bias")?,
    };
    if pass == Pass::Forward {
        return forward(workspace, inputs, out, options);
    }
    let anew = Anew::new(workspace, inputs, x, options)?;
    let (o, lse) = (anew.o(x)?, anew.lse(x)?);
    match pass {
        Pass::Backward => {
            let gradients = Gradients {
                dq: place(out, "dq")?,
                dk: place(out, "dk")?,
                dv: place(out, "dv")?,
                dsinks: float_place(out, "dsinks")?,
                dbias: place(out, "dbias")?,
            };
            let (gradient, dlse) = (x.float("gradient")?, x.float("dlse")?);
            let dout = x.tensor("dout")?;
            Backward { inputs, o, gradient, lse, dout, dlse }.run(workspace, gradients, options)
        }
        Pass::Jvp => {
            let direction = direction(x, ["tq", "tk", "tv", "tsinks", "tbias"])?;
            let tangents = SecondGradients {
                gdout: place(out, "to")?,
                gdlse: float_place(out, "tlse")?,
                ..SecondGradients::default()
            };
            DoubleBackward::tangents(inputs, direction, o, lse).run(workspace, tangents, options)
        }
        _ => {
            let gradients = SecondGradients {
                gq: place(out, "gq")?,
                gk: place(out, "gk")?,
                gv: place(out, "gv")?,
                gdout: place(out, "gdout")?,
                gdlse: float_place(out, "gdlse")?,
                gsinks: float_place(out, "gsinks")?,
                gbias: place(out, "gbias")?,
            };
            let direction = direction(x, ["ddq", "ddk", "ddv", "ddsinks", "ddbias"])?;
            let (dout, dlse) = (x.tensor("dout")?, x.float("dlse")?);
            let (cot_o, cot_lse) = (x.tensor("cot_o")?, x.float("cot_lse")?);
            let pass = DoubleBackward { inputs, direction, o, lse, dout, dlse, cot_o, cot_lse };
            pass.run(workspace, gradients, options)
        }
    }
}

fn forward(
    workspace: &Workspace,
    inputs: Inputs<'_>,
    out: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    let mut unwanted;
    let lse = match float_place(out, "lse")? {
        Some(lse) => lse,
        None => {
            unwanted = Kept::new(workspace, inputs.scores.row_shape(), "lse")?;
            unwanted.view_mut()?
        }
    };
    let gradient = float_place::<Ix4>(out, "gradient")?;
    let pass = Forward { inputs, gradient: gradient.is_some() };
    let o = match gradient {
        Some(gradient) => Some(gradient.into()),
        None => place(out, "o")?,
    };
    pass.run(workspace, o, lse, options)
}

fn direction<'s>(x: named::Inputs<'s, '_>, names: [&str; 5]) -> Result<Direction<'s>, Error> {
    let [q, k, v, sinks, bias] = names;
    Ok(Direction {
        q: x.tensor(q)?,
        k: x.tensor(k)?,
        v: x.tensor(v)?,
        sinks: x.float(sinks)?,
        bias: x.tensor(bias)?,
    })
}

/// What the forward pass did not save, computed anew; o is not rounded to the storage type.
struct Anew {
    o: Option<Kept<Ix4>>,
    lse: Option<Kept<Ix3>>,
}

impl Anew {
    fn new(
        workspace: &Workspace,
        inputs: Inputs<'_>,
        x: named::Inputs<'_, '_>,
        options: &Options,
    ) -> Result<Self, Error> {
        let has = |name| x.0.get(name).is_some();
        let with_o = inputs.v.is_some() && !has("o");
        if has("lse") && !with_o {
            return Ok(Anew { o: None, lse: None });
        }
        let e = &inputs.scores.extents;
        let shape = [e.batch, e.query_heads, e.queries, inputs.value_dim()];
        let mut o = if with_o { Some(Kept::new(workspace, shape, "o")?) } else { None };
        let mut lse = Kept::new(workspace, inputs.scores.row_shape(), "lse")?;
        let place = o.as_mut().map(|o| o.view_mut().map(Into::into)).transpose()?;
        Forward { inputs, gradient: false }.run(workspace, place, lse.view_mut()?, options)?;
        Ok(Anew { o, lse: Some(lse) })
    }

    fn o<'s>(&'s self, x: named::Inputs<'s, '_>) -> Result<Option<Tensor<'s, Ix4>>, Error> {
        match &self.o {
            Some(o) => Ok(Some(o.view()?.into())),
            None => x.tensor("o"),
        }
    }

    fn lse<'s>(&'s self, x: named::Inputs<'s, '_>) -> Result<ArrayView3<'s, f32>, Error> {
        match &self.lse {
            Some(lse) => lse.view(),
            None => x.float("lse")?.ok_or_else(|| Error::missing("lse", None)),
        }
    }
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
