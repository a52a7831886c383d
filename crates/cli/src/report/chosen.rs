//! Failures of a run that a report shows in detail.

use etalon_conformance::report::{Record, Report, Verdict};
use etalon_problem::{Algorithm, Pass};

/// As many failures of a run are looked at.
const STUDIED: usize = 6;

/// The failures of a run to look at, each with the simplest case of it that is known, and the symptom there: each of
/// another tier, algorithm, pass or law, and of another case; failures of the gate first, whose outputs have pictures.
pub fn chosen(run: &Report) -> Vec<(&Record, &str, &str)> {
    let gate = |record: &&Record| record.check == "bound";
    let failed = || run.negative().filter(|x| !matches!(x.verdict, Verdict::Vacuous(_)));
    let mut found: Vec<(&Record, &str, &str)> = Vec::new();
    for record in failed().filter(gate).chain(failed().filter(|x| !gate(x))) {
        let (case, symptom) = match run.simplest.iter().find(|x| kind(&x.of) == kind(record)) {
            Some(simplest) => (simplest.case.as_str(), simplest.reason.as_str()),
            None => (record.case.as_str(), record.verdict.reason().unwrap_or_default()),
        };
        let place = (&record.tier, record.pass, case);
        let is_known = found.iter().any(|(of, other, _)| {
            kind(of) == kind(record) || !case.is_empty() && (&of.tier, of.pass, *other) == place
        });
        if !is_known {
            found.push((record, case, symptom));
        }
        if found.len() == STUDIED {
            break;
        }
    }
    found
}

fn kind(of: &Record) -> (&str, Algorithm, Pass, &str) {
    (&of.tier, of.algorithm, of.pass, &of.check)
}
