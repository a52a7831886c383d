//! The verdict on answers.

use super::Arguments;
use super::folder::{Entry, Folders, INDEX, Index, SCHEMA, is_plain, read_given};
use crate::diagnosis::Failed;
use crate::machine::about;
use crate::options::{self, Claim};
use crate::outcome::{Failure, Outcome, say};
use crate::page::quoted;
use crate::report::{Report, Study};
use crate::table::{Table, page};
use crate::units::{counted, digits};
use etalon_conformance::cases::Spec;
use etalon_conformance::check::{Check, check};
use etalon_conformance::profile::Profile;
use etalon_conformance::questions::{Answers, Given, Probe, Question};
use etalon_conformance::report::{About, Record, Report as Run, Status, Verdict, json};
use etalon_conformance::tier::{Hints, Request};
use etalon_conformance::vectors;
use etalon_problem::{Error, Problem, shortened};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// The most characters of a name that an index lists.
const NAME: usize = 100;

/// A probe that was asked, and how it ended.
struct Judged<'a> {
    probe: &'a Probe,
    folders: &'a [String],
    verdict: Verdict,
    elapsed: Duration,
}

/// As many failures are looked at where a report is wanted.
const STUDIED: usize = 6;

pub fn judge(arguments: &Arguments, folder: &Path) -> Outcome {
    let about = about();
    let path = folder.join(INDEX);
    let drafts = arguments.reports.begin(&arguments.files(folder))?;
    let wrong = |reason: String| Failure(format!("{}: {reason}", path.display()));
    let index: Index = vectors::parse_json(&path, "list of probes", &vectors::read_text(&path)?)?;
    if index.schema != SCHEMA {
        return Err(Error::value("schema", SCHEMA.to_string(), index.schema).into());
    }
    let declared = arguments.capabilities()?;
    let capabilities = declared.as_ref().or(index.capabilities.as_ref());
    if let Some(capabilities) = capabilities {
        capabilities.check().map_err(|error| wrong(error.to_string()))?;
    }
    let given = index.problems.iter().map(|brought| read_given(folder, brought));
    let given = given.collect::<Result<Vec<_>, Failure>>()?;
    let claim = options::claim(&arguments.profile)?;
    let (mut judged, mut answered) = (Vec::new(), false);
    for Entry { probe, folders } in &index.probes {
        let start = Instant::now();
        if let Some(name) = folders.iter().find(|name| !is_plain(name)) {
            return Err(wrong(Error::value("folders", "names of folders", name).to_string()));
        }
        let files = Folders { root: folder, names: folders };
        answered |= files.any_answer();
        let profile = |dtype| claim.of(dtype).unwrap_or_else(|| Profile::flash(dtype));
        let verdict = probe.judge(profile, &given, capabilities, &files).map_err(|reason| {
            let name = folders.first().map_or("", String::as_str);
            wrong(format!("{}: {reason}", shortened(name, NAME)))
        })?;
        judged.push(Judged { probe, folders, verdict, elapsed: start.elapsed() });
    }
    if !answered {
        let reason = "no folder holds outputs.safetensors: run your kernel on each first";
        return Err(Failure(format!("{}: {reason}", folder.display())));
    }
    let unasked: Vec<&Probe> = index.not_asked.iter().map(|x| &x.probe).collect();
    say(&table(&judged, &unasked))?;
    for Judged { probe, folders, verdict, .. } in &judged {
        if let (true, Some(text)) = (*verdict != Verdict::Pass, verdict.reason()) {
            let folders = folders.join(", ");
            let (law, word) = (&probe.law, verdict.name());
            say(&page(&format!("{law} in {folders}: {word}: {text}")))?;
        }
    }
    let (status, line) = headline(&judged, unasked.len(), arguments.allow_undecided);
    let about = About { allow_undecided: arguments.allow_undecided, depth: "probes", ..about };
    let records: Vec<Record> =
        judged.iter().map(|x| x.record(&given)).collect::<Result<_, Error>>()?;
    let (run, again) = (Run { about, records, ..Run::default() }, again(arguments, folder));
    let studies = match arguments.reports.show_details() {
        true => studies(&run, &judged, (folder, claim), &again),
        false => Vec::new(),
    };
    let report = Report {
        command: "etalon probe",
        status,
        verdict: line.clone(),
        run,
        studies,
        tables: Vec::new(),
        notes: Vec::new(),
        replay: Box::new(move |_| again.clone()),
    };
    let written = drafts.finish(&report, &|| json(&report.run));
    say(&line)?;
    written.map(|()| status)
}

/// The command that judges the folder again, for a shell.
fn again(arguments: &Arguments, folder: &Path) -> String {
    let Arguments { capabilities, profile, allow_undecided, .. } = arguments;
    let mut line = format!("etalon probe --check {}", quoted(folder));
    if let Some(path) = capabilities {
        line += &format!(" --capabilities {}", quoted(path));
    }
    if profile != "usual" {
        line += &format!(" --profile {}", quoted(Path::new(profile)));
    }
    if *allow_undecided > 0.0 {
        line += &format!(" --allow-undecided {allow_undecided}");
    }
    line
}

