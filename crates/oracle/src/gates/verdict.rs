//! The words of a verdict: of one check, and of a whole judgement.

use std::fmt;

/// Outcome of one check of one case.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// It holds.
    Pass,
    /// It does not, and how that shows: first bad element, got, expected, bound.
    Fail(String),
    /// It does not, because the tier answers another question: the results are exact under a convention
    /// that is not the problem's, and which.
    Convention(String),
    /// Nothing shows that the results are wrong, nor that they are right: which could not be judged, and what
    /// would decide.
    Undecided(String),
    /// The tier was not asked, since the question does not concern it: why.
    NotAsked(String),
    /// The tier does not offer this, and why.
    Unsupported(String),
    /// The case itself is at fault: it could not have distinguished right from wrong.
    Vacuous(String),
}

impl Verdict {
    /// Its name in reports.
    pub fn name(&self) -> &'static str {
        match self {
            Verdict::Pass => "pass",
            Verdict::Fail(_) => "fail",
            Verdict::Convention(_) => "convention",
            Verdict::Undecided(_) => "undecided",
            Verdict::NotAsked(_) => "not asked",
            Verdict::Unsupported(_) => "unsupported",
            Verdict::Vacuous(_) => "vacuous",
        }
    }

    /// The reason why it is no pass.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Verdict::Pass => None,
            Verdict::Fail(text)
            | Verdict::Convention(text)
            | Verdict::Undecided(text)
            | Verdict::NotAsked(text)
            | Verdict::Unsupported(text)
            | Verdict::Vacuous(text) => Some(text),
        }
    }

    /// True where anything was checked: neither an absence nor a question that was not asked.
    pub fn is_check(&self) -> bool {
        !matches!(self, Verdict::Unsupported(_) | Verdict::NotAsked(_))
    }

    /// True where a run fails by it.
    pub fn is_negative(&self) -> bool {
        self.status() == Status::Failed
    }

    /// Effect on the judgement that it is a part of.
    pub fn status(&self) -> Status {
        match self {
            Verdict::Pass | Verdict::NotAsked(_) | Verdict::Unsupported(_) => Status::Passed,
            Verdict::Undecided(_) => Status::Undecided,
            Verdict::Fail(_) | Verdict::Convention(_) | Verdict::Vacuous(_) => Status::Failed,
        }
    }
}

/// Outcome of a judgement of many checks: that of the worst of them, which is the largest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    /// Everything that was judged is right.
    Passed,
    /// Nothing is wrong, but something could not be judged, or nothing was.
    Undecided,
    /// Something is wrong.
    Failed,
}

impl Status {
    /// Its name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Status::Passed => "passed",
            Status::Undecided => "undecided",
            Status::Failed => "failed",
        }
    }

    /// The exit status of a command that ends so; 2 is that of unusable arguments.
    pub fn exit_status(self) -> u8 {
        match self {
            Status::Passed => 0,
            Status::Failed => 1,
            Status::Undecided => 3,
        }
    }
}

/// The word that a command prints.
impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Status::Passed => "PASSED",
            Status::Undecided => "UNDECIDED",
            Status::Failed => "FAILED",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_comes_before_undecided_and_undecided_before_passed() {
        let text = String::new;
        let worst = |verdicts: &[Verdict]| verdicts.iter().map(Verdict::status).max();
        let (pass, open) = (Verdict::Pass, Verdict::Undecided(text()));
        assert_eq!(worst(&[pass.clone(), Verdict::NotAsked(text())]), Some(Status::Passed));
        assert_eq!(worst(&[pass.clone(), open.clone()]), Some(Status::Undecided));
        assert_eq!(worst(&[open, Verdict::Fail(text()), pass]), Some(Status::Failed));
    }
}
