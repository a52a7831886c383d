//! Every pass by name.

use super::{
    Cotangents, Gradients, Inputs, Output, OutputTangents, SecondCotangents, SecondGradients,
    Tangents, backward, double_backward, forward, jvp,
};
use crate::named::{Tensors, operands, results};
use crate::scalar::Real;
use etalon_problem::{Algorithm, Attention, Error, Pass};

operands! {
    Inputs { q k v sinks bias }
    Cotangents { dout dlse }
    SecondCotangents { ddq ddk ddv ddsinks ddbias cot_o cot_lse }
    Tangents { tq tk tv tsinks tbias }
}

results! {
    Output { o lse }
    Gradients { dq dk dv dsinks dbias }
    SecondGradients { gq gk gv gdout gdlse gsinks gbias }
    OutputTangents { to tlse }
}

/// The outputs of a pass, by name: [`crate::evaluate`] of this algorithm alone.
pub fn evaluate<T: Real>(
    problem: &Attention,
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
        Pass::Step => return Err(Algorithm::Attention.no_pass(pass)),
    })
}
