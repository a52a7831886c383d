//! Laws: what every tier must satisfy, written once.
//!
//! A law takes a case, changes something that must not matter (or must matter in a known way),
//! asks the tier again and compares. Four kinds, by what they presuppose:
//!
//! * [`Kind::Gate`]: the result against the exact one, within its proven bound;
//! * [`Kind::Probe`]: inputs on which the right answer is known to the last bit (`probes`);
//! * [`Kind::Meaning`]: what follows from the definition alone, whoever wrote the kernel;
//! * [`Kind::Contract`]: what etalon's own tiers promise beyond that: bitwise reproducibility.

mod determinism;
mod forms;
mod gate;
mod identities;
mod lazy_attention;
mod linear_attention;
mod linear_cross_entropy;
mod second_order;
pub(crate) mod select;
mod sensitivity;
pub(crate) mod tensors;
mod trial;
mod values;
mod visibility;
pub(crate) mod visible;

pub use trial::{Exact, Trial};

use crate::algorithms::judged;
use crate::cases::Case;
use crate::report::Verdict;
use crate::tiers::Refusal;
use etalon_problem::{Algorithm, Error, Pass};

/// Why a check did not pass.
#[derive(Debug, Clone, PartialEq)]
pub enum Flaw {
    /// The law is broken: how that shows.
    Fail(String),
    /// The tier does not offer this, and why.
    Unsupported(String),
    /// The case or the suite is at fault: it could not tell right from wrong.
    Vacuous(String),
}

/// How a check ended; a pass may carry a margin: the largest error divided by its bound.
pub type Judgement = Result<Option<f64>, Flaw>;

impl From<Refusal> for Flaw {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Unsupported(reason) => Flaw::Unsupported(reason),
            Refusal::Fault(fault) => Flaw::Fail(fault),
        }
    }
}

/// An error of the vocabulary or of the reference: the suite asked for nonsense.
impl From<Error> for Flaw {
    fn from(error: Error) -> Self {
        Flaw::Vacuous(error.to_string())
    }
}

impl Flaw {
    /// As it stands in a report.
    pub fn verdict(self) -> Verdict {
        match self {
            Flaw::Fail(text) => Verdict::Fail(text),
            Flaw::Unsupported(text) => Verdict::Unsupported(text),
            Flaw::Vacuous(text) => Verdict::Vacuous(text),
        }
    }
}

/// What a law presupposes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The result lies within its proven bound.
    Gate,
    /// The right answer is known to the last bit.
    Probe,
    /// It follows from the definition.
    Meaning,
    /// Etalon's own tiers promise it.
    Contract,
}

/// A property that every tier must satisfy.
#[derive(Debug, Clone, Copy)]
pub struct Law {
    /// Its name: in reports, in tests and on the command line.
    pub name: &'static str,
    /// What it says, in one sentence.
    pub statement: &'static str,
    /// What it presupposes.
    pub kind: Kind,
    /// The algorithms that it speaks of.
    pub of: &'static [Algorithm],
    /// The passes that it speaks of.
    pub passes: &'static [Pass],
    /// Whether it says anything about this case, of an algorithm and a pass that it speaks of.
    pub applies: fn(&Case, Pass) -> bool,
    /// Judges a tier.
    pub check: fn(&Trial<'_>) -> Judgement,
}

/// The forward pass and the gradients.
pub(crate) const FIRST_ORDER: &[Pass] = &[Pass::Forward, Pass::Backward];

/// Every pass.
pub(crate) const ANY_PASS: &[Pass] = &Pass::ALL;

/// Laws that speak of no formula.
pub(crate) const EVERY: &[Algorithm] = &Algorithm::ALL;

/// Laws of attention and attention_lse.
pub(crate) const ATTENTION: &[Algorithm] = &[Algorithm::Attention, Algorithm::AttentionLse];

/// Laws of scores: attention, attention_lse and lazy_attention.
pub(crate) const SCORES: &[Algorithm] =
    &[Algorithm::Attention, Algorithm::AttentionLse, Algorithm::LazyAttention];

/// Laws whose bounds of second order are carried along by the reference itself.
pub(crate) const SOFTMAX: &[Algorithm] =
    &[Algorithm::Attention, Algorithm::AttentionLse, Algorithm::LinearCrossEntropy];

/// Laws of linear_attention.
pub(crate) const LINEAR_ATTENTION: &[Algorithm] = &[Algorithm::LinearAttention];

/// Laws of lazy_attention.
pub(crate) const LAZY_ATTENTION: &[Algorithm] = &[Algorithm::LazyAttention];

/// Laws of linear_cross_entropy.
pub(crate) const LINEAR_CROSS_ENTROPY: &[Algorithm] = &[Algorithm::LinearCrossEntropy];

impl Law {
    /// Whether it says anything about this pass of this case: one that is judged.
    pub fn concerns(&self, case: &Case, pass: Pass) -> bool {
        self.of.contains(&case.spec.algorithm)
            && self.passes.contains(&pass)
            && judged(case.spec.algorithm).contains(&pass)
            && (self.applies)(case, pass)
    }
}

/// Every law.
pub fn all() -> Vec<Law> {
    [
        gate::LAWS,
        crate::probes::LAWS,
        determinism::LAWS,
        visibility::LAWS,
        forms::LAWS,
        values::LAWS,
        identities::LAWS,
        second_order::LAWS,
        linear_attention::LAWS,
        lazy_attention::LAWS,
        linear_cross_entropy::LAWS,
        sensitivity::LAWS,
    ]
    .concat()
}

/// The law of that name.
pub fn find(name: &str) -> Option<Law> {
    all().into_iter().find(|law| law.name == name)
}

/// Turns a difference, where there is one, into a failure.
pub(crate) fn refute(difference: Option<String>) -> Result<(), Flaw> {
    difference.map_or(Ok(()), |text| Err(Flaw::Fail(text)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_statements_are_sentences() {
        let laws = all();
        let names: BTreeSet<&str> = laws.iter().map(|law| law.name).collect();
        assert_eq!(names.len(), laws.len());
        assert!(laws.iter().all(|law| law.statement.ends_with('.')));
        assert!(laws.iter().all(|law| find(law.name).is_some()));
    }
}
