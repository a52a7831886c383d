//! (E19)–(E30), by dual numbers: [`crate::second_order`].

use super::{Cotangents, Inputs, SecondCotangents, SecondGradients};
use crate::named::Named;
use crate::scalar::Real;
use crate::second_order::FirstOrder;
use etalon_problem::{Error, LazyAttention};

/// The gradients of <ddq, dq> + <ddk, dk> + <ddv, dv> + <ddbias, dbias> + <ddtau, dtau> +
/// <cot_o, o> + <cot_lse, lse> by everything they come from. Which pairs are active is decided by the
/// values: on a kink there is no second derivative, and this one is that of the side on which the
/// pair is not active.
pub fn double_backward<T: Real>(
    problem: &LazyAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
) -> Result<SecondGradients<T>, Error> {
    problem.double_backward([inputs.named(), cotangents.named(), second.named()])
}
