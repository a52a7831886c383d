//! (C21)–(C32), by dual numbers: [`crate::second_order`].

use super::evaluate::second_order_by_name;
use super::{Cotangents, Inputs, SecondCotangents, SecondGradients};
use crate::named::Operand;
use crate::scalar::Real;
use etalon_problem::{Error, LinearCrossEntropy};

/// The gradients of <ddh, dh> + <ddw, dw> + <ddbias, dbias> + <cot_loss, loss> + <cot_lse, lse> +
/// <cot_logprob, logprob> + <cot_entropy, entropy> by everything they come from.
pub fn double_backward<T: Real>(
    problem: &LinearCrossEntropy,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
) -> Result<SecondGradients<T>, Error> {
    let targets = inputs.targets.mapv(|target| T::from_f64(target as f64));
    let own = [
        ("h", inputs.h.elements()),
        ("w", inputs.w.elements()),
        ("bias", inputs.bias.elements()),
        ("targets", Some(targets.view().into_dyn())),
        ("class_weights", inputs.class_weights.elements()),
        ("token_weights", inputs.token_weights.elements()),
    ];
    let own = own.into_iter().filter_map(|(name, x)| Some((name, x?))).collect();
    let x = [own, cotangents.named(), second.named()];
    SecondGradients::from_named(second_order_by_name(problem, &x.concat())?)
}
