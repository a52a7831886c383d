//! A verdict as JSON that shields.io makes a badge of.

use crate::report::Report;
use crate::units::{counted, margin};
use etalon_conformance::report::Status;

/// The version, and what passed: the profile with the worst margin, or how many checks did not.
pub fn badge(report: &Report<'_>) -> Result<String, serde_json::Error> {
    let run = &report.run;
    let worst = run.records.iter().filter_map(|record| record.margin).max_by(f64::total_cmp);
    let of = |count: usize| match run.checks() {
        0 => report.status.name().to_string(),
        all => format!("{}: {count} of {}", report.status, counted(all, "check")).to_lowercase(),
    };
    let (message, color) = match report.status {
        Status::Failed => (of(run.negative().count()), "red"),
        Status::Undecided => (of(run.undecided().count()), "yellow"),
        Status::Passed => match worst {
            Some(worst) => {
                (format!("{}, worst margin {}", run.about.profile, margin(worst)), "brightgreen")
            }
            None => ("passed".to_string(), "brightgreen"),
        },
    };
    serde_json::to_string_pretty(&serde_json::json!({
        "schemaVersion": 1,
        "label": concat!("etalon ", env!("CARGO_PKG_VERSION")),
        "message": message,
        "color": color,
    }))
}
