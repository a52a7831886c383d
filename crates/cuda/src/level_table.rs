//! The tables of levels: who computes a pass, and why the others do not.

use crate::options::{Level, Precision};
use crate::target::Target;
use etalon_problem::{Dtype, Pass, Result};
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

impl LevelSpec {
    /// The pass that every level computes, if any in this storage type.
    pub fn permissive((pass, storage): (Pass, Dtype), target: Target) -> LevelSpec {
        let facts = Facts { target, pass, storage, precision: Precision::Flash };
        LevelSpec { facts, dim: 64, value_dim: 64, empty: false, boxes: true }
    }
}

impl Deref for LevelSpec {
    type Target = Facts;

    fn deref(&self) -> &Facts {
        &self.facts
    }
}

impl<S: Deref<Target = Facts>> Rule<S> {
    /// Factors of products are rounded to the storage type.
    pub const FLASH: Rule<S> = rule(Precision::FACTORS, |spec| spec.precision == Precision::Flash);
    pub const HOPPER: Rule<S> = rule("the device is not of compute capability 9.0", |spec| spec.target.is_hopper());
    pub const SIXTEEN_BITS: Rule<S> =
        rule("its tensor cores multiply bf16 and f16", |spec| matches!(spec.storage, Dtype::Bf16 | Dtype::F16));
    pub const FIRST_ORDER_SM80: Rule<S> =
        rule("the second order is not written yet for sm80", |spec| spec.is_first_order());
    pub const FIRST_ORDER_SM90A: Rule<S> =
        rule("the second order is not written yet for sm90a", |spec| spec.is_first_order());
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

/// The row that computes a pass: for [`Level::Auto`] the first that does, else that of the level asked for. Fails with
/// the reason of the last that does not.
pub(crate) fn choose<S>(table: &'static [LevelRow<S>], spec: &S, level: Level) -> Result<&'static LevelRow<S>> {
    let is_asked = |row: &&LevelRow<S>| level == Level::Auto || row.level == level.kernels();
    let mut reason = no_kernels(level);
    for row in table.iter().filter(is_asked) {
        match row.refusal(spec) {
            None => return Ok(row),
            Some(refusal) => reason = refusal,
        }
    }
    Err(level.refusal(reason))
}

/// Why the level asked for does not compute a pass; never for [`Level::Auto`].
pub(crate) fn refuses<S>(table: &'static [LevelRow<S>], spec: &S, level: Level) -> Option<&'static str> {
    let row = table.iter().find(|row| row.level == level.kernels());
    match (level, row) {
        (Level::Auto, _) => None,
        (_, Some(row)) => row.refusal(spec),
        (_, None) => Some(no_kernels(level)),
    }
}

fn no_kernels(level: Level) -> &'static str {
    match level.kernels() {
        Level::Sm80 => "not written yet for sm80",
        Level::Sm90a => "not written yet for sm90a",
        _ => "not written yet for cuda",
    }
}

pub(crate) fn reasons<S>(table: &'static [LevelRow<S>]) -> Vec<(Level, Vec<&'static str>)> {
    let of = |row: &LevelRow<S>| row.rules.iter().map(|rule| rule.otherwise).collect();
    table.iter().map(|row| (row.level, of(row))).collect()
}

pub(crate) fn refusals<S>(table: &'static [LevelRow<S>], spec: &S) -> Vec<(Level, &'static str)> {
    table.iter().filter_map(|row| Some((row.level, row.refusal(spec)?))).collect()
}
