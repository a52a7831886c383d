//! Findings of a run, for somebody who mends the program: the worst place, its likeliest cause, the next case to try.

use crate::diagnosis::looked_at;
use crate::units;
use etalon_conformance::candidate::Candidate;
use etalon_conformance::capabilities::Capabilities;
use etalon_conformance::cases::Spec;
use etalon_conformance::check::{Check, Element};
use etalon_conformance::report::{Record, Report};
use etalon_conformance::tier::Tier;
use etalon_problem::Problem;
use serde::Serialize;

/// The version of the form: it grows when a key changes its meaning or goes.
const SCHEMA: u32 = 1;

/// As many failures are listed.
const SHOWN: usize = 20;

/// One verdict on a program.
#[derive(Debug, Serialize)]
pub struct Finding {
    schema: u32,
    etalon: &'static str,
    status: &'static str,
    passed: bool,
    candidate: Option<String>,
    /// The name that the program gives itself.
    name: String,
    seed: u64,
    depth: &'static str,
    profile: &'static str,
    checks: usize,
    negative: usize,
    undecided: usize,
    known: usize,
    /// The failure to mend first.
    #[serde(skip_serializing_if = "Option::is_none")]
    first: Option<First>,
    /// Failures, each of another pass or law.
    failures: Vec<Failed>,
    notes: Vec<String>,
}

/// A failure in detail.
#[derive(Debug, Serialize)]
struct First {
    algorithm: String,
    pass: &'static str,
    law: String,
    /// The simplest case that shows it.
    case: String,
    problem: Problem,
    dtype: &'static str,
    symptom: String,
    /// The element that is most off, where outputs of the case are.
    #[serde(skip_serializing_if = "Option::is_none")]
    worst: Option<Worst>,
    /// Causes that have this look, the likeliest first.
    suspects: Vec<String>,
    replay: String,
}

#[derive(Debug, Serialize)]
struct Worst {
    output: &'static str,
    #[serde(flatten)]
    element: Element,
    margin: String,
    off: usize,
    elements: usize,
    places: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Failed {
    pass: &'static str,
    law: String,
    case: String,
    symptom: String,
    replay: String,
}

/// The command that asks a case by a law again.
type Replay<'a> = &'a (dyn Fn(&str, &str) -> String + Sync);

impl Finding {
    /// The verdict of a run. The program is asked once more, for the case of the first failure.
    pub fn of(
        report: &Report,
        candidates: &[Candidate<'_>],
        capabilities: &Capabilities,
        replay: Replay<'_>,
        (name, notes): (String, Vec<String>),
    ) -> Self {
        let about = &report.about;
        let status = report.status();
        Finding {
            schema: SCHEMA,
            etalon: env!("CARGO_PKG_VERSION"),
            status: status.name(),
            passed: report.status().exit_status() == 0,
            candidate: about.candidate.clone(),
            name,
            seed: about.seed,
            depth: about.depth,
            profile: about.profile,
            checks: report.checks(),
            negative: report.negative().count(),
            undecided: report.undecided().count(),
            known: report.known.len(),
            first: first(report, candidates, capabilities, replay),
            failures: failures(report, replay),
            notes,
        }
    }

    /// Notes beside the failures.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// As JSON, for programs.
    pub fn json(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string_pretty(self)
    }

    /// In lines, for people: what stands in no table.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if let Some(first) = &self.first {
            let First { pass, law, case, dtype, .. } = first;
            lines.push(format!("\nto mend first: {law} of {pass} in {dtype}, {case}"));
            if let Some(worst) = &first.worst {
                let Worst { output, element, margin, off, elements, places } = worst;
                let Element { index, got, exact, bound } = element;
                lines.push(format!(
                    "  worst: {output} at {index:?}: got {got:.6e}, exact {exact:.6e} ± {bound:.1e}, margin {margin}; \
                     {off} of {elements} are off"
                ));
                lines.extend(places.iter().map(|place| format!("  where: {place}")));
            }
            lines.extend(first.suspects.iter().map(|text| format!("  it looks like this: {text}")));
            lines.push(format!("  to see it again: {}", first.replay));
        }
        lines.extend(self.notes.iter().cloned());
        lines
    }
}

/// Failures, each of another pass or law.
fn failures(report: &Report, replay: Replay<'_>) -> Vec<Failed> {
    let mut found: Vec<Failed> = Vec::new();
    for record in report.negative() {
        let Record { pass, check, case, verdict, .. } = record;
        if found.len() < SHOWN && !found.iter().any(|x| (x.pass, &x.law) == (pass.name(), check)) {
            found.push(Failed {
                pass: pass.name(),
                law: check.clone(),
                case: case.clone(),
                symptom: verdict.reason().unwrap_or_default().to_string(),
                replay: replay(case, check),
            });
        }
    }
    found
}

/// The first failure of the gate, else of a law: in the simplest case that shows it.
fn first(
    report: &Report,
    candidates: &[Candidate<'_>],
    capabilities: &Capabilities,
    replay: Replay<'_>,
) -> Option<First> {
    let has_case = |record: &&Record| record.case.parse::<Spec>().is_ok();
    let own = || report.negative().filter(has_case);
    let record = own().find(|record| record.check == "bound").or_else(|| own().next())?;
    let same = |of: &Record| (of.pass, &of.check) == (record.pass, &record.check);
    let simplest = report.simplest.iter().find(|simplest| same(&simplest.of));
    let (case, symptom) = match simplest {
        Some(simplest) => (simplest.case.clone(), simplest.reason.clone()),
        None => (record.case.clone(), record.verdict.reason().unwrap_or_default().to_string()),
    };
    let spec: Spec = case.parse().ok()?;
    let problem = spec.build_for(capabilities).problem;
    let (pass, law) = (record.pass, record.check.clone());
    let found = candidates.iter().find(|candidate| candidate.algorithm == spec.algorithm).and_then(
        |candidate| {
            let case = spec.build_for(capabilities);
            looked_at(candidate, &case, pass, &candidate.profile(case.dtype))
        },
    );
    let suspects = found.iter().flat_map(|check| &check.explanations);
    let suspects = suspects.map(|explanation| explanation.text.clone()).collect();
    Some(First {
        algorithm: spec.algorithm.to_string(),
        pass: pass.name(),
        dtype: spec.dtype.name(),
        worst: found.as_ref().and_then(worst),
        suspects,
        replay: replay(&case, &law),
        law,
        case,
        problem,
        symptom,
    })
}

/// The output whose element is most off.
fn worst(check: &Check) -> Option<Worst> {
    let off = check.outputs.iter().filter(|output| output.off > 0);
    let output = off.max_by(|x, y| x.margin.total_cmp(&y.margin))?;
    Some(Worst {
        output: output.name,
        element: output.worst.clone()?,
        margin: units::margin(output.margin),
        off: output.off,
        elements: output.elements,
        places: output.places.clone(),
    })
}
