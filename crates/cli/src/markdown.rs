//! A run as Markdown: for a pull request or a CI summary.

use crate::summary;
use etalon_conformance::report::Report;

/// As many negative verdicts are written out; the rest is counted.
const SHOWN: usize = 50;

/// The report as Markdown.
pub fn markdown(report: &Report) -> String {
    let verdict = if report.passed() { "passed" } else { "failed" };
    let mut text = format!("# etalon: {verdict}\n\n{}.\n\n", summary::headline(report));
    text += &format!("{}\n\n", summary::CELL);
    for (index, row) in summary::rows(report).iter().enumerate() {
        text += &line(row);
        if index == 0 {
            text += &line(&vec!["---".to_string(); row.len()]);
        }
    }
    let negative: Vec<String> = report
        .negative()
        .map(|record| {
            let reason = escape(record.verdict.reason().unwrap_or_default());
            format!("`{}` {} `{}`: {reason}", record.tier, record.check, record.case)
        })
        .collect();
    let hidden = negative.len().saturating_sub(SHOWN);
    list(&mut text, "Negative", &negative[..negative.len() - hidden]);
    if hidden > 0 {
        text += &format!("- and {hidden} more\n");
    }
    let not_checked: Vec<String> = summary::not_checked(report).iter().map(|x| escape(x)).collect();
    list(&mut text, "Not checked", &not_checked);
    let absent = report.absent.iter();
    let absent: Vec<String> =
        absent.map(|absent| format!("{}: {}", absent.tier, escape(&absent.reason))).collect();
    list(&mut text, "Absent", &absent);
    text
}

fn line(cells: &[String]) -> String {
    let cells: Vec<String> = cells.iter().map(|cell| escape(cell)).collect();
    format!("| {} |\n", cells.join(" | "))
}

fn list(text: &mut String, title: &str, items: &[String]) {
    if !items.is_empty() {
        *text += &format!("\n## {title}\n\n");
        items.iter().for_each(|item| *text += &format!("- {item}\n"));
    }
}

/// No character of a message may end a cell, a line or a list.
fn escape(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ").replace('<', "&lt;")
}
