//! (E19)–(E30), by dual numbers: [`crate::second_order`].

use super::{Cotangents, Inputs, SecondCotangents, SecondGradients, backward, forward};
use crate::named::{ByName, Named, Tensors, into_named};
use crate::scalar::Real;
use crate::second_order::FirstOrder;
use etalon_problem::{Algorithm, Error, LazyAttention, Pass};

/// The gradients of <ddq, dq> + <ddk, dk> + <ddv, dv> + <ddbias, dbias> + <ddtau, dtau> +
/// <cot_o, o> + <cot_lse, lse> by everything they come from. Values decide which pairs are active:
/// on a kink there is no second derivative, and this one is that of the side on which the
/// pair is not active.
pub fn double_backward<T: Real>(
    problem: &LazyAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
) -> Result<SecondGradients<T>, Error> {
    problem.double_backward([inputs.named(), cotangents.named(), second.named()])
}

impl FirstOrder for LazyAttention {
    fn first_order<T: Real>(&self, pass: Pass, x: &ByName<'_, T>) -> Result<Tensors<T>, Error> {
        match pass {
            Pass::Forward => forward(self, &x.get()?).map(into_named),
            Pass::Backward => backward(self, &x.get()?, &x.get()?).map(into_named),
            _ => Err(Algorithm::LazyAttention.no_pass(pass)),
        }
    }
}