impl Judged<'_> {
    /// The probe as a record, with its folders as the case.
    fn record(&self, given: &[Given]) -> Result<Record, Error> {
        let Judged { probe, folders, verdict, elapsed } = self;
        let (algorithm, dtype) = match given.iter().find(|given| given.name == probe.case) {
            Some(given) => (given.problem.algorithm(), given.dtype),
            None => {
                let spec: Spec = probe.case.parse()?;
                (spec.algorithm, spec.dtype)
            }
        };
        Ok(Record {
            tier: "answers".to_string(),
            algorithm,
            pass: probe.pass.parse()?,
            dtype,
            check: probe.law.clone(),
            case: folders.join(", "),
            verdict: verdict.clone(),
            margin: None,
            elapsed: *elapsed,
        })
    }
}

/// The first failures, each with the check of the first of its answers in which something is off.
fn studies(
    run: &Run,
    judged: &[Judged<'_>],
    (root, claim): (&Path, Claim),
    again: &str,
) -> Vec<Study> {
    let failed = run.records.iter().zip(judged).filter(|(record, _)| record.verdict.is_negative());
    let study = |(of, judged): (&Record, &Judged<'_>)| {
        let files = Folders { root, names: judged.folders };
        let found = (0..judged.folders.len()).find_map(|number| looked_at(&files, number, claim));
        let (case, symptom) = (of.case.as_str(), of.verdict.reason().unwrap_or_default());
        let (problem, check) = found.as_ref().map(|(problem, check)| (problem, check)).unzip();
        Failed { of, case, symptom, problem, check, replay: again.to_string() }.study()
    };
    failed.take(STUDIED).map(study).collect()
}

/// The check of an answer, if something is off in it.
fn looked_at(files: &Folders<'_>, number: usize, claim: Claim) -> Option<(Problem, Check)> {
    let Question { problem, pass, dtype, inputs } = files.question(number).ok()?;
    let outputs = files.answer(number).ok()??;
    let request =
        Request { problem: &problem, pass, dtype, inputs: &inputs, hints: Hints::default() };
    let profile = claim.of(dtype).unwrap_or_else(|| Profile::flash(dtype));
    let only: Vec<String> = outputs.keys().cloned().collect();
    let found = check(&request, &profile, &outputs, &only).ok()?;
    (!found.passed).then_some((problem, found))
}

/// The verdict in one line. What is undecided passes up to an allowed share of the probes that were asked.
fn headline(judged: &[Judged<'_>], unasked: usize, allowed: f64) -> (Status, String) {
    let count = |so: fn(&Verdict) -> bool| judged.iter().filter(|x| so(&x.verdict)).count();
    let failed = count(Verdict::is_negative);
    let held = count(|verdict| *verdict == Verdict::Pass);
    let open = count(|verdict| verdict.status() == Status::Undecided);
    let unasked = unasked + count(|verdict| !verdict.is_check());
    let few = open as f64 <= allowed * (held + open) as f64;
    let status = match (failed, held, open) {
        (1.., ..) => Status::Failed,
        (0, 1.., _) if few => Status::Passed,
        _ => Status::Undecided,
    };
    let hold = if held == 1 { "holds" } else { "hold" };
    let fail = if failed == 1 { "fails" } else { "fail" };
    let mut line = format!("{status}: {} {hold}, {failed} {fail}", counted(held, "probe"));
    let share = if status == Status::Passed {
        format!(" ({} % allowed)", digits(100.0 * allowed))
    } else {
        String::new()
    };
    let open = (open > 0).then(|| format!(", {open} undecided{share}"));
    let unasked = (unasked > 0).then(|| format!(", {unasked} not asked"));
    line.extend([open, unasked].into_iter().flatten());
    (status, line)
}

/// Probes by law and pass: how many hold, fail, are undecided, and were not asked.
fn table(judged: &[Judged<'_>], unasked: &[&Probe]) -> String {
    let mut counts: BTreeMap<(&str, &str, &str), [usize; 4]> = BTreeMap::new();
    let asked = judged.iter().map(|x| {
        let at = match x.verdict.status() {
            _ if !x.verdict.is_check() => 3,
            Status::Passed => 0,
            Status::Failed => 1,
            Status::Undecided => 2,
        };
        (x.probe, at)
    });
    for (probe, at) in asked.chain(unasked.iter().map(|probe| (*probe, 3))) {
        let subject = probe.case.split('/').next().unwrap_or_default();
        counts.entry((subject, &probe.law, &probe.pass)).or_default()[at] += 1;
    }
    let mut table = Table::new(["probe", "pass", "hold", "fail", "undecided", "not asked"]);
    for ((subject, law, pass), counts) in counts {
        table.add_title(subject);
        let cells =
            counts.map(|count| if count == 0 { "–".to_string() } else { count.to_string() });
        table.add_row([law.to_string(), pass.to_string()].into_iter().chain(cells));
    }
    table.to_string()
}
