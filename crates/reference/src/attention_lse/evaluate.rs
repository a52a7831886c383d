//! Every pass by name.

use super::{
    Cotangents, Gradients, Inputs, Output, OutputTangents, SecondCotangents, SecondGradients,
    Tangents, backward, double_backward, forward, jvp,
};
use crate::named::{Tensors, operands, results};
use crate::scalar::Real;
use etalon_problem::{Algorithm, AttentionLse, Error, Pass};

operands! {
    Inputs { q k sinks bias }
    Cotangents { dlse }
    SecondCotangents { ddq ddk ddsinks ddbias cot_lse }
    Tangents { tq tk tsinks tbias }
}

results! {
    Output { lse }
    Gradients { dq dk dsinks dbias }
    SecondGradients { gq gk gdlse gsinks gbias }
    OutputTangents { tlse }
}

/// The outputs of a pass, by name: [`crate::evaluate`] of this algorithm alone.
pub fn evaluate<T: Real>(
    problem: &AttentionLse,
    pass: Pass,
    x: &Tensors<T>,
) -> Result<Tensors<T>, Error> {
    let inputs = Inputs::from_named(x)?;
    let cotangents = || Cotangents::from_named(x);
    Ok(match pass {
        Pass::Forward => forward(problem, &inputs)?.into_named(),
        Pass::Backward => backward(problem, &inputs, &cotangents()?)?.into_named(),
        Pass::DoubleBackward => {
            let second = SecondCotangents::from_named(x)?;
            double_backward(problem, &inputs, &cotangents()?, &second)?.into_named()
        }
        Pass::Jvp => jvp(problem, &inputs, &Tangents::from_named(x)?)?.into_named(),
        Pass::Step => return Err(Algorithm::AttentionLse.no_pass(pass)),
    })
}
