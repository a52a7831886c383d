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
use crate::tensor;
use etalon_problem::{Error, LinearCrossEntropy, Pass};
use ndarray::{Array, Array1, Array2, ArrayD, ArrayView, Dimension};

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
        gh: tangent("gh", dh.ok_or_else(unwanted)?)?,
        gw: tangent("gw", dw.ok_or_else(unwanted)?)?,
        gbias: dbias.map(|x| tangent("gbias", x)).transpose()?,
        gdloss: tangent("gdloss", loss)?,
        gdlse: lse.map(|x| tangent("gdlse", x)).transpose()?,
        gdlogprob: logprob.map(|x| tangent("gdlogprob", x)).transpose()?,
        gdentropy: entropy.map(|x| tangent("gdentropy", x)).transpose()?,
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
            h: moving("h", inputs.h.shape(), Some(&inputs.h), ddh.as_ref())?,
            w: moving("w", inputs.w.shape(), Some(&inputs.w), ddw.as_ref())?,
            bias: either("bias", bias, ddbias.as_ref())?,
            class_weights: either("class_weights", inputs.class_weights.as_ref(), still)?,
            token_weights: either("token_weights", inputs.token_weights.as_ref(), still)?,
            dloss: either("dloss", dloss.as_ref(), cot_loss.as_ref())?,
            dlse: either("dlse", dlse.as_ref(), cot_lse.as_ref())?,
            dlogprob: either("dlogprob", dlogprob.as_ref(), cot_logprob.as_ref())?,
            dentropy: either("dentropy", dentropy.as_ref(), cot_entropy.as_ref())?,
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

/// value + ε direction, where either is there.
fn either<T: Real, D: Dimension>(
    name: &'static str,
    value: Option<&ArrayView<'_, T, D>>,
    direction: Option<&ArrayView<'_, T, D>>,
) -> Result<Option<Array<Dual<T>, D>>, Error> {
    let shape = value.or(direction).map(|x| x.shape());
    shape.map(|shape| moving(name, shape, value, direction)).transpose()
}

/// value + ε direction; what is absent is zero.
fn moving<T: Real, D: Dimension>(
    name: &'static str,
    shape: &[usize],
    value: Option<&ArrayView<'_, T, D>>,
    direction: Option<&ArrayView<'_, T, D>>,
) -> Result<Array<Dual<T>, D>, Error> {
    let mut moving = tensor::Output::<Dual<T>>::zeros(name, shape)?;
    if let Some(value) = value {
        moving.elements().iter_mut().zip(value).for_each(|(x, &value)| x.value = value);
    }
    if let Some(direction) = direction {
        let elements = moving.elements().iter_mut().zip(direction);
        elements.for_each(|(x, &tangent)| x.tangent = tangent);
    }
    moving.finish()
}

/// How a result moves.
fn tangent<T: Real, D: Dimension>(
    name: &'static str,
    result: Array<Dual<T>, D>,
) -> Result<Array<T, D>, Error> {
    let mut tangent = tensor::Output::zeros(name, result.shape())?;
    tangent.elements().iter_mut().zip(&result).for_each(|(x, result)| *x = result.tangent);
    tangent.finish()
}
