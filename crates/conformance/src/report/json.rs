//! A run as JSON: everything, for programs. `docs/guide.md` lists the keys.

use super::record::{About, Absent, Record, Report};
use serde::Serialize;

/// The version of the form: it grows when a key changes its meaning or goes.
const SCHEMA: u32 = 1;

#[derive(Serialize)]
struct File<'a> {
    schema: u32,
    etalon: &'static str,
    #[serde(flatten)]
    about: &'a About,
    passed: bool,
    checks: usize,
    negative: usize,
    records: Vec<Entry<'a>>,
    absent: &'a [Absent],
}

#[derive(Serialize)]
struct Entry<'a> {
    tier: &'a str,
    algorithm: &'static str,
    pass: &'static str,
    dtype: &'static str,
    check: &'a str,
    case: &'a str,
    verdict: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
    /// Absent where the check has none; null where it is infinite.
    #[serde(skip_serializing_if = "Option::is_none")]
    margin: Option<f64>,
    microseconds: u128,
}

impl<'a> Entry<'a> {
    fn new(record: &'a Record) -> Self {
        Entry {
            tier: &record.tier,
            algorithm: record.algorithm.name(),
            pass: record.pass.name(),
            dtype: record.dtype.name(),
            check: &record.check,
            case: &record.case,
            verdict: record.verdict.name(),
            reason: record.verdict.reason(),
            margin: record.margin,
            microseconds: record.elapsed.as_micros(),
        }
    }
}

/// The report as JSON.
pub fn json(report: &Report) -> Result<String, serde_json::Error> {
    serde_json::to_string_pretty(&File {
        schema: SCHEMA,
        etalon: env!("CARGO_PKG_VERSION"),
        about: &report.about,
        passed: report.passed(),
        checks: report.checks(),
        negative: report.negative().count(),
        records: report.records.iter().map(Entry::new).collect(),
        absent: &report.absent,
    })
}
