//! Failures that are known before a run, from a file: they do not fail it, and one that no longer shows does.

use crate::outcome::Failure;
use etalon_conformance::report::{Record, Report, Verdict};
use etalon_conformance::vectors::read_text;
use std::path::Path;
use std::time::Duration;

/// A line of the file: what its records are like.
pub struct Known {
    line: usize,
    pass: String,
    law: String,
    case: String,
}

/// Reads a list of known failures: on each line a pass, a law and a case, in which `*` stands for any characters;
/// `#` begins a comment.
pub fn read(path: &Path) -> Result<Vec<Known>, Failure> {
    let text = read_text(path)?;
    let lines = text.lines().enumerate().map(|(at, line)| (at + 1, line.split('#').next()));
    let lines = lines.filter_map(|(line, text)| Some((line, text?.trim())));
    let known = lines.filter(|(_, text)| !text.is_empty()).map(|(line, text)| {
        let [pass, law, case] = text.split_whitespace().collect::<Vec<_>>()[..] else {
            let path = path.display();
            return Err(Failure(format!(
                "{path}: line {line} must be PASS LAW CASE, as in `backward bound attention/bf16/*`, found {text:?}"
            )));
        };
        let [pass, law, case] = [pass, law, case].map(str::to_string);
        Ok(Known { line, pass, law, case })
    });
    known.collect()
}

impl Known {
    fn names(&self, record: &Record) -> bool {
        let &Record { pass, ref check, ref case, .. } = record;
        matches(&self.pass, pass.name()) && matches(&self.law, check) && matches(&self.case, case)
    }
}

/// True if a text is as a pattern has it.
fn matches(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = text.strip_prefix(parts.next().unwrap_or_default()) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// Takes known failures from the records. A line all of whose records hold becomes a failure; one that names no record
/// is returned in words, since other cases may have been drawn.
pub fn take(report: &mut Report, known: &[Known], path: &Path) -> Vec<String> {
    let path = path.display();
    let (mut passes, mut notes) = (Vec::new(), Vec::new());
    for of in known {
        let Known { line, pass, law, case } = of;
        let named = report.records.iter().filter(|x| x.verdict.is_check() && of.names(x));
        let named: Vec<&Record> = named.collect();
        let text = format!("line {line} of {path}, {pass} {law} {case}");
        match named.first() {
            None => notes.push(format!("known: {text}: no check of this run is one")),
            Some(first) if named.iter().all(|x| x.verdict == Verdict::Pass) => {
                let count = named.len();
                passes.push(Record {
                    check: "known".to_string(),
                    case: case.clone(),
                    verdict: Verdict::Fail(format!(
                        "passes, though it is known to fail, in all {count} checks: take away {text}"
                    )),
                    margin: None,
                    elapsed: Duration::ZERO,
                    ..(*first).clone()
                });
            }
            Some(_) => {}
        }
    }
    let is_known = |x: &Record| x.verdict.is_negative() && known.iter().any(|of| of.names(x));
    let (own, others) = std::mem::take(&mut report.records).into_iter().partition(is_known);
    (report.known, report.records) = (own, others);
    report.records.extend(passes);
    report.simplest.retain(|simplest| !known.iter().any(|of| of.names(&simplest.of)));
    notes
}
