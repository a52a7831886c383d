//! How a check ends.

use crate::report::Verdict;
use crate::tiers::Refusal;
use etalon_problem::Error;

/// Why a check did not pass.
#[derive(Debug, Clone, PartialEq)]
pub enum Flaw {
    /// The law is broken: how that shows.
    Fail(String),
    /// Neither right nor wrong can be told: of what, and what would decide.
    Undecided(String),
    /// The tier was not asked, since the question does not concern it: why.
    NotAsked(String),
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
    /// The same flaw, of which a failure says where it was found.
    pub(crate) fn of(self, what: &str) -> Self {
        match self {
            Flaw::Fail(text) => Flaw::Fail(format!("{what}: {text}")),
            other => other,
        }
    }

    /// As it stands in a report.
    pub fn verdict(self) -> Verdict {
        match self {
            Flaw::Fail(text) => Verdict::Fail(text),
            Flaw::Undecided(text) => Verdict::Undecided(text),
            Flaw::NotAsked(text) => Verdict::NotAsked(text),
            Flaw::Unsupported(text) => Verdict::Unsupported(text),
            Flaw::Vacuous(text) => Verdict::Vacuous(text),
        }
    }
}

/// Several judgements as one, with the largest margin.
pub(crate) fn worst(judgements: impl IntoIterator<Item = Judgement>) -> Judgement {
    judgements.into_iter().try_fold(None, |worst: Option<f64>, judgement| {
        Ok(match (worst, judgement?) {
            (Some(a), Some(b)) => Some(a.max(b)),
            (a, b) => a.or(b),
        })
    })
}
