//! Failures as annotations of GitHub's actions, merged by their cause: a step shows ten of each kind.

use crate::report::{Report, causes};
use crate::units::{counted, plural};
use etalon_conformance::report::{Record, Status};
use etalon_problem::shortened;

/// As many causes of a kind have a line of their own; a last one counts the others.
const SHOWN: usize = 9;

/// The most characters of a title, and of a line of a message.
const TITLE: usize = 300;
const MESSAGE: usize = 1500;

/// Lines that a runner reads from the output of a step: an error for each cause of failures, a warning for each cause
/// of undecided checks, and a notice where all is well.
pub fn annotations(report: &Report<'_>) -> String {
    let run = &report.run;
    let mut lines = of_kind(report, "error", run.negative());
    lines += &of_kind(report, "warning", run.undecided());
    if lines.is_empty() || report.run.records.is_empty() {
        let kind = match report.status {
            Status::Passed => "notice",
            Status::Undecided => "warning",
            Status::Failed => "error",
        };
        lines += &line(kind, report.command, std::slice::from_ref(&report.verdict));
    }
    lines
}

fn of_kind<'a>(
    report: &Report<'_>,
    kind: &str,
    records: impl Iterator<Item = &'a Record>,
) -> String {
    let causes = causes(records);
    let mut lines: String = String::new();
    for cause in causes.iter().take(SHOWN) {
        let Some(first) = cause.records.first() else { continue };
        let again = (report.replay)(first);
        let case = if first.case.is_empty() { "" } else { &format!("{}: ", first.case) };
        let message = [format!("{case}{}", cause.symptom()), format!("To see it again: {again}")];
        lines += &line(kind, &format!("{}: {}", report.command, cause.title()), &message);
    }
    let hidden = causes.get(SHOWN..).unwrap_or_default();
    if !hidden.is_empty() {
        let records: usize = hidden.iter().map(|cause| cause.records.len()).sum();
        let (word, causes) = (plural(records, "record"), counted(hidden.len(), "cause"));
        let text = format!("and {records} more {word} of {causes}; the reports have them");
        lines += &line(kind, report.command, &[text]);
    }
    lines
}

/// A command of a workflow. A runner reads it up to the end of the line.
fn line(kind: &str, title: &str, message: &[String]) -> String {
    let title = escape(&shortened(title, TITLE)).replace(':', "%3A").replace(',', "%2C");
    let message: Vec<_> = message.iter().map(|text| escape(&shortened(text, MESSAGE))).collect();
    format!("::{kind} title={title}::{}\n", message.join("%0A"))
}

/// A text without what ends a part of a command. What does not print is escaped before.
fn escape(text: &str) -> String {
    text.replace('%', "%25")
}
