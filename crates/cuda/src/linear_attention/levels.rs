//! The levels of linear_attention: who computes a pass, and why the others do not.

use crate::levels::{LevelRow, Rule, choose};
use crate::options::{Level, Options, Precision};
use crate::target::Target;
use etalon_problem::{Dtype, Error, LinearAttention, Pass};

/// A pass, as far as it decides who computes it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spec {
    pub dim: usize,
    pub value_dim: usize,
    /// Whether an operand or a result has no element.
    pub empty: bool,
    pub pass: Pass,
    pub storage: Dtype,
    pub precision: Precision,
    pub target: Target,
    /// Whether the copy engine takes every operand where kernels find it.
    pub boxes: bool,
}

/// The levels, the fastest first.
pub(super) static LEVELS: [LevelRow<Spec>; 3] = [
    LevelRow {
        level: Level::Sm90a,
        rules: &[
            FLASH,
            Rule {
                otherwise: "the device is not of compute capability 9.0",
                holds: |spec| spec.target.is_hopper(),
            },
            SIXTEEN_BITS,
            Rule {
                otherwise: "the second order is not written yet for sm90a",
                holds: |spec| spec.pass != Pass::DoubleBackward,
            },
            Rule {
                otherwise: "a step has no product of matrices",
                holds: |spec| spec.pass != Pass::Step,
            },
            Rule {
                otherwise: "dim and value_dim must be at most 128 for linear_attention of sm90a",
                holds: |spec| spec.dim.max(spec.value_dim) <= 128,
            },
            Rule {
                otherwise: "dim and value_dim must be multiples of 8 for linear_attention of sm90a",
                holds: |spec| spec.dim % 8 + spec.value_dim % 8 == 0,
            },
            Rule { otherwise: "there is nothing for sm90a to compute", holds: |spec| !spec.empty },
            Rule {
                otherwise: "rows must begin and end at multiples of 16 bytes for linear_attention of sm90a",
                holds: |spec| spec.boxes,
            },
        ],
    },
    // A block takes at most the shared memory that every device has.
    LevelRow {
        level: Level::Sm80,
        rules: &[
            FLASH,
            SIXTEEN_BITS,
            Rule {
                otherwise: "the second order is not written yet for sm80",
                holds: |spec| spec.pass != Pass::DoubleBackward,
            },
            // A step is the same on all levels.
            Rule {
                otherwise: "dim and value_dim must be at most 128 for linear_attention of sm80",
                holds: |spec| spec.pass == Pass::Step || spec.dim.max(spec.value_dim) <= 128,
            },
        ],
    },
    LevelRow { level: Level::Portable, rules: &[] },
];

const FLASH: Rule<Spec> = Rule {
    otherwise: Precision::FACTORS,
    holds: |spec| spec.precision.refuses_tensor_cores().is_none(),
};

const SIXTEEN_BITS: Rule<Spec> = Rule {
    otherwise: "its tensor cores multiply bf16 and f16",
    holds: |spec| spec.storage != Dtype::F32,
};

impl Spec {
    pub fn new(
        problem: &LinearAttention,
        (pass, storage): (Pass, Dtype),
        precision: Precision,
        target: Target,
        boxes: bool,
    ) -> Spec {
        let (e, value_dim) = (&problem.extents, problem.value_dim);
        let empty = [e.batch, e.query_heads, e.tokens, e.dim, value_dim].contains(&0);
        Spec { dim: e.dim, value_dim, empty, pass, storage, precision, target, boxes }
    }

    /// The pass that every level computes, if it computes any in this storage type.
    fn permissive(pass: Pass, storage: Dtype) -> Spec {
        let (precision, target) = (Precision::Flash, Target::default());
        let (dim, value_dim, empty, boxes) = (64, 64, false, true);
        Spec { dim, value_dim, empty, pass, storage, precision, target, boxes }
    }
}

/// Fails where the level of the options has no kernel for a pass in a storage type, whatever the problem and the
/// device.
pub(crate) fn offers(options: &Options, pass: Pass, storage: Dtype) -> Result<(), Error> {
    choose(&LEVELS, &Spec::permissive(pass, storage), options.level).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::levels::refusals;
    use crate::run;
    use etalon_problem::Algorithm;

    #[test]
    fn what_a_level_offers_is_what_its_row_says() {
        for &pass in Algorithm::LinearAttention.passes() {
            for storage in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
                for level in Level::ALL {
                    let options = Options { level, ..Options::default() };
                    let door = run::offers(&options, Algorithm::LinearAttention, pass, storage);
                    let own = offers(&options, pass, storage);
                    assert_eq!(own.is_ok(), door.is_ok(), "{pass} {storage} {level}");
                }
            }
        }
    }

    #[test]
    fn the_first_rule_that_fails_is_the_reason() {
        let of = |pass| {
            let spec = Spec { dim: 136, ..Spec::permissive(pass, Dtype::Bf16) };
            refusals(&LEVELS, &spec)
        };
        let expected = [
            (Level::Sm90a, "dim and value_dim must be at most 128 for linear_attention of sm90a"),
            (Level::Sm80, "dim and value_dim must be at most 128 for linear_attention of sm80"),
        ];
        assert_eq!(of(Pass::Forward), expected);
        // A step of any extents is computed.
        assert_eq!(of(Pass::Step), [(Level::Sm90a, "a step has no product of matrices")]);
    }
}
