//! Candidates for an explanation: of each what it says, what it costs, and how it is evaluated. One judge
//! ([`super::judge`]) says what each leaves, and one order ranks what is left.

use super::judge::{EVIDENCE, EVIDENCE_OF_FEW, Grade, Judge, Left};
use super::{Explanation, Kind};
use crate::conventions::Reading;
use crate::zoo::Mutant;
use std::cmp::Ordering;

/// When a candidate is tried: what is plainest first, and what nobody needs once something explains all
/// last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rank {
    /// The exact results with a change.
    Pattern,
    /// Another reading of the problem, or a known bug.
    Reading,
    /// An input that was taken from elsewhere, or lies otherwise in memory.
    Input,
}

/// Share of the difference: an explanation that leaves no more is no accident, whatever else explains it.
const NEAR: f64 = 0.02;

/// So many times as much as another explanation leaves is much more.
const WORSE: f64 = 4.0;

/// Something that may explain the difference.
pub(super) struct Candidate<'a> {
    pub kind: Kind,
    pub id: String,
    pub text: String,
    pub rank: Rank,
    /// Products that it takes.
    pub cost: f64,
    /// True if every value is the exact one times a number.
    pub in_proportion: bool,
    pub how: How<'a>,
}

/// The way in which a candidate is evaluated.
pub(super) enum How<'a> {
    /// From the exact values of one output.
    Change(Change<'a>),
    /// By the reference.
    Reading(Box<Reading>),
    /// By the host of the zoo.
    Mutant(Mutant),
}

/// Other values of an output.
pub(super) struct Change<'a> {
    /// The rows in which they are distinguishable.
    pub rows: Vec<usize>,
    /// So many numbers were fitted to the results.
    pub fitted: usize,
    /// The value of an element, by its number in row-major order.
    pub at: Box<dyn Fn(usize) -> f64 + Send + Sync + 'a>,
}

