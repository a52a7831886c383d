//! The records of a run.

pub use etalon_oracle::gates::{Status, Verdict};

use etalon_problem::{Algorithm, Dtype, Error, Pass};
use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};
use std::fmt::Display;
use std::time::Duration;

/// One check of one case on one tier.
#[derive(Debug, Clone, Serialize)]
pub struct Record {
    /// The tier's name.
    pub tier: String,
    /// The algorithm.
    #[serde(serialize_with = "in_words")]
    pub algorithm: Algorithm,
    /// The pass.
    #[serde(serialize_with = "in_words")]
    pub pass: Pass,
    /// The storage type.
    #[serde(serialize_with = "in_words")]
    pub dtype: Dtype,
    /// The law or gate, by name.
    pub check: String,
    /// The case, by a name with which `etalon explain` finds it again.
    pub case: String,
    /// Its outcome.
    #[serde(flatten, serialize_with = "with_reason")]
    pub verdict: Verdict,
    /// The largest error divided by its bound, where the check has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub margin: Option<f64>,
    /// Its duration.
    #[serde(rename = "microseconds", serialize_with = "in_microseconds")]
    pub elapsed: Duration,
}

/// A record as it is kept in a file.
#[derive(Deserialize)]
struct Kept {
    tier: String,
    algorithm: String,
    pass: String,
    dtype: String,
    check: String,
    case: String,
    verdict: String,
    #[serde(default)]
    reason: String,
    margin: Option<f64>,
    microseconds: u64,
}

impl Record {
    /// Reads a record that was written as JSON.
    pub fn from_json(value: serde_json::Value) -> Result<Record, String> {
        let kept: Kept = serde_json::from_value(value).map_err(|error| error.to_string())?;
        let Kept { tier, check, case, reason, margin, .. } = kept;
        let all = [
            Verdict::Pass,
            Verdict::Fail(reason.clone()),
            Verdict::Convention(reason.clone()),
            Verdict::Undecided(reason.clone()),
            Verdict::NotAsked(reason.clone()),
            Verdict::Unsupported(reason.clone()),
            Verdict::Vacuous(reason),
        ];
        let verdict = all.into_iter().find(|verdict| verdict.name() == kept.verdict);
        let said = |error: Error| error.to_string();
        Ok(Record {
            tier,
            algorithm: kept.algorithm.parse().map_err(said)?,
            pass: kept.pass.parse().map_err(said)?,
            dtype: kept.dtype.parse().map_err(said)?,
            check,
            case,
            verdict: verdict.ok_or_else(|| format!("no verdict {:?}", kept.verdict))?,
            margin,
            elapsed: Duration::from_micros(kept.microseconds),
        })
    }
}

/// As the text that it prints.
pub(crate) fn in_words<S: Serializer>(x: &impl Display, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(x)
}

fn in_microseconds<S: Serializer>(x: &Duration, to: S) -> Result<S::Ok, S::Error> {
    x.as_micros().serialize(to)
}

fn with_reason<S: Serializer>(x: &Verdict, to: S) -> Result<S::Ok, S::Error> {
    let mut fields = to.serialize_map(None)?;
    fields.serialize_entry("verdict", x.name())?;
    if let Some(reason) = x.reason() {
        fields.serialize_entry("reason", reason)?;
    }
    fields.end()
}

/// A tier that is not there, and why.
#[derive(Debug, Clone, Serialize)]
pub struct Absent {
    /// The tier's name.
    pub tier: String,
    /// Why it is absent.
    pub reason: String,
}

/// Place, time and settings of a run. The first four are the caller's to fill in.
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
    /// The command line of the program that was judged, if it was one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub candidate: Option<String>,
    /// Threads.
    pub threads: usize,
    /// The amount of checking: smoke, core, full or soak.
    pub depth: &'static str,
    /// The part of it, such as 2/5, if it was not all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// The profile that the tiers claim; `strict`: what each tier promises, which is f64 for f64 and f32-strict
    /// for all other types, unless the tier declares another (`cuda/sm80`, `cuda/sm90a`: the flash profiles).
    pub profile: &'static str,
    /// The seed of the inputs.
    pub seed: u64,
    /// The share of the checks that may be undecided in a run that passes.
    pub allow_undecided: f64,
}

/// The simplest case in which a failure shows.
#[derive(Debug, Clone, Serialize)]
pub struct Simplest {
    /// The failure, in the case in which the run found it.
    pub of: Record,
    /// The simplest case, by its name.
    pub case: String,
    /// The symptom there.
    pub reason: String,
}

/// A whole run.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Place, time and settings.
    pub about: About,
    /// Every check.
    pub records: Vec<Record>,
    /// Of the first failures, each of another tier, pass or law, the simplest cases, where these are
    /// others.
    pub simplest: Vec<Simplest>,
    /// Tiers that are not there.
    pub absent: Vec<Absent>,
    /// Failures that were known before the run: no longer among the records.
    pub known: Vec<Record>,
}

impl Report {
    /// The worst verdict. Undecided also where nothing was checked, and where more than the allowed share of
    /// the checks is.
    pub fn status(&self) -> Status {
        let (checks, undecided) = (self.checks(), self.undecided().count());
        let allowed = self.about.allow_undecided * checks as f64;
        if self.negative().next().is_some() {
            Status::Failed
        } else if checks == undecided || undecided as f64 > allowed {
            Status::Undecided
        } else {
            Status::Passed
        }
    }

    /// The records whose verdict is negative.
    pub fn negative(&self) -> impl Iterator<Item = &Record> {
        self.records.iter().filter(|record| record.verdict.is_negative())
    }

    /// The records whose verdict is undecided.
    pub fn undecided(&self) -> impl Iterator<Item = &Record> {
        self.records.iter().filter(|record| matches!(record.verdict, Verdict::Undecided(_)))
    }

    /// The number of checks that were made: neither what a tier does not offer, nor what it was not asked.
    pub fn checks(&self) -> usize {
        self.records.iter().filter(|record| record.verdict.is_check()).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let reason = || "so".to_string();
        for verdict in [Verdict::Pass, Verdict::Convention(reason()), Verdict::NotAsked(reason())] {
            let record = Record {
                tier: "mine".to_string(),
                algorithm: Algorithm::LazyAttention,
                pass: Pass::DoubleBackward,
                dtype: Dtype::Bf16,
                check: "bound".to_string(),
                case: "a/b".to_string(),
                margin: (verdict == Verdict::Pass).then_some(0.1),
                verdict,
                elapsed: Duration::from_micros(7),
            };
            let json = serde_json::to_value(&record).unwrap();
            let again = Record::from_json(json.clone()).unwrap();
            assert_eq!(serde_json::to_value(&again).unwrap(), json);
        }
        assert!(Record::from_json(serde_json::json!({})).is_err());
    }
}
