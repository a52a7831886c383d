//! Every pass by name.

use super::backward::backward_scaled;
use super::forward::forward_scaled;
use super::{
    Cotangents, Gradients, Inputs, Output, SecondCotangents, SecondGradients, StepInputs,
    StepOutput, step,
};
use crate::named::{Tensors, operands, results};
use crate::scalar::Real;
use crate::second_order::second_order;
use etalon_problem::{Algorithm, Error, LinearAttention, Pass};
use ndarray::ArrayViewD;

operands! {
    Inputs { q k v g_gamma g initial_state }
    Cotangents { dout dfinal_state }
    SecondCotangents {
        ddq ddk ddv ddg_gamma ddg ddinitial_state ddscale cot_o cot_final_state
    }
    StepInputs { q k v g_gamma g initial_state }
}

results! {
    Output { o final_state }
    Gradients { dq dk dv dg_gamma dg dinitial_state dscale }
    SecondGradients { gq gk gv gg_gamma gg ginitial_state gscale gdout gdfinal_state }
    StepOutput { o final_state }
}

/// The outputs of a pass, by name: [`crate::evaluate`] of this algorithm alone.
pub fn evaluate<T: Real>(
    problem: &LinearAttention,
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
    problem: &LinearAttention,
    x: &[(&str, ArrayViewD<'_, T>)],
) -> Result<Tensors<T>, Error> {
    second_order(&problem.clone().into(), x, |pass, x| first_order(problem, pass, x))
}

/// The outputs of a pass of the first order, by name. A tensor `scale` stands for the problem's scale:
/// it may carry a derivative.
fn first_order<T: Real>(
    problem: &LinearAttention,
    pass: Pass,
    x: &Tensors<T>,
) -> Result<Tensors<T>, Error> {
    let scale = || x.get("scale").and_then(|x| x.first().copied());
    let scale = || scale().unwrap_or_else(|| T::from_f64(problem.scale));
    Ok(match pass {
        Pass::Forward => forward_scaled(problem, scale(), &Inputs::from_named(x)?)?.into_named(),
        Pass::Backward => {
            let (inputs, cotangents) = (Inputs::from_named(x)?, Cotangents::from_named(x)?);
            backward_scaled(problem, scale(), &inputs, &cotangents)?.into_named()
        }
        Pass::Step => step(problem, &StepInputs::from_named(x)?)?.into_named(),
        _ => return Err(Algorithm::LinearAttention.no_pass(pass)),
    })
}
