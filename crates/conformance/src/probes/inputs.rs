//! The problem of a probe and its inputs, element by element.

use crate::cases::Case;
use crate::laws::part::with_scores;
use crate::laws::tensors::from_indices;
use crate::tensor::{Stored, Tensor, Tensors};
use etalon_problem::{Axis, Error, Operand, Pass, Problem, Role, Scores};

/// The problem of a probe about scores: the structure of a drawn case, with a scale of 1/8 and no option that
/// bends the scores. A problem that somebody brings stands as it is, since nobody knows whether the kernel takes
/// another.
pub(super) fn skeleton(case: &Case) -> Result<(Problem, Scores), Error> {
    let scores = case.scores()?.clone();
    if case.is_given() {
        return Ok((case.problem.clone(), scores));
    }
    let plain =
        Scores { softmax_scale: Some(0.125), softcap: None, sinks: false, bias: None, ..scores };
    Ok((with_scores(&case.problem, plain.clone()), plain))
}

/// The inputs of a pass, element by element. Sinks are −∞ and an additive bias 0, so that neither matters; what
/// `element` says of them does not count.
pub(super) fn fill(
    case: &Case,
    problem: &Problem,
    pass: Pass,
    element: impl Fn(&Operand, &[usize]) -> f64,
) -> Tensors {
    let idle = |x: &Operand, _: &[usize]| if x.name == "sinks" { f64::NEG_INFINITY } else { 0.0 };
    fill_beside(case, problem, pass, &idle, &element)
}

/// An element of an operand, by its index.
type OfOperand<'a> = dyn Fn(&Operand, &[usize]) -> f64 + 'a;

/// The same with sinks and an additive bias of their own.
pub(super) fn fill_beside(
    case: &Case,
    problem: &Problem,
    pass: Pass,
    beside: &OfOperand<'_>,
    element: &OfOperand<'_>,
) -> Tensors {
    let is_beside = |x: &Operand| x.name == "sinks" || x.name == "bias" && x.has(Axis::Keys);
    let operands = problem.operands(pass).into_iter().filter(|x| is_given(case, x));
    let tensor = |operand: Operand| {
        let apart = is_beside(&operand);
        let values = from_indices(&operand.shape, |index| match apart {
            true => beside(&operand, index),
            false => element(&operand, index),
        });
        let stored = Stored::of(operand.precision, case.dtype);
        (operand.name.to_string(), Tensor::store(&values, stored))
    };
    operands.map(tensor).collect()
}

/// Tells whether an operand is handed in: dlse where the case has it, and of a problem that somebody brings no
/// optional cotangent that was not asked for.
fn is_given(case: &Case, x: &Operand) -> bool {
    let optional = x.role == Role::OptionalCotangent && (x.name == "dlse" || case.is_given());
    x.role.is_given() && (!optional || case.inputs.contains_key(x.name))
}

/// The columns of v; 0 where there are no values.
pub(super) fn value_columns(problem: &Problem) -> usize {
    problem.operand("v").map_or(0, |v| v.shape[v.shape.len() - 1])
}

/// Tells whether a number is a power of two, with either sign, so that products with it are exact.
pub(super) fn is_dyadic(x: f64) -> bool {
    x.is_normal() && x.to_bits() << 12 == 0
}

/// The place in a stream of the element at `at`, in the tensor with that `salt`: it wraps, and only
/// has to be the same each time.
pub(super) fn place(salt: usize, at: &[usize]) -> usize {
    at.iter().fold(salt, |place, &i| place.wrapping_mul(523).wrapping_add(i))
}
