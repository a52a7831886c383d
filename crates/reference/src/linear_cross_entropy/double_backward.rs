//! (C21)–(C32), by dual numbers: [`crate::second_order`].

use super::{Cotangents, Inputs, SecondCotangents, SecondGradients, Wanted, backward, forward};
use crate::named::{ByName, Named, Tensors, into_named};
use crate::scalar::Real;
use crate::second_order::FirstOrder;
use etalon_problem::{Algorithm, Error, LinearCrossEntropy, Pass};

/// The gradients of <ddh, dh> + <ddw, dw> + <ddbias, dbias> + <cot_loss, loss> + <cot_lse, lse> +
/// <cot_logprob, logprob> + <cot_entropy, entropy> by everything they come from.
pub fn double_backward<T: Real>(
    problem: &LinearCrossEntropy,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
) -> Result<SecondGradients<T>, Error> {
    let targets = inputs.targets.mapv(|target| T::from_f64(target as f64)).into_dyn();
    let mut own = inputs.named();
    own.push(("targets", targets.view()));
    problem.double_backward([own, cotangents.named(), second.named()])
}

impl FirstOrder for LinearCrossEntropy {
    fn first_order<T: Real>(&self, pass: Pass, x: &ByName<'_, T>) -> Result<Tensors<T>, Error> {
        match pass {
            Pass::Forward => forward(self, &x.get()?).map(into_named),
            Pass::Backward => backward(self, &x.get()?, &x.get()?, Wanted::ALL).map(into_named),
            _ => Err(Algorithm::LinearCrossEntropy.no_pass(pass)),
        }
    }
}
