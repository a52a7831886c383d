//! The tables of levels: who computes a pass, and why the others do not.

use crate::options::{Level, Precision};
use crate::read_as::read_as;
use crate::target::Target;
use etalon_problem::{Dtype, Pass};
use std::ops::Deref;

/// A level of an algorithm, for passes that are described as S.
pub(crate) struct LevelRow<S: 'static> {
    pub level: Level,
    pub rules: &'static [Rule<S>],
}

pub(crate) struct Rule<S> {
    pub otherwise: &'static str,
    pub holds: fn(&S) -> bool,
}

pub(crate) const fn rule<S>(otherwise: &'static str, holds: fn(&S) -> bool) -> Rule<S> {
    Rule { otherwise, holds }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Facts {
    pub target: Target,
    pub pass: Pass,
    pub storage: Dtype,
    pub precision: Precision,
}

/// A pass of linear_attention or linear_cross_entropy, for rules of levels.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LevelSpec {
    pub facts: Facts,
    pub dim: usize,
    /// Elements of a value; of linear_attention alone.
    pub value_dim: usize,
    /// True if an operand or a result has no element.
    pub empty: bool,
    /// True if the copy engine takes every operand.
    pub boxes: bool,
}

impl From<Facts> for LevelSpec {
    fn from(facts: Facts) -> Self {
        let facts = Facts { precision: Precision::Flash, ..facts };
        LevelSpec { facts, dim: 64, value_dim: 64, empty: false, boxes: true }
    }
}

read_as!(LevelSpec, facts: Facts);

impl<S: Deref<Target = Facts>> Rule<S> {
    /// Factors of products are rounded to the storage type.
    pub const FLASH: Rule<S> = rule(Precision::FACTORS, |spec| spec.precision == Precision::Flash);
    pub const HOPPER: Rule<S> = rule("the device is not of compute capability 9.0", |spec| spec.target.is_hopper());
    pub const SIXTEEN_BITS: Rule<S> =
        rule("its tensor cores multiply bf16 and f16", |spec| matches!(spec.storage, Dtype::Bf16 | Dtype::F16));
    pub const FIRST_ORDER: Rule<S> =
        rule("the second order is computed by the level portable", |spec| spec.is_first_order());
}

impl Facts {
    fn is_first_order(&self) -> bool {
        !matches!(self.pass, Pass::DoubleBackward | Pass::Jvp)
    }
}

impl<S> LevelRow<S> {
    /// The reason of the first rule that does not hold, if there is one.
    pub fn refusal(&self, spec: &S) -> Option<&'static str> {
        self.rules.iter().find(|rule| !(rule.holds)(spec)).map(|rule| rule.otherwise)
    }
}

/// The level whose row computes a pass: for [`Level::Auto`] the first that does, else the one asked for. Fails with
/// the reason of the last that does not.
pub(crate) fn choose<S>(table: &[LevelRow<S>], spec: &S, level: Level) -> Result<Level, &'static str> {
    let is_asked = |row: &&LevelRow<S>| level == Level::Auto || row.level == level.kernels();
    let mut reason = match level.kernels() {
        Level::Sm80 => "not written yet for sm80",
        Level::Sm90a => "not written yet for sm90a",
        _ => "not written yet for cuda",
    };
    for row in table.iter().filter(is_asked) {
        match row.refusal(spec) {
            None => return Ok(row.level),
            Some(refusal) => reason = refusal,
        }
    }
    Err(reason)
}

/// The table of an algorithm, whatever describes its passes.
pub(crate) trait LevelTable {
    /// The levels, each with every reason for which it may refuse.
    fn reasons(&self) -> Vec<(Level, Vec<&'static str>)>;

    /// Fails with the reason where a level does not compute a pass, whatever the problem.
    fn offers(&self, facts: Facts, level: Level) -> Result<Level, &'static str>;
}

/// S of facts is a pass that every level computes, if any in this storage type.
impl<S: From<Facts>, const N: usize> LevelTable for [LevelRow<S>; N] {
    fn reasons(&self) -> Vec<(Level, Vec<&'static str>)> {
        let of = |row: &LevelRow<S>| row.rules.iter().map(|rule| rule.otherwise).collect();
        self.iter().map(|row| (row.level, of(row))).collect()
    }

    fn offers(&self, facts: Facts, level: Level) -> Result<Level, &'static str> {
        choose(self, &facts.into(), level)
    }
}

pub(crate) fn refusals<S>(table: &'static [LevelRow<S>], spec: &S) -> Vec<(Level, &'static str)> {
    table.iter().filter_map(|row| Some((row.level, row.refusal(spec)?))).collect()
}

/// The levels of linear_attention, the fastest first.
pub(crate) static LINEAR_ATTENTION: [LevelRow<LevelSpec>; 3] = [
    LevelRow {
        level: Level::Sm90a,
        rules: &[
            Rule::FLASH,
            Rule::HOPPER,
            Rule::SIXTEEN_BITS,
            Rule::FIRST_ORDER,
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
            Rule::FIRST_ORDER,
            // A step is the same on all levels.
            rule("dim and value_dim must be at most 128 for sm80", |spec| {
                spec.pass == Pass::Step || spec.dim.max(spec.value_dim) <= 128
            }),
        ],
    },
    LevelRow { level: Level::Portable, rules: &[] },
];

/// The levels of linear_cross_entropy.
pub(crate) static LINEAR_CROSS_ENTROPY: [LevelRow<LevelSpec>; 2] = [
    LevelRow {
        level: Level::Sm90a,
        rules: &[
            Rule::FLASH,
            Rule::HOPPER,
            Rule::SIXTEEN_BITS,
            Rule::FIRST_ORDER,
            rule("dim must be a multiple of 8 for sm90a", |spec| spec.dim.is_multiple_of(8)),
            rule("h, w, dh and dw must begin at multiples of 16 bytes for sm90a", |spec| spec.boxes),
        ],
    },
    LevelRow { level: Level::Portable, rules: &[] },
];
