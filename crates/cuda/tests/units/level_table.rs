//! Unit tests of `src/level_table.rs`.

use crate::level_table::{Facts, LINEAR_ATTENTION, LINEAR_CROSS_ENTROPY, LevelSpec, refusals};
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
fn the_first_rule_that_fails_is_the_reason() {
    let of = |pass| {
        let spec = LevelSpec { dim: 136, ..LevelSpec::from(Facts { pass, ..FACTS }) };
        refusals(&LINEAR_ATTENTION, &spec)
    };
    let expected = [
        (Level::Sm90a, "dim and value_dim must be at most 128 for sm90a"),
        (Level::Sm80, "dim and value_dim must be at most 128 for sm80"),
    ];
    assert_eq!(of(Pass::Forward), expected);
    // A step of any extents is computed.
    assert_eq!(of(Pass::Step), [(Level::Sm90a, "a step has no product of matrices")]);
}

#[test]
fn tensor_cores_compute_what_they_can() {
    let of = |spec: &LevelSpec, level| Choice::of(&LINEAR_CROSS_ENTROPY, spec, level).map(|choice| choice.level);
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
    for (spec, rule) in refused.iter().zip(LINEAR_CROSS_ENTROPY[0].rules) {
        assert_eq!(of(spec, Level::Auto), Ok(Level::Portable), "{spec:?}");
        assert_eq!(of(spec, Level::Sm90a), Err(Level::Sm90a.refusal(rule.otherwise)));
    }
}
