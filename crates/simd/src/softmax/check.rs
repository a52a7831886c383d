//! Fails unless the operands and results of a pass have the shapes that follow from the problem. The
//! inputs have been checked.

use super::backward::{Backward, Gradients};
use super::double_backward::{Direction, DoubleBackward, SecondGradients};
use super::inputs::{Inputs, shape};
use crate::element::TensorMut;
use etalon_problem::Error;
use ndarray::Ix4;

/// The shape of a result that may be absent.
fn shape_mut<'s>(tensor: &'s Option<TensorMut<'_, Ix4>>) -> Option<&'s [usize]> {
    tensor.as_ref().map(TensorMut::shape)
}

impl Backward<'_> {
    /// Fails unless everything but the inputs has its shape.
    pub fn check(&self, out: &Gradients<'_>) -> Result<(), Error> {
        let (lse, dlse) = (self.lse.shape(), self.dlse.as_ref().map(|x| x.shape()));
        self.inputs.check_like_outputs(["o", "lse"], [shape(&self.o), Some(lse)])?;
        self.inputs.check_like_outputs(["dout", "dlse"], [shape(&self.dout), dlse])?;
        if let Some(gradient) = &self.gradient {
            Error::expect_shape("gradient", &self.inputs.scores.q_shape(), gradient.shape())?;
        }
        let Gradients { dq, dk, dv, dsinks, dbias } = out;
        let dsinks = dsinks.as_ref().map(|x| x.shape());
        self.inputs.check_like_inputs(
            ["dq", "dk", "dv", "dsinks", "dbias"],
            [shape_mut(dq), shape_mut(dk), shape_mut(dv), dsinks, shape_mut(dbias)],
        )
    }
}

impl DoubleBackward<'_> {
    /// Fails unless everything but the inputs has its shape.
    pub fn check(&self, out: &SecondGradients<'_>) -> Result<(), Error> {
        self.check_outputs()?;
        let (dlse, cot_lse) = (self.dlse.as_ref(), self.cot_lse.as_ref());
        let dlse = dlse.map(|x| x.shape());
        let cot_lse = cot_lse.map(|x| x.shape());
        self.inputs.check_like_outputs(["dout", "dlse"], [shape(&self.dout), dlse])?;
        self.inputs.check_like_outputs(["cot_o", "cot_lse"], [shape(&self.cot_o), cot_lse])?;
        self.direction.check(&self.inputs, ["ddq", "ddk", "ddv", "ddsinks", "ddbias"])?;
        let SecondGradients { gq, gk, gv, gdout, gdlse, gsinks, gbias } = out;
        let (gdlse, gsinks) =
            (gdlse.as_ref().map(|x| x.shape()), gsinks.as_ref().map(|x| x.shape()));
        self.inputs.check_like_inputs(
            ["gq", "gk", "gv", "gsinks", "gbias"],
            [shape_mut(gq), shape_mut(gk), shape_mut(gv), gsinks, shape_mut(gbias)],
        )?;
        self.inputs.check_like_outputs(["gdout", "gdlse"], [shape_mut(gdout), gdlse])
    }

    /// The same of tangents.
    pub fn check_tangents(&self, out: &SecondGradients<'_>) -> Result<(), Error> {
        self.check_outputs()?;
        self.direction.check(&self.inputs, ["tq", "tk", "tv", "tsinks", "tbias"])?;
        let tlse = out.gdlse.as_ref().map(|x| x.shape());
        self.inputs.check_like_outputs(["to", "tlse"], [shape_mut(&out.gdout), tlse])
    }

    fn check_outputs(&self) -> Result<(), Error> {
        self.inputs.check_like_outputs(["o", "lse"], [shape(&self.o), Some(self.lse.shape())])
    }
}

impl Direction<'_> {
    fn check(&self, inputs: &Inputs<'_>, names: [&str; 5]) -> Result<(), Error> {
        let Direction { q, k, v, sinks, bias } = self;
        let sinks = sinks.as_ref().map(|x| x.shape());
        inputs.check_like_inputs(names, [shape(q), shape(k), shape(v), sinks, shape(bias)])
    }
}
