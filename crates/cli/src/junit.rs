//! A run as JUnit XML: what every CI system reads.

use crate::report::Report;
use crate::units::{self, counted};
use etalon_conformance::report::{Record, Status, Verdict};
use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestSuite};
use std::collections::BTreeMap;

/// The report as JUnit XML: a suite for each tier and algorithm, a test for each pass and law, which
/// stands for all of its cases.
pub fn junit(report: &Report<'_>) -> Result<String, quick_junit::SerializeError> {
    let mut suites: BTreeMap<String, BTreeMap<(_, &str), Vec<&Record>>> = BTreeMap::new();
    let records = &report.run.records;
    for record in records {
        let suite = suites.entry(format!("{} {}", record.tier, record.algorithm)).or_default();
        suite.entry((record.pass, &record.check)).or_default().push(record);
    }
    let mut xml = quick_junit::Report::new("etalon");
    xml.set_time(records.iter().map(|record| record.elapsed).sum());
    for (name, tests) in suites {
        let mut suite = TestSuite::new(name.as_str());
        for ((pass, check), records) in tests {
            let mut test = TestCase::new(format!("{pass} {check}"), status(report, &records));
            test.set_classname(name.as_str());
            test.set_time(records.iter().map(|record| record.elapsed).sum());
            test.add_property(("cases", records.len().to_string().as_str()));
            let margins = records.iter().filter_map(|record| record.margin);
            if let Some(worst) = margins.max_by(f64::total_cmp) {
                test.add_property(("margin", units::margin(worst).as_str()));
            }
            suite.add_test_case(test);
        }
        xml.add_test_suite(suite);
    }
    xml.to_string()
}

/// Status of the cases of a law: a failure where one is; else an error where a case is undecided, or at fault, which
/// is the suite's; else a skip where nothing was checked. Its text names the cases, and the
/// command that asks the first again.
fn status(report: &Report<'_>, records: &[&Record]) -> TestCaseStatus {
    let reason = |record: &Record| record.verdict.reason().unwrap_or_default().to_string();
    let is_error =
        |record: &&&Record| matches!(record.verdict, Verdict::Vacuous(_) | Verdict::Undecided(_));
    let convention = |record: &&&Record| matches!(record.verdict, Verdict::Convention(_));
    let unsound = |record: &&&Record| record.verdict.status() != Status::Passed;
    let unsound: Vec<&&Record> = records.iter().filter(unsound).collect();
    let Some(first) = unsound.iter().find(|x| !is_error(x)).or(unsound.first()) else {
        if records.iter().any(|record| record.verdict == Verdict::Pass) {
            return TestCaseStatus::success();
        }
        let mut status = TestCaseStatus::skipped();
        status.set_message(records.first().map(|record| reason(record)).unwrap_or_default());
        return status;
    };
    let kind = match unsound.iter().all(is_error) {
        true => NonSuccessKind::Error,
        false => NonSuccessKind::Failure,
    };
    let mut status = TestCaseStatus::non_success(kind);
    let count = format!("{} of {}", unsound.len(), counted(records.len(), "case"));
    let case = if first.case.is_empty() { "" } else { &format!(" {}", first.case) };
    status.set_message(format!("{count}, the first{case}: {}", reason(first)));
    if unsound.iter().all(convention) {
        status.set_type("convention");
    }
    let lines = unsound
        .iter()
        .map(|record| format!("{} {}: {}", record.verdict.name(), record.case, reason(record)));
    let again = format!("To see the first again: {}", (report.replay)(first));
    status.set_description(lines.chain([again]).collect::<Vec<_>>().join("\n"));
    status
}
