//! Every pass by name.

use super::backward::backward_scaled;
use super::forward::forward_scaled;
use super::{Cotangents, Inputs, StepInputs, step};
use crate::named::{Named, Tensors, into_named};
use crate::scalar::Real;
use crate::second_order::FirstOrder;
use etalon_problem::{Algorithm, Error, LinearAttention, Pass};

/// The outputs of a pass, by name: [`crate::evaluate`] of this algorithm alone.
pub fn evaluate<T: Real>(
    problem: &LinearAttention,
    pass: Pass,
    x: &Tensors<T>,
) -> Result<Tensors<T>, Error> {
    problem.evaluate(pass, x)
}

impl FirstOrder for LinearAttention {
    fn first_order<T: Real>(&self, pass: Pass, x: &Tensors<T>) -> Result<Tensors<T>, Error> {
        let none = Tensors::new();
        let scale = x.get("scale").and_then(|x| x.first().copied());
        let scale = scale.unwrap_or_else(|| T::from_f64(self.scale));
        let inputs = || Inputs::from_named(x, &none);
        Ok(match pass {
            Pass::Forward => into_named(forward_scaled(self, scale, &inputs()?)?),
            Pass::Backward => {
                let cotangents = Cotangents::from_named(x, &none)?;
                into_named(backward_scaled(self, scale, &inputs()?, &cotangents)?)
            }
            Pass::Step => into_named(step(self, &StepInputs::from_named(x, &none)?)?),
            _ => return Err(Algorithm::LinearAttention.no_pass(pass)),
        })
    }
}
