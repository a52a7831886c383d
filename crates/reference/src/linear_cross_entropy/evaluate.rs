//! Every pass by name.

use super::{
    Cotangents, Gradients, Inputs, Output, SecondCotangents, SecondGradients, Wanted, backward,
    forward,
};
use crate::named::{Operand, Shapes, Tensors, operands, results};
use crate::scalar::Real;
use crate::second_order::second_order;
use etalon_problem::{Algorithm, Error, LinearCrossEntropy, Pass};
use ndarray::{Array1, ArrayView1, ArrayViewD};

operands! {
    Cotangents { dloss dlse dlogprob dentropy }
    SecondCotangents { ddh ddw ddbias cot_loss cot_lse cot_logprob cot_entropy }
}

results! {
    Output { loss lse logprob entropy argmax n_valid normaliser }
    Gradients { dh dw dbias }
    SecondGradients { gh gw gbias gdloss gdlse gdlogprob gdentropy }
}

impl<'a, T: Real> Inputs<'a, T> {
    fn from_named(x: &'a Tensors<T>, targets: &'a Array1<i64>) -> Result<Self, Error> {
        Ok(Inputs {
            h: Operand::from_named("h", x)?,
            w: Operand::from_named("w", x)?,
            bias: Operand::from_named("bias", x)?,
            targets: targets.view(),
            class_weights: Operand::from_named("class_weights", x)?,
            token_weights: Operand::from_named("token_weights", x)?,
        })
    }

    pub(crate) fn shapes(&self) -> Shapes<'_> {
        vec![
            ("h", Operand::shape(&self.h)),
            ("w", Operand::shape(&self.w)),
            ("bias", Operand::shape(&self.bias)),
            ("targets", Some(self.targets.shape())),
            ("class_weights", Operand::shape(&self.class_weights)),
            ("token_weights", Operand::shape(&self.token_weights)),
        ]
    }
}

/// The outputs of a pass, by name: [`crate::evaluate`] of this algorithm alone.
pub fn evaluate<T: Real>(
    problem: &LinearCrossEntropy,
    pass: Pass,
    x: &Tensors<T>,
) -> Result<Tensors<T>, Error> {
    match pass {
        Pass::DoubleBackward => {
            let x = x.iter().map(|(name, x)| (name.as_str(), x.view())).collect::<Vec<_>>();
            second_order_by_name(problem, &x)
        }
        _ => first_order(problem, pass, x),
    }
}

/// The outputs of the double backward pass, by name.
pub(super) fn second_order_by_name<T: Real>(
    problem: &LinearCrossEntropy,
    x: &[(&str, ArrayViewD<'_, T>)],
) -> Result<Tensors<T>, Error> {
    second_order(&problem.clone().into(), x, |pass, x| first_order(problem, pass, x))
}

/// The outputs of a pass of the first order, by name.
fn first_order<T: Real>(
    problem: &LinearCrossEntropy,
    pass: Pass,
    x: &Tensors<T>,
) -> Result<Tensors<T>, Error> {
    let targets: ArrayView1<'_, T> = Operand::from_named("targets", x)?;
    let targets = targets.mapv(|target| target.to_f64() as i64);
    let inputs = Inputs::from_named(x, &targets)?;
    Ok(match pass {
        Pass::Forward => forward(problem, &inputs)?.into_named(),
        Pass::Backward => {
            let cotangents = Cotangents::from_named(x)?;
            backward(problem, &inputs, &cotangents, Wanted::ALL)?.into_named()
        }
        _ => return Err(Algorithm::LinearCrossEntropy.no_pass(pass)),
    })
}
