//! What a run leaves behind, and its forms: a table, JUnit XML, JSON, Markdown.

mod json;
mod junit;
mod markdown;
mod summary;

pub use json::json;
pub use junit::junit;
pub use markdown::markdown;
pub use summary::{Group, Key};

use etalon_problem::{Algorithm, Dtype, Pass};
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
#[derive(Debug, Clone)]
pub struct Absent {
    /// The tier's name.
    pub tier: String,
    /// Why it is absent.
    pub reason: String,
}

/// A whole run.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// The seed of the inputs.
    pub seed: u64,
    /// Every check.
    pub records: Vec<Record>,
    /// Tiers that are not there.
    pub absent: Vec<Absent>,
}

impl Report {
    /// Whether every verdict is a pass or a declared absence.
    pub fn passed(&self) -> bool {
        self.records
            .iter()
            .all(|record| matches!(record.verdict, Verdict::Pass | Verdict::Unsupported(_)))
    }
}

#[cfg(test)]
mod tests;
