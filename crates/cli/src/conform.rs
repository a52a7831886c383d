//! The suite on a kernel that a program brings.

use crate::check::Judgement;
use crate::outcome::{Failure, Refused};
use crate::{advice, options, summary, verify};
use etalon_conformance::candidate::{Answer, Candidate};
use etalon_conformance::capabilities::{Capabilities, parse_capabilities};
use etalon_conformance::cases::{Depth, Spec};
use etalon_conformance::laws::{self, Kind};
use etalon_conformance::report::json;
use etalon_conformance::suite::{self, SuiteOptions};
use etalon_conformance::tier::{Refusal, Request};
use etalon_problem::{Algorithm, Error};
use std::path::Path;

/// A run of the suite on one kernel.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Capabilities of the kernel, as a file has them.
    pub capabilities: String,
    /// The amount of checking.
    pub depth: Depth,
    /// The seed of the inputs.
    pub seed: u64,
    /// The arithmetic that the kernel claims, as `--profile` takes it; not `auto`, which is no claim.
    pub profile: String,
    /// The cases, by name; if empty, those of the depth.
    pub cases: Vec<String>,
    /// The laws, by name; if empty, all that say something of a kernel.
    pub laws: Vec<String>,
}

/// Judges a kernel by the gate, the probes and the laws of meaning, within its capabilities, on the threads of the
/// current pool; `answer` is called from any of them. A failure comes with the simplest case that shows it. Fails
/// where nothing was checked: a run without a check is no verdict.
pub fn conform(wanted: &Wanted, answer: Answer<'_>) -> Result<Judgement, Refused> {
    let capabilities = capabilities(wanted)?;
    let candidate = candidate(wanted, &capabilities, answer)?;
    let report = suite::run(&suite_of(wanted, &capabilities, &candidate)?, &|_, _, _| {});
    if report.checks() == 0 {
        let reasons = summary::not_checked(&report).join("; ");
        return Err(Refused::Other(format!(
            "nothing was checked: no case of the suite is within the capabilities ({reasons})"
        )));
    }
    let text = format!("{}\n\n{}", summary::headline(&report), verify::text(&report));
    let json = json(&report).map_err(Failure::from)?;
    Ok(Judgement { status: report.status(), text, json })
}

/// The names of the cases of such a run.
pub fn cases(wanted: &Wanted) -> Result<Vec<String>, Refused> {
    let capabilities = capabilities(wanted)?;
    let answer = |_: &Request<'_>| Err(Refusal::Unsupported("nobody asks".to_string()));
    let candidate = candidate(wanted, &capabilities, &answer)?;
    let options = suite_of(wanted, &capabilities, &candidate)?;
    Ok(suite::cases(&options).iter().map(Spec::to_string).collect())
}

fn capabilities(wanted: &Wanted) -> Result<Capabilities, Refused> {
    let capabilities = parse_capabilities(Path::new("capabilities"), &wanted.capabilities);
    capabilities.map_err(|error| Refused::Other(error.to_string()))
}

fn candidate<'a>(
    wanted: &Wanted,
    capabilities: &'a Capabilities,
    answer: Answer<'a>,
) -> Result<Candidate<'a>, Refused> {
    let profile = match options::claim(&wanted.profile)? {
        options::Claim::Usual => None,
        options::Claim::Profile(profile) => Some(profile),
        options::Claim::Auto => {
            return Err(Error::value("profile", "a claim: usual, a name or a file", "auto").into());
        }
    };
    let name = "kernel".to_string();
    let (algorithm, slow, lost) = (wanted.algorithm, false, None);
    Ok(Candidate { name, algorithm, capabilities, profile, answer, slow, lost })
}

fn suite_of<'a>(
    wanted: &Wanted,
    capabilities: &'a Capabilities,
    candidate: &'a Candidate<'a>,
) -> Result<SuiteOptions<'a>, Refused> {
    if let Some(name) = wanted.laws.iter().find(|name| laws::find(name).is_none()) {
        let advice = advice::did_you_mean(name, laws::all().iter().map(|law| law.name));
        return Err(Refused::Other(format!("laws: {name:?} is no law{advice}")));
    }
    let cases = wanted.cases.iter().map(|name| name.parse::<Spec>());
    Ok(SuiteOptions {
        algorithms: vec![wanted.algorithm],
        depth: wanted.depth,
        seed: wanted.seed,
        kinds: vec![Kind::Gate, Kind::Probe, Kind::Meaning],
        cases: cases.collect::<Result<_, _>>()?,
        laws: wanted.laws.clone(),
        capabilities: Some(capabilities),
        ..SuiteOptions::own(vec![candidate])
    })
}
