//! Outcomes of a check.

use crate::report::{Status, Verdict};
use crate::tier::Refusal;
use etalon_problem::Error;

/// Why a check did not pass.
#[derive(Debug, Clone, PartialEq)]
pub enum Flaw {
    /// The law is broken: how that shows.
    Fail(String),
    /// Undecided between right and wrong: the elements, and what would decide.
    Undecided(String),
    /// The tier was not asked, since the question does not concern it: why.
    NotAsked(String),
    /// The tier does not offer this, and why.
    Unsupported(String),
    /// The case or the suite is at fault: it could not distinguish right from wrong.
    Vacuous(String),
}

/// The outcome of a check; a pass may carry a margin: the largest error divided by its bound.
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

/// Several judgements as one, with the largest margin; of flaws the gravest, the first of equals.
pub(crate) fn worst(judgements: impl IntoIterator<Item = Judgement>) -> Judgement {
    worst_of(&mut judgements.into_iter())
}

fn worst_of(judgements: &mut dyn Iterator<Item = Judgement>) -> Judgement {
    let (mut margin, mut worst) = (None::<f64>, None::<Flaw>);
    let gravity = |flaw: &Flaw| flaw.clone().verdict().status();
    for judgement in judgements {
        match judgement {
            Ok(Some(next)) => margin = Some(margin.map_or(next, |most| most.max(next))),
            Ok(None) => {}
            Err(flaw) if gravity(&flaw) == Status::Failed => return Err(flaw),
            Err(flaw) => match &worst {
                Some(known) if gravity(known) >= gravity(&flaw) => {}
                _ => worst = Some(flaw),
            },
        }
    }
    worst.map_or(Ok(margin), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_stands_before_what_has_no_answer() {
        let text = String::new;
        let silent = || Err(Flaw::Unsupported(text()));
        assert_eq!(worst([Ok(Some(1.0)), Ok(None), Ok(Some(0.5))]), Ok(Some(1.0)));
        assert_eq!(worst([silent(), Err(Flaw::Fail(text()))]), Err(Flaw::Fail(text())));
        let open = Err(Flaw::Undecided(text()));
        assert_eq!(worst([Ok(None), silent(), open.clone(), silent()]), open);
    }
}
