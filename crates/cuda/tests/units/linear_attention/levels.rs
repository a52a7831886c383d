//! Unit tests of `src/linear_attention/levels.rs`.

use crate::level_table::{LevelSpec, refusals};
use crate::linear_attention::LEVELS;
use crate::options::Level;
use crate::shared::{declared_bytes, shared_bytes};
use crate::target::Target;
use crate::variant::Variant;
use etalon_problem::{Dtype, Pass};

#[test]
fn the_first_rule_that_fails_is_the_reason() {
    let of = |pass| {
        let spec = LevelSpec { dim: 136, ..LevelSpec::permissive((pass, Dtype::Bf16), Target::default()) };
        refusals(&LEVELS, &spec)
    };
    let expected = [
        (Level::Sm90a, "dim and value_dim must be at most 128 for sm90a"),
        (Level::Sm80, "dim and value_dim must be at most 128 for sm80"),
    ];
    assert_eq!(of(Pass::Forward), expected);
    // A step of any extents is computed.
    assert_eq!(of(Pass::Step), [(Level::Sm90a, "a step has no product of matrices")]);
}

/// The table of docs/linear_attention.md, in KiB: the shared memory of a block.
#[test]
fn a_block_has_what_the_docs_say() {
    let variant = |dim, level| match level {
        Level::Portable => Variant::linear(Dtype::Bf16, dim, false),
        Level::Sm80 => Variant::linear_tensor(Dtype::Bf16, [dim, dim], true),
        _ => Variant::hopper_linear(Dtype::Bf16, dim, false),
    };
    let of = |dim, name, level| {
        let variant = variant(dim, level);
        let bytes = shared_bytes(&variant, name) + declared_bytes(&variant, name).unwrap_or(0);
        bytes.div_ceil(1024)
    };
    for (name, level, narrow, wide) in [
        ("attend", Level::Portable, 34, 34),
        ("attend", Level::Sm80, 40, 80),
        ("attend", Level::Sm90a, 147, 227),
        ("sums", Level::Portable, 34, 34),
        ("sums", Level::Sm80, 32, 64),
        ("flow", Level::Portable, 37, 37),
        ("flow", Level::Sm80, 51, 83),
    ] {
        let found = (of(64, name, level), of(128, name, level));
        assert_eq!(found, (narrow, wide), "{name} {level}");
    }
}
