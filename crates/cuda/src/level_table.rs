//! The tables of levels: who computes a pass, and why the others do not.

use crate::options::Level;
use etalon_problem::Error;

/// A level of an algorithm, for passes that are described as S.
pub(crate) struct LevelRow<S: 'static> {
    /// The level.
    pub level: Level,
    /// Conditions for its kernels to compute a pass.
    pub rules: &'static [Rule<S>],
}

/// A condition of a level, and the reason of its refusal where the condition does not hold.
pub(crate) struct Rule<S> {
    /// The reason.
    pub otherwise: &'static str,
    /// The condition.
    pub holds: fn(&S) -> bool,
}

impl<S> LevelRow<S> {
    /// Why the level does not compute a pass, if so: the first rule that does not hold.
    pub fn refusal(&self, spec: &S) -> Option<&'static str> {
        self.rules.iter().find(|rule| !(rule.holds)(spec)).map(|rule| rule.otherwise)
    }
}

/// The row that computes a pass: the first of the table that does for [`Level::Auto`], or that of the level asked for.
/// Fails with its reason where that one does not.
pub(crate) fn choose<S>(
    table: &'static [LevelRow<S>],
    spec: &S,
    level: Level,
) -> Result<&'static LevelRow<S>, Error> {
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

/// Why the level asked for does not compute a pass, if so.
pub(crate) fn refuses<S>(
    table: &'static [LevelRow<S>],
    spec: &S,
    level: Level,
) -> Option<&'static str> {
    let row = table.iter().find(|row| row.level == level.kernels());
    match (level, row) {
        (Level::Auto, _) => None,
        (_, Some(row)) => row.refusal(spec),
        (_, None) => Some(no_kernels(level)),
    }
}

/// The refusal of a level that is not in the table of an algorithm.
fn no_kernels(level: Level) -> &'static str {
    match level.kernels() {
        Level::Sm80 => "not written yet for sm80",
        Level::Sm90a => "not written yet for sm90a",
        _ => "not written yet for cuda",
    }
}

/// Every reason of each level, in the order of the table.
pub(crate) fn reasons<S>(table: &'static [LevelRow<S>]) -> Vec<(Level, Vec<&'static str>)> {
    let of = |row: &LevelRow<S>| row.rules.iter().map(|rule| rule.otherwise).collect();
    table.iter().map(|row| (row.level, of(row))).collect()
}

/// The levels that do not compute a pass, with their reasons, in the order of the table.
pub(crate) fn refusals<S>(table: &'static [LevelRow<S>], spec: &S) -> Vec<(Level, &'static str)> {
    table.iter().filter_map(|row| Some((row.level, row.refusal(spec)?))).collect()
}
