//! The levels of linear_cross_entropy.

use crate::level_table::{self, LevelRow, Rule};
use crate::options::{Level, Options, Precision};
use crate::pass::Choice;
use crate::target::Target;
use etalon_problem::{Dtype, Error, Pass};

/// A pass, as far as it decides which kernels compute it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LevelSpec {
    pub target: Target,
    pub pass: Pass,
    pub storage: Dtype,
    pub precision: Precision,
    pub dim: usize,
    /// h, w, dh and dw begin at multiples of 16 bytes.
    pub aligned: bool,
}

/// Fastest first.
pub(crate) static LEVELS: [LevelRow<LevelSpec>; 2] = [
    LevelRow {
        level: Level::Sm90a,
        rules: &[
            Rule {
                otherwise: Precision::FACTORS,
                holds: |spec| spec.precision == Precision::Flash,
            },
            Rule {
                otherwise: "the device is not of compute capability 9.0",
                holds: |spec| spec.target.is_hopper(),
            },
            Rule {
                otherwise: "its tensor cores multiply bf16 and f16",
                holds: |spec| matches!(spec.storage, Dtype::Bf16 | Dtype::F16),
            },
            Rule {
                otherwise: "the second order is not written yet for sm90a",
                holds: |spec| spec.pass != Pass::DoubleBackward,
            },
            Rule {
                otherwise: "dim must be a multiple of 8 for sm90a",
                holds: |spec| spec.dim.is_multiple_of(8),
            },
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
pub(crate) fn refuses(
    options: &Options,
    (pass, storage): (Pass, Dtype),
    target: &Target,
) -> Option<&'static str> {
    let (target, precision) = (*target, Precision::Flash);
    let spec = LevelSpec { target, pass, storage, precision, dim: 64, aligned: true };
    level_table::refuses(&LEVELS, &spec, options.level)
}

impl LevelSpec {
    /// The level that computes the pass. Fails where the one that is asked for cannot.
    pub fn choose(&self, level: Level) -> Result<Choice, Error> {
        Choice::of(&LEVELS, self, level)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: LevelSpec = LevelSpec {
        target: Target { capability: (9, 0), multiprocessors: 132, shared_memory: 232_448 },
        pass: Pass::Backward,
        storage: Dtype::Bf16,
        precision: Precision::Flash,
        dim: 64,
        aligned: true,
    };

    #[test]
    fn tensor_cores_compute_what_they_can() {
        let of = |spec: &LevelSpec, level| spec.choose(level).map(|choice| choice.level);
        assert_eq!(of(&SPEC, Level::Auto), Ok(Level::Sm90a));
        assert_eq!(of(&SPEC, Level::Portable), Ok(Level::Portable));
        let refused = [
            LevelSpec { precision: Precision::Strict, ..SPEC },
            LevelSpec { target: Target { capability: (10, 0), ..SPEC.target }, ..SPEC },
            LevelSpec { storage: Dtype::F32, ..SPEC },
            LevelSpec { pass: Pass::DoubleBackward, ..SPEC },
            LevelSpec { dim: 12, ..SPEC },
            LevelSpec { aligned: false, ..SPEC },
        ];
        for (spec, rule) in refused.iter().zip(LEVELS[0].rules) {
            assert_eq!(of(spec, Level::Auto), Ok(Level::Portable), "{spec:?}");
            assert_eq!(of(spec, Level::Sm90a), Err(Level::Sm90a.refusal(rule.otherwise)));
        }
    }
}
