//! Every pass by name.

use super::{Cotangents, Inputs, backward, forward};
use crate::named::{Named, Tensors, into_named};
use crate::scalar::Real;
use crate::second_order::FirstOrder;
use etalon_problem::{Algorithm, Error, LazyAttention, Pass};

/// The outputs of a pass, by name: [`crate::evaluate`] of this algorithm alone.
pub fn evaluate<T: Real>(
    problem: &LazyAttention,
    pass: Pass,
    x: &Tensors<T>,
) -> Result<Tensors<T>, Error> {
    problem.evaluate(pass, x)
}

impl FirstOrder for LazyAttention {
    fn first_order<T: Real>(&self, pass: Pass, x: &Tensors<T>) -> Result<Tensors<T>, Error> {
        let none = Tensors::new();
        let inputs = Inputs::from_named(x, &none)?;
        Ok(match pass {
            Pass::Forward => into_named(forward(self, &inputs)?),
            Pass::Backward => {
                into_named(backward(self, &inputs, &Cotangents::from_named(x, &none)?)?)
            }
            _ => return Err(Algorithm::LazyAttention.no_pass(pass)),
        })
    }
}
