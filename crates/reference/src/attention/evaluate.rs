//! Every pass by name.

use super::{
    Cotangents, Inputs, SecondCotangents, Tangents, backward, double_backward, forward, jvp,
};
use crate::named::{Named, Tensors, into_named};
use crate::scalar::Real;
use etalon_problem::{Algorithm, Attention, Error, Pass};

/// The outputs of a pass, by name: [`crate::evaluate`] of this algorithm alone.
pub fn evaluate<T: Real>(
    problem: &Attention,
    pass: Pass,
    x: &Tensors<T>,
) -> Result<Tensors<T>, Error> {
    let none = Tensors::new();
    let inputs = Inputs::from_named(x, &none)?;
    let cotangents = || Cotangents::from_named(x, &none);
    Ok(match pass {
        Pass::Forward => into_named(forward(problem, &inputs)?),
        Pass::Backward => into_named(backward(problem, &inputs, &cotangents()?)?),
        Pass::DoubleBackward => {
            let second = SecondCotangents::from_named(x, &none)?;
            into_named(double_backward(problem, &inputs, &cotangents()?, &second)?)
        }
        Pass::Jvp => into_named(jvp(problem, &inputs, &Tangents::from_named(x, &none)?)?),
        Pass::Step | Pass::ForwardBackward => return Err(Algorithm::Attention.no_pass(pass)),
    })
}
