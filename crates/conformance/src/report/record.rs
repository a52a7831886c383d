//! The records of a run.

use etalon_problem::{Algorithm, Dtype, Pass};
use serde::Serialize;
use std::time::Duration;

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

/// One check of one case on one tier.
#[derive(Debug, Clone)]
pub struct Record {
    /// The tier's name.
    pub tier: String,
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The pass.
    pub pass: Pass,
    /// The storage type.
    pub dtype: Dtype,
    /// The law or gate, by name.
    pub check: String,
    /// The case, by a name with which `etalon explain` finds it again.
    pub case: String,
    /// How it ended.
    pub verdict: Verdict,
    /// The largest error divided by its bound, where the check has one.
    pub margin: Option<f64>,
    /// How long it took.
    pub elapsed: Duration,
}

/// A tier that is not there, and why.
#[derive(Debug, Clone, Serialize)]
pub struct Absent {
    /// The tier's name.
    pub tier: String,
    /// Why it is absent.
    pub reason: String,
}

/// Where, when and how a run was made. The first three are the caller's to fill in.
#[derive(Debug, Clone, Default, Serialize)]
pub struct About {
    /// When it began, as RFC 3339 writes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub date: Option<String>,
    /// The CPU's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// The commit from which the caller was built.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<&'static str>,
    /// Threads.
    pub threads: usize,
    /// How much was checked: core, full or soak.
    pub depth: &'static str,
    /// The profile that the tiers claim; `strict` is f64 for f64 and f32-strict for all other types.
    pub profile: &'static str,
    /// The seed of the inputs.
    pub seed: u64,
}

/// A whole run.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Where, when and how.
    pub about: About,
    /// Every check.
    pub records: Vec<Record>,
    /// Tiers that are not there.
    pub absent: Vec<Absent>,
}

impl Report {
    /// Whether every verdict is a pass or a declared absence.
    pub fn passed(&self) -> bool {
        self.negative().next().is_none()
    }

    /// The records whose verdict is negative.
    pub fn negative(&self) -> impl Iterator<Item = &Record> {
        self.records.iter().filter(|record| record.verdict.is_negative())
    }

    /// The number of checks that were made: those that a tier does not offer do not count.
    pub fn checks(&self) -> usize {
        let made = |record: &&Record| !matches!(record.verdict, Verdict::Unsupported(_));
        self.records.iter().filter(made).count()
    }
}
