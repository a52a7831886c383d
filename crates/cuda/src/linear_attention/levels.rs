//! The levels of linear_attention: who computes a pass, and why the others do not.

use crate::level_table::{LevelRow, LevelSpec, Rule, rule};
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
            rule("a step has no product of matrices", |spec| spec.pass != Pass::Step),
            rule("dim and value_dim must be at most 128 for sm90a", |spec| spec.dim.max(spec.value_dim) <= 128),
            rule("dim and value_dim must be multiples of 8 for sm90a", |spec| spec.dim % 8 + spec.value_dim % 8 == 0),
            rule("there is nothing for sm90a to compute", |spec| !spec.empty),
            rule("rows must begin and end at multiples of 16 bytes for sm90a", |spec| spec.boxes),
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
            rule("dim and value_dim must be at most 128 for sm80", |spec| {
                spec.pass == Pass::Step || spec.dim.max(spec.value_dim) <= 128
            }),
        ],
    },
    LevelRow { level: Level::Portable, rules: &[] },
];
