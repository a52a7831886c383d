//! A run as Markdown: for a pull request or a CI summary.

use crate::summary;
use etalon_conformance::report::{Record, Report};

/// As many negative verdicts are written out; the rest is counted.
const SHOWN: usize = 50;

/// The report as Markdown.
pub fn markdown(report: &Report) -> String {
    let verdict = report.status().name();
    let mut text = format!("# etalon: {verdict}\n\n{}.\n\n", summary::headline(report));
    text += &format!("{}\n\n", summary::CELL);
    for (index, row) in summary::rows(report).iter().enumerate() {
        text += &line(row);
        if index == 0 {
            text += &line(&vec!["---".to_string(); row.len()]);
        }
    }
    list(&mut text, "Negative", report.negative().take(SHOWN).map(line_of));
    let hidden = report.negative().skip(SHOWN).count();
    if hidden > 0 {
        text += &format!("- and {hidden} more\n");
    }
    list(&mut text, "Undecided", report.undecided().take(SHOWN).map(line_of));
    let hidden = report.undecided().skip(SHOWN).count();
    if hidden > 0 {
        text += &format!("- and {hidden} more\n");
    }
    list(&mut text, "Not checked", summary::not_checked(report).iter().map(|line| escape(line)));
    let absent = summary::absent(&report.absent).into_iter();
    let absent = absent.map(|(tiers, reason)| format!("{tiers}: {}", escape(reason)));
    list(&mut text, "Absent", absent);
    text
}

/// A record with its reason.
fn line_of(record: &Record) -> String {
    let reason = escape(record.verdict.reason().unwrap_or_default());
    format!("`{}` {} `{}`: {reason}", record.tier, record.check, record.case)
}

pub(crate) fn line(cells: &[String]) -> String {
    let cells: Vec<String> = cells.iter().map(|cell| escape(cell)).collect();
    format!("| {} |\n", cells.join(" | "))
}

/// Adds a section, unless it has no items.
fn list(text: &mut String, title: &str, items: impl Iterator<Item = String>) {
    let items: String = items.map(|item| format!("- {item}\n")).collect();
    if !items.is_empty() {
        *text += &format!("\n## {title}\n\n{items}");
    }
}

/// No character of a message may end a cell, a line or a list.
pub(crate) fn escape(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ").replace('<', "&lt;")
}