impl Candidate<'_> {
    /// A pattern of an output.
    pub fn pattern<'a>(
        judge: &Judge<'_>,
        id: &str,
        text: impl Into<String>,
        change: Change<'a>,
    ) -> Candidate<'a> {
        Candidate {
            kind: Kind::Pattern,
            id: id.to_string(),
            text: format!("{}: {}", judge.output().operand.name, text.into()),
            rank: Rank::Pattern,
            cost: (change.rows.len() * judge.width()) as f64,
            in_proportion: false,
            how: How::Change(change),
        }
    }

    /// The same of the exact results times numbers.
    pub fn factors<'a>(
        judge: &Judge<'_>,
        id: &str,
        text: impl Into<String>,
        change: Change<'a>,
    ) -> Candidate<'a> {
        Candidate { in_proportion: true, ..Candidate::pattern(judge, id, text, change) }
    }

    /// Count of fitted numbers.
    fn fitted(&self) -> usize {
        if let How::Change(change) = &self.how { change.fitted } else { 0 }
    }

    /// The explanation, if what it leaves of the outputs of these names is little enough; and how well it
    /// does. Of `unseen` outputs nothing is known.
    pub fn explanation(
        &self,
        lefts: &[(&'static str, Left)],
        unseen: &[&str],
    ) -> Option<(Explanation, Place)> {
        let together = match &self.how {
            How::Change(_) => 0.0,
            _ => lefts.iter().map(|(_, left)| left.evidence()).sum(),
        };
        let needed = if self.kind == Kind::Convention { EVIDENCE_OF_FEW } else { EVIDENCE };
        let is_pattern = matches!(self.how, How::Change(_));
        let grade = |left: &Left| match left.grade(self.fitted(), together, needed) {
            // Zeros and NaN are explained by themselves.
            Grade::Most if !is_pattern && !left.explains_numbers() => Grade::No,
            grade => grade,
        };
        let grades: Vec<Grade> = lefts.iter().map(|(_, left)| grade(left)).collect();
        let graded =
            || lefts.iter().zip(&grades).map(|((name, left), grade)| (*name, left, *grade));
        let explains = |(_, left, grade): &(_, &Left, Grade)| left.off > 0 && *grade != Grade::No;
        let explained: Vec<_> = graded().filter(explains).collect();
        if explained.is_empty() {
            return None;
        }
        let missed: Vec<_> =
            graded().filter(|(_, left, grade)| left.off > 0 && *grade == Grade::No).collect();
        let right: Vec<_> =
            graded().filter(|(_, left, _)| left.off == 0 && left.spoilt > 0).collect();
        let part = part(&explained, &missed, &right);
        let mut all = Left::default();
        explained.iter().for_each(|(_, left, _)| all.add(left));
        let output = match &self.how {
            How::Change(_) => lefts.first().map(|(name, _)| *name),
            _ => None,
        };
        let place = Place {
            partial: part.is_some(),
            fitted: self.fitted() > 1,
            kind: self.kind,
            left: all.share().unwrap_or(0.0),
        };
        let not_compared = (!unseen.is_empty()).then(|| {
            let verb = if unseen.len() == 1 { "was" } else { "were" };
            format!(
                "{}, of which no part can be computed by itself, {verb} not compared",
                joined(unseen)
            )
        });
        let part = match (part, not_compared) {
            (Some(part), Some(more)) => Some(format!("{part}; {more}")),
            (part, more) => part.or(more),
        };
        let (id, text) = (self.id.clone(), self.text.clone());
        Some((Explanation { kind: self.kind, id, output, text, left: all.share(), part }, place))
    }
}

/// The part of the difference that is explained, if not all of it.
fn part(
    explained: &[(&str, &Left, Grade)],
    missed: &[(&str, &Left, Grade)],
    right: &[(&str, &Left, Grade)],
) -> Option<String> {
    let names =
        |list: &[(&str, &Left, Grade)]| joined(&list.iter().map(|x| x.0).collect::<Vec<_>>());
    let verb = |list: &[(&str, &Left, Grade)]| if list.len() == 1 { "is" } else { "are" };
    let mut parts = Vec::new();
    for (name, left, grade) in explained {
        match grade {
            Grade::Rows => parts.push(format!(
                "only the rows of {name} that are off: others that it would change are right"
            )),
            Grade::Most => parts.push(format!(
                "{} of the {} elements of {name} that are off",
                left.explained, left.off
            )),
            _ => {}
        }
    }
    if !missed.is_empty() || !right.is_empty() {
        let whole: Vec<_> = explained.iter().filter(|x| x.2 == Grade::All).copied().collect();
        if !whole.is_empty() {
            parts.insert(0, names(&whole));
        }
    }
    if !missed.is_empty() {
        parts.push(format!("not {}, which {} off by something else", names(missed), verb(missed)));
    }
    if !right.is_empty() {
        parts.push(format!("not that {} {} right", names(right), verb(right)));
    }
    (!parts.is_empty()).then(|| format!("it explains {}", parts.join("; ")))
}

/// Words with commas and "and".
pub(super) fn joined(parts: &[impl AsRef<str>]) -> String {
    let parts: Vec<&str> = parts.iter().map(AsRef::as_ref).collect();
    match parts.as_slice() {
        [] => String::new(),
        [one] => one.to_string(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}

/// By what an explanation stands before another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Place {
    /// True if it explains a part.
    pub partial: bool,
    /// True if many numbers were fitted.
    fitted: bool,
    pub kind: Kind,
    left: f64,
}

impl Place {
    /// True if many numbers were fitted to the results.
    pub fn is_fitted(&self) -> bool {
        self.fitted
    }

    /// True if it leaves much more of the difference than another explanation of all of it does: by accident, as where
    /// bounds are wide.
    pub fn is_beaten_by(&self, other: &Place) -> bool {
        !other.partial && !other.fitted && self.left > NEAR && self.left > WORSE * other.left
    }

    pub fn order(&self, other: &Place) -> Ordering {
        let key = |x: &Place| (x.partial, x.fitted, x.kind as u8);
        key(self).cmp(&key(other)).then(self.left.total_cmp(&other.left))
    }
}
