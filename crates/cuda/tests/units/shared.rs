//! Unit tests of `src/shared.rs`.

use crate::options::Level;
use crate::shared::{declared_bytes, shared_bytes};
use crate::variant::Variant;
use etalon_problem::Dtype;

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
