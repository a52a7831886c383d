//! The problem of a probe and its inputs, element by element.

use crate::cases::Case;
use crate::laws::part::with_scores;
use crate::tensor::{Stored, Tensor, Tensors};
use etalon_problem::{Error, Operand, Pass, Problem, Scores};
use ndarray::{ArrayD, Dimension, IxDyn};

/// The case's structure with a scale of 1/8 and no option that bends the scores.
pub(super) fn skeleton(case: &Case) -> Result<(Problem, Scores), Error> {
    let plain = Scores {
        softmax_scale: Some(0.125),
        softcap: None,
        sinks: false,
        bias: None,
        ..case.scores()?.clone()
    };
    Ok((with_scores(&case.problem, plain.clone()), plain))
}

/// The inputs of a pass, element by element.
pub(super) fn fill(
    case: &Case,
    problem: &Problem,
    pass: Pass,
    element: impl Fn(&Operand, &[usize]) -> f64,
) -> Tensors {
    let with_dlse = case.inputs.contains_key("dlse");
    let given = |x: &Operand| x.role.is_given() && (x.name != "dlse" || with_dlse);
    let operands = problem.operands(pass).into_iter().filter(given);
    let tensor = |operand: Operand| {
        let values =
            ArrayD::from_shape_fn(IxDyn(&operand.shape), |index| element(&operand, index.slice()));
        let stored = Stored::of(operand.precision, case.dtype);
        (operand.name.to_string(), Tensor::store(&values, stored))
    };
    operands.map(tensor).collect()
}

/// The place in a stream of the element at `at`, in the tensor with that `salt`: it wraps, and only
/// has to be the same each time.
pub(super) fn place(salt: usize, at: &[usize]) -> usize {
    at.iter().fold(salt, |place, &i| place.wrapping_mul(523).wrapping_add(i))
}
