//! A run as JUnit XML: what every CI system reads.

use super::{Record, Report, Verdict};
use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestSuite};
use std::collections::BTreeMap;

/// The report as JUnit XML: a suite for each tier, algorithm, pass and storage type, a test for
/// each check of each case.
pub fn junit(report: &Report) -> Result<String, quick_junit::SerializeError> {
    let mut suites: BTreeMap<String, TestSuite> = BTreeMap::new();
    for record in &report.records {
        let Record { tier, algorithm, pass, dtype, .. } = record;
        let name = format!("{tier} {algorithm} {pass} {dtype}");
        let suite = suites.entry(name.clone()).or_insert_with(|| TestSuite::new(name.as_str()));
        suite.add_test_case(test(record, &name));
    }
    let mut xml = quick_junit::Report::new("etalon");
    let total = report.records.iter().map(|record| record.elapsed).sum();
    xml.set_time(total);
    xml.add_test_suites(suites.into_values());
    xml.to_string()
}

fn test(record: &Record, suite: &str) -> TestCase {
    let non_success = |kind, text: &str| {
        let mut status = TestCaseStatus::non_success(kind);
        status.set_message(text);
        status
    };
    let status = match &record.verdict {
        Verdict::Pass => TestCaseStatus::success(),
        Verdict::Fail(text) => non_success(NonSuccessKind::Failure, text),
        Verdict::Convention(text) => {
            let mut status = non_success(NonSuccessKind::Failure, text);
            status.set_type("convention");
            status
        }
        // The suite is at fault, not the tier.
        Verdict::Vacuous(text) => non_success(NonSuccessKind::Error, text),
        Verdict::Unsupported(reason) => {
            let mut status = TestCaseStatus::skipped();
            status.set_message(reason.as_str());
            status
        }
    };
    let mut test = TestCase::new(format!("{} {}", record.check, record.case).trim_end(), status);
    test.set_classname(suite).set_time(record.elapsed);
    if let Some(margin) = record.margin {
        test.add_property(("margin", format!("{margin}").as_str()));
    }
    test
}
