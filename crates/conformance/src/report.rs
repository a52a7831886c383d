//! Results of a run: its records, and JSON for programs.

mod record;

pub(crate) use record::in_words;
pub use record::{About, Absent, Record, Report, Simplest, Status, Verdict};

use serde::Serialize;

/// The version of the form: it grows when a key changes its meaning or goes.
const SCHEMA: u32 = 1;

#[derive(Serialize)]
struct File<'a> {
    schema: u32,
    etalon: &'static str,
    #[serde(flatten)]
    about: &'a About,
    status: &'static str,
    passed: bool,
    checks: usize,
    negative: usize,
    undecided: usize,
    records: &'a [Record],
    simplest: &'a [Simplest],
    absent: &'a [Absent],
    #[serde(skip_serializing_if = "<[Record]>::is_empty")]
    known: &'a [Record],
}

/// A run as JSON: everything, for programs. `docs/guide.md` lists the keys.
pub fn json(report: &Report) -> Result<String, serde_json::Error> {
    serde_json::to_string_pretty(&File {
        schema: SCHEMA,
        etalon: env!("CARGO_PKG_VERSION"),
        about: &report.about,
        status: report.status().name(),
        passed: report.status() == Status::Passed,
        checks: report.checks(),
        negative: report.negative().count(),
        undecided: report.undecided().count(),
        records: &report.records,
        simplest: &report.simplest,
        absent: &report.absent,
        known: &report.known,
    })
}
