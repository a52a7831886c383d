//! How a check ends.

/// How one check of one case ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// It holds.
    Pass,
    /// It does not, and how that shows: first bad element, got, expected, bound.
    Fail(String),
    /// It does not, because the tier answers another question: the results are exact under a convention
    /// that is not the problem's, and which.
    Convention(String),
    /// The tier does not offer this, and why.
    Unsupported(String),
    /// The case itself is at fault: it could not have told right from wrong.
    Vacuous(String),
}

impl Verdict {
    /// Its name in reports.
    pub fn name(&self) -> &'static str {
        match self {
            Verdict::Pass => "pass",
            Verdict::Fail(_) => "fail",
            Verdict::Convention(_) => "convention",
            Verdict::Unsupported(_) => "unsupported",
            Verdict::Vacuous(_) => "vacuous",
        }
    }

    /// Why it is no pass.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Verdict::Pass => None,
            Verdict::Fail(text)
            | Verdict::Convention(text)
            | Verdict::Unsupported(text)
            | Verdict::Vacuous(text) => Some(text),
        }
    }

    /// Whether the run fails by it: neither a pass nor a declared absence.
    pub fn is_negative(&self) -> bool {
        !matches!(self, Verdict::Pass | Verdict::Unsupported(_))
    }
}
