//! The gradients of <ddh, dh> + <ddw, dw> + <ddbias, dbias> + <cot_loss, loss> + <cot_lse, lse> +
//! <cot_logprob, logprob> + <cot_entropy, entropy>.
//!
//! The second derivative is symmetric. So the gradients by h, w and bias are what the backward pass
//! moves by when h, w, bias move along (ddh, ddw, ddbias) and its cotangents along (cot_loss, …);
//! and those by dloss, dlse, … are what the outputs move by. Dual numbers carry both along: no
//! formula but those of the first order is used. (C21)–(C32) are the same in closed form.

use super::{
    Cotangents, Gradients, Inputs, Output, SecondCotangents, SecondGradients, Wanted, backward,
    check_operands, forward,
};
use crate::scalar::{Dual, Real};
use crate::tensor::{tangent_of, with_tangent, with_tangent_if_any};
use etalon_problem::{Error, LinearCrossEntropy, Pass};
use ndarray::{Array1, Array2, ArrayD};

/// The gradients of something of the gradients (and of the outputs) by everything they come from.
pub fn double_backward<T: Real>(
    problem: &LinearCrossEntropy,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
) -> Result<SecondGradients<T>, Error> {
    problem.check()?;
    check_operands(&problem.operands(Pass::DoubleBackward), &inputs.shapes())?;
    cotangents.check(problem, Pass::DoubleBackward)?;
    second.check(problem)?;
    let moving = Moving::new(inputs, cotangents, second)?;
    let Output { loss, lse, logprob, entropy, .. } = forward(problem, &moving.inputs(inputs))?;
    let Gradients { dh, dw, dbias } =
        backward(problem, &moving.inputs(inputs), &moving.cotangents(), Wanted::ALL)?;
    let unwanted = || Error::value("wanted", "every gradient", "fewer");
    Ok(SecondGradients {
        gh: tangent_of("gh", dh.ok_or_else(unwanted)?)?,
        gw: tangent_of("gw", dw.ok_or_else(unwanted)?)?,
        gbias: dbias.map(|x| tangent_of("gbias", x)).transpose()?,
        gdloss: tangent_of("gdloss", loss)?,
        gdlse: lse.map(|x| tangent_of("gdlse", x)).transpose()?,
        gdlogprob: logprob.map(|x| tangent_of("gdlogprob", x)).transpose()?,
        gdentropy: entropy.map(|x| tangent_of("gdentropy", x)).transpose()?,
    })
}

impl<T> SecondCotangents<'_, T> {
    fn check(&self, problem: &LinearCrossEntropy) -> Result<(), Error> {
        let given = [
            ("ddh", self.ddh.as_ref().map(|x| x.shape())),
            ("ddw", self.ddw.as_ref().map(|x| x.shape())),
            ("ddbias", self.ddbias.as_ref().map(|x| x.shape())),
            ("cot_loss", self.cot_loss.as_ref().map(|x| x.shape())),
            ("cot_lse", self.cot_lse.as_ref().map(|x| x.shape())),
            ("cot_logprob", self.cot_logprob.as_ref().map(|x| x.shape())),
            ("cot_entropy", self.cot_entropy.as_ref().map(|x| x.shape())),
        ];
        check_operands(&problem.operands(Pass::DoubleBackward), &given)
    }
}

/// Everything that the backward pass reads, as it moves.
struct Moving<T> {
    h: Array2<Dual<T>>,
    w: Array2<Dual<T>>,
    bias: Option<Array1<Dual<T>>>,
    class_weights: Option<Array1<Dual<T>>>,
    token_weights: Option<Array1<Dual<T>>>,
    dloss: Option<ArrayD<Dual<T>>>,
    dlse: Option<Array1<Dual<T>>>,
    dlogprob: Option<Array1<Dual<T>>>,
    dentropy: Option<Array1<Dual<T>>>,
}

impl<T: Real> Moving<T> {
    fn new(
        inputs: &Inputs<'_, T>,
        cotangents: &Cotangents<'_, T>,
        second: &SecondCotangents<'_, T>,
    ) -> Result<Self, Error> {
        let still = None;
        let Cotangents { dloss, dlse, dlogprob, dentropy } = cotangents;
        let SecondCotangents { ddh, ddw, ddbias, cot_loss, cot_lse, cot_logprob, cot_entropy } =
            second;
        let bias = inputs.bias.as_ref();
        Ok(Moving {
            h: with_tangent("h", &inputs.h, ddh.as_ref())?,
            w: with_tangent("w", &inputs.w, ddw.as_ref())?,
            bias: with_tangent_if_any("bias", bias, ddbias.as_ref())?,
            class_weights: with_tangent_if_any(
                "class_weights",
                inputs.class_weights.as_ref(),
                still,
            )?,
            token_weights: with_tangent_if_any(
                "token_weights",
                inputs.token_weights.as_ref(),
                still,
            )?,
            dloss: with_tangent_if_any("dloss", dloss.as_ref(), cot_loss.as_ref())?,
            dlse: with_tangent_if_any("dlse", dlse.as_ref(), cot_lse.as_ref())?,
            dlogprob: with_tangent_if_any("dlogprob", dlogprob.as_ref(), cot_logprob.as_ref())?,
            dentropy: with_tangent_if_any("dentropy", dentropy.as_ref(), cot_entropy.as_ref())?,
        })
    }

    fn inputs<'a>(&'a self, inputs: &'a Inputs<'_, T>) -> Inputs<'a, Dual<T>> {
        Inputs {
            h: self.h.view(),
            w: self.w.view(),
            bias: self.bias.as_ref().map(|x| x.view()),
            targets: inputs.targets.view(),
            class_weights: self.class_weights.as_ref().map(|x| x.view()),
            token_weights: self.token_weights.as_ref().map(|x| x.view()),
        }
    }

    fn cotangents(&self) -> Cotangents<'_, Dual<T>> {
        Cotangents {
            dloss: self.dloss.as_ref().map(|x| x.view()),
            dlse: self.dlse.as_ref().map(|x| x.view()),
            dlogprob: self.dlogprob.as_ref().map(|x| x.view()),
            dentropy: self.dentropy.as_ref().map(|x| x.view()),
        }
    }
}
