//! Gate G3: inputs on which the right answer is known to the last bit, or to the last count,
//! whatever the order, the tile sizes and the hardware.
//!
//! A probe keeps the structure of a case (extents, mask, sequences) and replaces its elements.
//! Expected values are integers or exact binary fractions computed here, without the reference.

mod count;
mod dyadic;
mod edge;
mod lazy_attention;

use crate::cases::Case;
use crate::laws::select::with_scores;
use crate::laws::{ATTENTION, FIRST_ORDER, Kind, LAZY_ATTENTION, Law};
use crate::tensor::{Tensor, Tensors};
use etalon_problem::{Error, Operand, Pass, Problem, Scores};
use ndarray::{ArrayD, IxDyn};

pub(crate) const LAWS: &[Law] = &[
    Law {
        name: "edge_probe",
        statement: "With one-hot weights both edges of every row come out to the last bit.",
        kind: Kind::Probe,
        of: ATTENTION,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| {
            case.problem.scores().is_some_and(|s| s.extents.dim >= 2 || s.extents.keys <= 256)
        },
        check: edge::check,
    },
    Law {
        name: "count_probe",
        statement: "With equal scores every row counts its visible keys, tile by tile.",
        kind: Kind::Probe,
        of: ATTENTION,
        passes: FIRST_ORDER,
        applies: |_, pass| pass == Pass::Forward,
        check: count::check,
    },
    Law {
        name: "dyadic_probe",
        statement: "With weights 2^−m and integer upstreams the gradients are exact fractions.",
        kind: Kind::Probe,
        of: ATTENTION,
        passes: FIRST_ORDER,
        applies: |_, pass| pass == Pass::Backward,
        check: dyadic::check,
    },
    Law {
        name: "kink_probe",
        statement: "A row of one key has weight 1: e = 1 + τ to the last bit, inactive at τ = −1.",
        kind: Kind::Probe,
        of: LAZY_ATTENTION,
        passes: FIRST_ORDER,
        applies: |_, _| true,
        check: lazy_attention::kink,
    },
    Law {
        name: "reach_probe",
        statement: "Where the bias gives one key all weight, e = 1 + τ/n there to the last bit.",
        kind: Kind::Probe,
        of: LAZY_ATTENTION,
        passes: FIRST_ORDER,
        applies: |_, _| true,
        check: lazy_attention::reach,
    },
];

/// The case's structure with a scale of 1/8 and no option that bends the scores.
fn skeleton(case: &Case) -> Result<(Problem, Scores), Error> {
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
fn fill(
    case: &Case,
    problem: &Problem,
    pass: Pass,
    element: impl Fn(&str, &[usize]) -> f64,
) -> Tensors {
    let with_dlse = case.inputs.contains_key("dlse");
    let given =
        |operand: &Operand| operand.role.is_given() && (operand.name != "dlse" || with_dlse);
    let operands = problem.operands(pass).into_iter().filter(given);
    let tensor = |operand: Operand| {
        let values = ArrayD::from_shape_fn(IxDyn(&operand.shape), |index| {
            element(operand.name, ndarray::Dimension::slice(&index))
        });
        let stored = etalon_problem::Stored::of(operand.precision, case.dtype);
        (operand.name.to_string(), Tensor::store(&values, stored))
    };
    operands.map(tensor).collect()
}

/// The place in a stream of the element at `at`, in the tensor with that `salt`: it wraps, and only
/// has to be the same each time.
fn place(salt: usize, at: &[usize]) -> usize {
    at.iter().fold(salt, |place, &i| place.wrapping_mul(523).wrapping_add(i))
}
