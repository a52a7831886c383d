//! The levels of linear_attention: who computes a pass, and why the others do not.

use crate::level_table::{LevelRow, LevelSpec, Rule};
use crate::options::Level;
use etalon_problem::Pass;

pub(crate) static LEVELS: [LevelRow<LevelSpec>; 3] = [
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

#[cfg(test)]
#[path = "../../tests/units/linear_attention/levels.rs"]
mod tests;
