//! Every pass by name.

use super::{
    Cotangents, Gradients, Inputs, Output, SecondCotangents, SecondGradients, backward, forward,
};
use crate::named::{Tensors, operands, results};
use crate::scalar::Real;
use crate::second_order::second_order;
use etalon_problem::{Algorithm, Error, LazyAttention, Pass};
use ndarray::ArrayViewD;

operands! {
    Inputs { q k v bias tau }
    Cotangents { dout dlse }
    SecondCotangents { ddq ddk ddv ddbias ddtau cot_o cot_lse }
}

results! {
    Output { o lse }
    Gradients { dq dk dv dbias dtau }
    SecondGradients { gq gk gv gbias gtau gdout gdlse }
}

/// The outputs of a pass, by name: [`crate::evaluate`] of this algorithm alone.
pub fn evaluate<T: Real>(
    problem: &LazyAttention,
    pass: Pass,
    x: &Tensors<T>,
) -> Result<Tensors<T>, Error> {
    match pass {
        Pass::DoubleBackward => {
            let x = x.iter().map(|(name, x)| (name.as_str(), x.view())).collect::<Vec<_>>();
            second_order_by_name(problem, &x)
        }
        _ => first_order(problem, pass, x),
    }
}

/// The outputs of the double backward pass, by name.
pub(super) fn second_order_by_name<T: Real>(
    problem: &LazyAttention,
    x: &[(&str, ArrayViewD<'_, T>)],
) -> Result<Tensors<T>, Error> {
    second_order(&problem.clone().into(), x, |pass, x| first_order(problem, pass, x))
}

/// The outputs of a pass of the first order, by name.
fn first_order<T: Real>(
    problem: &LazyAttention,
    pass: Pass,
    x: &Tensors<T>,
) -> Result<Tensors<T>, Error> {
    let inputs = Inputs::from_named(x)?;
    Ok(match pass {
        Pass::Forward => forward(problem, &inputs)?.into_named(),
        Pass::Backward => backward(problem, &inputs, &Cotangents::from_named(x)?)?.into_named(),
        _ => return Err(Algorithm::LazyAttention.no_pass(pass)),
    })
}
