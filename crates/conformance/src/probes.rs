//! Gate G3: inputs on which the right answer is known to the last bit, or to the last count,
//! whatever the order, the tile sizes and the hardware.
//!
//! A probe keeps the structure of a case (extents, mask, sequences) and replaces its elements.
//! Expected values are integers or exact binary fractions computed here, without the reference.

mod count;
mod dyadic;
mod edge;
mod inputs;
mod lazy_attention;

use crate::cases::Case;
use crate::laws::law::{ATTENTION, FIRST_ORDER, Kind, LAZY_ATTENTION, Law};
use etalon_problem::Pass;

pub(crate) const LAWS: &[Law] = &[
    Law {
        name: "edge_probe",
        statement: "With one-hot weights both edges of every row are exact to the last bit.",
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
        statement: "With weights 2^−m and integer cotangents the gradients are exact fractions.",
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
