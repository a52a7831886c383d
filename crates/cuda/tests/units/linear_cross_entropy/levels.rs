//! Unit tests of `src/linear_cross_entropy/levels.rs`.

use crate::level_table::{Facts, LevelSpec};
use crate::linear_cross_entropy::LEVELS;
use crate::options::{Level, Precision};
use crate::pass::Choice;
use crate::target::Target;
use etalon_problem::{Dtype, Pass};

const FACTS: Facts = Facts {
    target: Target { capability: (9, 0), multiprocessors: 132, shared_memory: 232_448 },
    pass: Pass::Backward,
    storage: Dtype::Bf16,
    precision: Precision::Flash,
};
const SPEC: LevelSpec = LevelSpec { facts: FACTS, dim: 64, value_dim: 0, empty: false, boxes: true };

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
        LevelSpec { boxes: false, ..SPEC },
    ];
    for (spec, rule) in refused.iter().zip(LEVELS[0].rules) {
        assert_eq!(of(spec, Level::Auto), Ok(Level::Portable), "{spec:?}");
        assert_eq!(of(spec, Level::Sm90a), Err(Level::Sm90a.refusal(rule.otherwise)));
    }
}
