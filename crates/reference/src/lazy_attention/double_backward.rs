//! The gradients of <ddq, dq> + <ddk, dk> + <ddv, dv> + <ddbias, dbias> + <ddtau, dtau> +
//! <cot_o, o> + <cot_lse, lse>, by dual numbers.
//!
//! dx is the gradient of φ = <dout, o> + <dlse, lse>, whose second derivative is symmetric. The
//! gradient of <ddx, dx> is therefore how dx moves as x moves by ddx; that of <cot_o, o> is how dx
//! moves as dout moves by cot_o. One pass with both gives the sum. And o moves by the gradient of
//! dout. Written out, this is (E19)–(E30).

use super::backward::backward;
use super::forward::forward;
use super::{Cotangents, Inputs, SecondCotangents, SecondGradients};
use crate::scalar::Real;
use crate::tensor::{tangent_of, with_tangent, with_tangent_if_any};
use etalon_problem::{Error, LazyAttention, Pass};

/// The gradients of a loss of the gradients (and of the outputs) by everything they come from.
/// Which pairs are active is decided by the values: on a kink there is no second derivative, and
/// this one is that of the side on which the pair is not active.
pub fn double_backward<T: Real>(
    problem: &LazyAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
) -> Result<SecondGradients<T>, Error> {
    inputs.check(problem, Pass::DoubleBackward, &cotangents.shapes())?;
    inputs.check(problem, Pass::DoubleBackward, &second.shapes())?;
    let q = with_tangent("q", &inputs.q, second.ddq.as_ref())?;
    let k = with_tangent("k", &inputs.k, second.ddk.as_ref())?;
    let v = with_tangent("v", &inputs.v, second.ddv.as_ref())?;
    let bias = with_tangent_if_any("bias", inputs.bias.as_ref(), second.ddbias.as_ref())?;
    let tau = with_tangent("tau", &inputs.tau, second.ddtau.as_ref())?;
    let moving = Inputs {
        q: q.view(),
        k: k.view(),
        v: v.view(),
        bias: bias.as_ref().map(|bias| bias.view()),
        tau: tau.view(),
    };
    let dout = with_tangent("dout", &cotangents.dout, second.cot_o.as_ref())?;
    let dlse = with_tangent_if_any("dlse", cotangents.dlse.as_ref(), second.cot_lse.as_ref())?;
    let moving_cotangents =
        Cotangents { dout: dout.view(), dlse: dlse.as_ref().map(|dlse| dlse.view()) };

    let y = forward(problem, &moving)?;
    let d = backward(problem, &moving, &moving_cotangents)?;
    Ok(SecondGradients {
        gq: tangent_of("gq", d.dq)?,
        gk: tangent_of("gk", d.dk)?,
        gv: tangent_of("gv", d.dv)?,
        gbias: d.dbias.map(|dbias| tangent_of("gbias", dbias)).transpose()?,
        gtau: tangent_of("gtau", d.dtau)?,
        gdout: tangent_of("gdout", y.o)?,
        gdlse: tangent_of("gdlse", y.lse)?,
    })
}

impl<T> SecondCotangents<'_, T> {
    fn shapes(&self) -> [(&'static str, Option<&[usize]>); 7] {
        [
            ("ddq", self.ddq.as_ref().map(|x| x.shape())),
            ("ddk", self.ddk.as_ref().map(|x| x.shape())),
            ("ddv", self.ddv.as_ref().map(|x| x.shape())),
            ("ddbias", self.ddbias.as_ref().map(|x| x.shape())),
            ("ddtau", self.ddtau.as_ref().map(|x| x.shape())),
            ("cot_o", self.cot_o.as_ref().map(|x| x.shape())),
            ("cot_lse", self.cot_lse.as_ref().map(|x| x.shape())),
        ]
    }
}
