//! (C21)–(C32), by dual numbers: [`crate::second_order`].

use super::{Cotangents, Inputs, SecondCotangents, SecondGradients};
use crate::named::Named;
use crate::scalar::Real;
use crate::second_order::FirstOrder;
use etalon_problem::{Error, LinearCrossEntropy};

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
