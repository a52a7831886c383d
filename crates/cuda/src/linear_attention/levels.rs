//! The levels of linear_attention: who computes a pass, and why the others do not.

use crate::call::PassCall;
use crate::level_table::{self, Facts, LevelRow, Rule};
use crate::options::{Level, Options, Precision};
use crate::target::Target;
use etalon_problem::{Dtype, LinearAttention, Pass};
use std::ops::Deref;

/// A pass, as far as it decides who computes it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Spec {
    facts: Facts,
    pub dim: usize,
    pub value_dim: usize,
    /// True if an operand or a result has no element.
    pub empty: bool,
    /// True if the copy engine takes every operand where kernels find it.
    pub boxes: bool,
}

impl Deref for Spec {
    type Target = Facts;

    fn deref(&self) -> &Facts {
        &self.facts
    }
}

/// The levels, the fastest first.
pub(crate) static LEVELS: [LevelRow<Spec>; 3] = [
    LevelRow {
        level: Level::Sm90a,
        rules: &[
            Rule::FLASH,
            Rule::HOPPER,
            Rule::SIXTEEN_BITS,
            Rule::FIRST_ORDER_SM90A,
            Rule { otherwise: "a step has no product of matrices", holds: |spec| spec.pass != Pass::Step },
            Rule {
                otherwise: "dim and value_dim must be at most 128 for sm90a",
                holds: |spec| spec.dim.max(spec.value_dim) <= 128,
            },
            Rule {
                otherwise: "dim and value_dim must be multiples of 8 for sm90a",
                holds: |spec| spec.dim % 8 + spec.value_dim % 8 == 0,
            },
            Rule { otherwise: "there is nothing for sm90a to compute", holds: |spec| !spec.empty },
            Rule { otherwise: "rows must begin and end at multiples of 16 bytes for sm90a", holds: |spec| spec.boxes },
        ],
    },
    // A block takes at most the shared memory that every device has.
    LevelRow {
        level: Level::Sm80,
        rules: &[
            Rule::FLASH,
            Rule::SIXTEEN_BITS,
            Rule::FIRST_ORDER_SM80,
            // A step is the same on all levels.
            Rule {
                otherwise: "dim and value_dim must be at most 128 for sm80",
                holds: |spec| spec.pass == Pass::Step || spec.dim.max(spec.value_dim) <= 128,
            },
        ],
    },
    LevelRow { level: Level::Portable, rules: &[] },
];

impl Spec {
    pub fn new(problem: &LinearAttention, call: &PassCall<'_, '_>, boxes: bool) -> Spec {
        let PassCall { target, pass, storage, .. } = *call;
        let facts = Facts { target, pass, storage, precision: call.options.precision };
        let (e, value_dim) = (&problem.extents, problem.value_dim);
        let empty = [e.batch, e.query_heads, e.tokens, e.dim, value_dim].contains(&0);
        Spec { facts, dim: e.dim, value_dim, empty, boxes }
    }

    /// The pass that every level computes, if it computes any in this storage type.
    fn permissive((pass, storage): (Pass, Dtype), target: Target) -> Spec {
        let facts = Facts { target, pass, storage, precision: Precision::Flash };
        Spec { facts, dim: 64, value_dim: 64, empty: false, boxes: true }
    }
}

/// The reason why the level of the options has no kernel for a pass in a storage type on such a device, whatever the
/// problem, if so.
pub(crate) fn refuses(options: &Options, call: (Pass, Dtype), target: &Target) -> Option<&'static str> {
    level_table::refuses(&LEVELS, &Spec::permissive(call, *target), options.level)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::level_table::refusals;
    use crate::shared::{declared_bytes, shared_bytes};
    use crate::variant::Variant;

    #[test]
    fn the_first_rule_that_fails_is_the_reason() {
        let of = |pass| {
            let spec = Spec { dim: 136, ..Spec::permissive((pass, Dtype::Bf16), Target::default()) };
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
}
