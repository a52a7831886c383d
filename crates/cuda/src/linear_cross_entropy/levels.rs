//! The levels of linear_cross_entropy.

use crate::level_table::{LevelRow, LevelSpec, Rule, rule};
use crate::options::Level;

/// Fastest first.
pub(crate) static LEVELS: [LevelRow<LevelSpec>; 2] = [
    LevelRow {
        level: Level::Sm90a,
        rules: &[
            Rule::FLASH,
            Rule::HOPPER,
            Rule::SIXTEEN_BITS,
            Rule::FIRST_ORDER_SM90A,
            rule("dim must be a multiple of 8 for sm90a", |spec| spec.dim.is_multiple_of(8)),
            rule("h, w, dh and dw must begin at multiples of 16 bytes for sm90a", |spec| spec.boxes),
        ],
    },
    LevelRow { level: Level::Portable, rules: &[] },
];
