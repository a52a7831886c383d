//! The levels of linear_cross_entropy.

use crate::level_table::{self, Facts, LevelRow, Rule};
use crate::options::{Level, Options, Precision};
use crate::target::Target;
use etalon_problem::{Dtype, Pass};
use std::ops::Deref;

/// A pass, as far as it decides which kernels compute it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LevelSpec {
    pub facts: Facts,
    pub dim: usize,
    /// h, w, dh and dw begin at multiples of 16 bytes.
    pub aligned: bool,
}

impl Deref for LevelSpec {
    type Target = Facts;

    fn deref(&self) -> &Facts {
        &self.facts
    }
}

/// Fastest first.
pub(crate) static LEVELS: [LevelRow<LevelSpec>; 2] = [
    LevelRow {
        level: Level::Sm90a,
        rules: &[
            Rule::FLASH,
            Rule::HOPPER,
            Rule::SIXTEEN_BITS,
            Rule::FIRST_ORDER_SM90A,
            Rule { otherwise: "dim must be a multiple of 8 for sm90a", holds: |spec| spec.dim.is_multiple_of(8) },
            Rule {
                otherwise: "h, w, dh and dw must begin at multiples of 16 bytes for sm90a",
                holds: |spec| spec.aligned,
            },
        ],
    },
    LevelRow { level: Level::Portable, rules: &[] },
];

/// The reason why the level of the options has no kernel for a pass in a storage type on such a device, whatever the
/// problem, if so.
pub(crate) fn refuses(options: &Options, (pass, storage): (Pass, Dtype), target: &Target) -> Option<&'static str> {
    let facts = Facts { target: *target, pass, storage, precision: Precision::Flash };
    let spec = LevelSpec { facts, dim: 64, aligned: true };
    level_table::refuses(&LEVELS, &spec, options.level)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pass::Choice;

    const FACTS: Facts = Facts {
        target: Target { capability: (9, 0), multiprocessors: 132, shared_memory: 232_448 },
        pass: Pass::Backward,
        storage: Dtype::Bf16,
        precision: Precision::Flash,
    };
    const SPEC: LevelSpec = LevelSpec { facts: FACTS, dim: 64, aligned: true };

    #[test]
    fn tensor_cores_compute_what_they_can() {
        let of = |spec: &LevelSpec, level| Choice::of(&LEVELS, spec, level).map(|choice| choice.level);
        let with = |facts| LevelSpec { facts, ..SPEC };
        assert_eq!(of(&SPEC, Level::Auto), Ok(Level::Sm90a));
        assert_eq!(of(&SPEC, Level::Portable), Ok(Level::Portable));
        let refused = [
            with(Facts { precision: Precision::Strict, ..FACTS }),
            with(Facts { target: Target { capability: (10, 0), ..FACTS.target }, ..FACTS }),
            with(Facts { storage: Dtype::F32, ..FACTS }),
            with(Facts { pass: Pass::DoubleBackward, ..FACTS }),
            LevelSpec { dim: 12, ..SPEC },
            LevelSpec { aligned: false, ..SPEC },
        ];
        for (spec, rule) in refused.iter().zip(LEVELS[0].rules) {
            assert_eq!(of(spec, Level::Auto), Ok(Level::Portable), "{spec:?}");
            assert_eq!(of(spec, Level::Sm90a), Err(Level::Sm90a.refusal(rule.otherwise)));
        }
    }
}
