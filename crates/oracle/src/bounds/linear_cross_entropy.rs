//! The bounds of linear_cross_entropy: equations (N60) to (N75).

mod backward;
mod chunks;
mod forward;
mod operands;
mod row;

use super::inputs::{Errors, Inputs};
use etalon_problem::{LinearCrossEntropy, Pass};
use ndarray::Array2;

/// |da| of every token and class `[T][V]`, and how far it may be off.
pub(super) fn logit_gradients(
    problem: &LinearCrossEntropy,
    inputs: &Inputs<'_>,
) -> [Array2<f64>; 2] {
    backward::logit_gradients(&operands::Operands::new(problem, inputs))
}

/// The errors of the outputs of the forward or backward pass.
pub(super) fn errors(problem: &LinearCrossEntropy, inputs: &Inputs<'_>) -> Errors {
    let operands = operands::Operands::new(problem, inputs);
    match inputs.pass {
        Pass::Forward => forward::errors(&operands),
        _ => backward::errors(&operands),
    }
}
