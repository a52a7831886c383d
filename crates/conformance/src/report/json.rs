//! A run as JSON: everything, for programs.

use super::{Report, Verdict};
use serde::Serialize;

#[derive(Serialize)]
struct File<'a> {
    etalon: &'static str,
    seed: u64,
    passed: bool,
    records: Vec<Entry<'a>>,
    absent: Vec<Missing<'a>>,
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

#[derive(Serialize)]
struct Missing<'a> {
    tier: &'a str,
    reason: &'a str,
}

/// The report as JSON.
pub fn json(report: &Report) -> Result<String, serde_json::Error> {
    let records = report.records.iter().map(|record| {
        let (verdict, reason) = match &record.verdict {
            Verdict::Pass => ("pass", None),
            Verdict::Fail(text) => ("fail", Some(text.as_str())),
            Verdict::Convention(text) => ("convention", Some(text.as_str())),
            Verdict::Unsupported(text) => ("unsupported", Some(text.as_str())),
            Verdict::Vacuous(text) => ("vacuous", Some(text.as_str())),
        };
        Entry {
            tier: &record.tier,
            algorithm: record.algorithm.name(),
            pass: record.pass.name(),
            dtype: record.dtype.name(),
            check: &record.check,
            case: &record.case,
            verdict,
            reason,
            margin: record.margin,
            microseconds: record.elapsed.as_micros(),
        }
    });
    let absent =
        report.absent.iter().map(|absent| Missing { tier: &absent.tier, reason: &absent.reason });
    serde_json::to_string_pretty(&File {
        etalon: env!("CARGO_PKG_VERSION"),
        seed: report.seed,
        passed: report.passed(),
        records: records.collect(),
        absent: absent.collect(),
    })
}
