//! Every pass by name.

use super::{Cotangents, Inputs, Wanted, backward, forward};
use crate::named::{Named, Tensors, into_named};
use crate::scalar::Real;
use crate::second_order::FirstOrder;
use etalon_problem::{Algorithm, Error, LinearCrossEntropy, Pass};

/// The outputs of a pass, by name: [`crate::evaluate`] of this algorithm alone.
pub fn evaluate<T: Real>(
    problem: &LinearCrossEntropy,
    pass: Pass,
    x: &Tensors<T>,
) -> Result<Tensors<T>, Error> {
    problem.evaluate(pass, x)
}

impl FirstOrder for LinearCrossEntropy {
    fn first_order<T: Real>(&self, pass: Pass, x: &Tensors<T>) -> Result<Tensors<T>, Error> {
        let targets = x.get("targets").map(|x| x.mapv(|target| target.to_f64() as i64));
        let integers =
            targets.map(|targets| ("targets".to_string(), targets)).into_iter().collect();
        let inputs = Inputs::from_named(x, &integers)?;
        Ok(match pass {
            Pass::Forward => into_named(forward(self, &inputs)?),
            Pass::Backward => {
                let cotangents = Cotangents::from_named(x, &integers)?;
                into_named(backward(self, &inputs, &cotangents, Wanted::ALL)?)
            }
            _ => return Err(Algorithm::LinearCrossEntropy.no_pass(pass)),
        })
    }
}
