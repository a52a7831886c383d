//! A run as JSON: everything, for programs.
//!
//! ```json
//! {
//!   "schema": 1,                        // of this file; it grows when a key changes its meaning or goes
//!   "etalon": "0.1.0",                  // the version of etalon
//!   "commit": "3a59db0…",               // the commit from which it was built; absent if not known
//!   "date": "2026-08-21T09:41:04Z",     // when the run began, in UTC
//!   "cpu": "…",                         // absent if not known
//!   "threads": 2,
//!   "depth": "core",                    // core, full, soak
//!   "profile": "strict",                // or the name of the profile that was claimed
//!   "seed": 0,
//!   "passed": true,                     // no verdict is negative
//!   "checks": 1,                        // records whose verdict is not unsupported
//!   "negative": 0,                      // records that fail, convention and vacuous among them
//!   "records": [{
//!     "tier": "simd/avx2", "algorithm": "attention", "pass": "forward", "dtype": "bf16",
//!     "check": "bound",                 // the law; "offer" where the tier lacks a whole pass
//!     "case": "attention/bf16/…",       // as `etalon explain` takes it; empty for "offer"
//!     "verdict": "pass",                // pass, fail, convention, unsupported, vacuous
//!     "reason": "…",                    // absent for a pass
//!     "margin": 0.25,                   // the largest error ÷ bound; absent where the law has none, null
//!                                       // where it is infinite
//!     "microseconds": 1500
//!   }],
//!   "absent": [{ "tier": "cuda", "reason": "…" }]
//! }
//! ```

use super::record::{Record, Report};
use super::summary::Counts;
use serde::Serialize;
use std::time::{SystemTime, UNIX_EPOCH};

/// The version of the form above.
const SCHEMA: u32 = 1;

#[derive(Serialize)]
struct File<'a> {
    schema: u32,
    etalon: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    commit: Option<&'a str>,
    date: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu: Option<&'a str>,
    threads: usize,
    depth: &'static str,
    profile: &'static str,
    seed: u64,
    passed: bool,
    checks: usize,
    negative: usize,
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

#[derive(Serialize)]
struct Missing<'a> {
    tier: &'a str,
    reason: &'a str,
}

/// The report as JSON.
pub fn json(report: &Report) -> Result<String, serde_json::Error> {
    let Report { about, records, absent } = report;
    let Counts { checks, negative, .. } = report.counts();
    let absent = absent.iter().map(|absent| Missing { tier: &absent.tier, reason: &absent.reason });
    serde_json::to_string_pretty(&File {
        schema: SCHEMA,
        etalon: env!("CARGO_PKG_VERSION"),
        commit: about.commit.as_deref(),
        date: utc(about.date),
        cpu: about.cpu.as_deref(),
        threads: about.threads,
        depth: about.depth,
        profile: about.profile,
        seed: about.seed,
        passed: negative == 0,
        checks,
        negative,
        records: records.iter().map(Entry::new).collect(),
        absent: absent.collect(),
    })
}

/// A time as RFC 3339 writes it, in whole seconds of UTC; before 1970, 1970.
pub(super) fn utc(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Years that begin in March end with the leap day; 400 of them have 146,097 days, and day 0 of
    // year 0 is 719,468 days before 1970.
    let day = days + 719_468;
    let (era, day) = (day / 146_097, day % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153; // since March: 153 days in each five months
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = match month {
        0..10 => (400 * era + year, month + 3),
        _ => (400 * era + year + 1, month - 9),
    };
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}
