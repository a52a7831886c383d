//! `etalon check DIR OUTPUTS`: a verdict on a folder of outputs, against test vectors.

use crate::diagnosis::{Failed, explanation};
use crate::form::Reports;
use crate::machine::about;
use crate::options::{self, Claim};
use crate::outcome::{Failure, Outcome, say};
use crate::output::of_profile;
use crate::page::quoted;
use crate::progress::Progress;
use crate::report::{Report, Study};
use crate::units::{counted, digits};
use crate::{memory, verify};
use etalon_conformance::bounds::{Bounds, bounds};
use etalon_conformance::check::{Check, check};
use etalon_conformance::gates::{g1, g2, generic};
use etalon_conformance::profile::Profile;
use etalon_conformance::questions::{Answers, Probe, Question};
use etalon_conformance::report::{About, Record, Report as Run, Status, Verdict, json};
use etalon_conformance::tensor::{Stored, Tensor, Tensors};
use etalon_conformance::tier::{Hints, Request};
use etalon_conformance::tiers::check_results;
use etalon_conformance::types::Types;
use etalon_conformance::typical::{Kernels, Typical};
use etalon_conformance::vector_set::{Entry, Id, Loaded, Set, Validity};
use etalon_conformance::vectors as files;
use etalon_problem::{Algorithm, Dtype, Error, Operand, Pass, Problem, Role, shortened};
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The name by which the command line is parsed: two folders stand where `etalon check` has an algorithm and a pass.
pub const COMMAND: &str = "check-vectors";

/// The files that name what an algorithm and a pass are about.
const OF_ONE_PASS: [&str; 3] = ["--problem", "--in", "--got"];

const FILES: &str = "\
OUTPUTS holds ID.safetensors for each vector of DIR, with the outputs under the names of the formulas; and for an \
invalid one ID.refused, a file with what your implementation said of it. A vector without either is undecided.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "etalon check [OPTIONS] DIR OUTPUTS", after_help = FILES)]
pub struct Arguments {
    /// The folder of test vectors, which `etalon export` has written.
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// The folder of outputs.
    #[arg(value_name = "OUTPUTS")]
    outputs: PathBuf,
    /// The arithmetic of the kernel: a profile of `etalon list` or declared in a file; usual: the one that goes with
    /// the type of q, or h. If absent, the bounds of the vectors judge.
    #[arg(long, value_name = "NAME|FILE.json")]
    profile: Option<String>,
    /// Judges what OUTPUTS holds: vectors without outputs, and outputs of a vector that are absent, are not checked.
    #[arg(long)]
    allow_missing: bool,
    /// Passes though this share of the checks, from 0 to 1, is undecided.
    #[arg(long, value_name = "SHARE", default_value = "0", value_parser = options::share)]
    allow_undecided: f64,
    #[command(flatten)]
    reports: Reports,
    #[command(flatten)]
    threads: options::Threads,
}

/// A command line in which two folders after `check` have the name of their own command.
pub fn named(mut arguments: Vec<OsString>) -> Vec<OsString> {
    let is_check = arguments.get(1).is_some_and(|word| word == "check");
    let mut words = arguments.iter().skip(2).map(|word| word.to_string_lossy());
    let of_one_pass =
        |word: &str| OF_ONE_PASS.iter().any(|name| word.split('=').next() == Some(name));
    if !is_check || words.clone().any(|word| of_one_pass(&word)) {
        return arguments;
    }
    let mut plain = words.by_ref().filter(|word| !word.starts_with('-'));
    let (first, second) = (plain.next(), plain.next());
    let is_folder = |word: &str| word.parse::<Algorithm>().is_err() && Path::new(word).is_dir();
    let is_pass = |word: &str| word.parse::<Pass>().is_ok();
    let folders = match (&first, &second) {
        (Some(first), Some(second)) => {
            is_folder(first) || first.parse::<Algorithm>().is_err() && !is_pass(second)
        }
        (Some(first), None) => is_folder(first),
        _ => false,
    };
    if folders {
        arguments[1] = COMMAND.into();
    }
    arguments
}

/// Interval between lines of progress.
const INTERVAL: Duration = Duration::from_secs(10);

/// As many failures are explained: candidates are tried for each.
const EXPLAINED: usize = 5;

/// The check of a vector by its bounds.
const BOUND: &str = "bound";

pub fn run(arguments: &Arguments) -> Outcome {
    let about = about();
    let set = Set::read(&arguments.dir)?;
    let claim = arguments.profile.as_deref().map(options::claim).transpose()?;
    if matches!(claim, Some(Claim::Auto)) {
        let reason =
            "each vector would have a claim of its own; judge one by `etalon check ALGORITHM PASS`";
        return Err(Failure(format!("--profile auto: {reason}")));
    }
    let folder = Outputs { root: &arguments.outputs, allow_missing: arguments.allow_missing };
    folder.check_names(&set)?;
    let folders = [("DIR", arguments.dir.as_path()), ("OUTPUTS", &arguments.outputs)];
    let profile = arguments.profile.as_deref().and_then(of_profile);
    let given: Vec<_> = folders.into_iter().chain(profile).collect();
    let drafts = arguments.reports.begin(&given)?;
    let pool = arguments.threads.pool()?;
    let bench = Bench { set: &set, folder, claim };
    let (records, looks) = pool.install(|| {
        let progress = Progress::on_terminal(INTERVAL);
        let records = bench.records(&|done, all, what| progress.report(done, all, what));
        let judged = records.and_then(|mut records| {
            let looks = bench.look(&mut records)?;
            Ok((records, looks))
        });
        progress.finish();
        judged
    })?;
    let profile = match claim {
        Some(Claim::Profile(profile)) => profile.name,
        _ => "usual",
    };
    let (threads, allow_undecided) = (pool.current_num_threads(), arguments.allow_undecided);
    let about = About { threads, depth: "vectors", profile, allow_undecided, ..about };
    let run = Run { about, records, ..Run::default() };
    let (status, verdict, again) = (run.status(), verdict(&run, &set, arguments), again(arguments));
    let report = Report {
        command: "etalon check",
        status,
        verdict: verdict.clone(),
        studies: looks.iter().map(|look| look.study(&run, again.clone())).collect(),
        run,
        tables: Vec::new(),
        notes: Vec::new(),
        replay: Box::new(move |_| again.clone()),
    };
    let written = drafts.finish(&report, &|| json(&report.run));
    say(&format!("{}\n{verdict}", verify::text(&report.run)))?;
    written.map(|()| status)
}

/// The command that judges the folder again, for a shell.
fn again(arguments: &Arguments) -> String {
    let Arguments { dir, outputs, profile, allow_missing, allow_undecided, .. } = arguments;
    let mut line = format!("etalon check {} {}", quoted(dir), quoted(outputs));
    if let Some(profile) = profile {
        line += &format!(" --profile {}", quoted(Path::new(profile)));
    }
    line += if *allow_missing { " --allow-missing" } else { "" };
    if *allow_undecided > 0.0 {
        line += &format!(" --allow-undecided {allow_undecided}");
    }
    line
}

/// A failure that was looked at.
struct Look {
    /// The number of its record.
    record: usize,
    problem: Problem,
    check: Check,
}

impl Look {
    fn study(&self, run: &Run, replay: String) -> Study {
        let of = &run.records[self.record];
        let symptom = of.verdict.reason().unwrap_or_default();
        let (problem, check) = (Some(&self.problem), Some(&self.check));
        Failed { of, case: &of.case, symptom, problem, check, replay }.study()
    }
}

/// The verdict in one line.
fn verdict(report: &Run, set: &Set, arguments: &Arguments) -> String {
    let (status, checks) = (report.status(), counted(report.checks(), "check"));
    let (negative, undecided) = (report.negative().count(), report.undecided().count());
    let vectors = counted(set.manifest.vectors.len(), "vector");
    let missing =
        report.records.iter().filter(|x| matches!(x.verdict, Verdict::NotAsked(_))).count();
    let missing = if missing > 0 { format!(", {missing} not checked") } else { String::new() };
    let allowed = match undecided > 0 && status == Status::Passed {
        true => format!(" ({} % allowed)", digits(100.0 * arguments.allow_undecided)),
        false => String::new(),
    };
    let of = format!("{vectors} of etalon {}", shortened(&set.manifest.etalon, NAME));
    format!(
        "{status}: {checks} of {of}, {negative} negative, {undecided} undecided{allowed}{missing}"
    )
}

/// The most characters of a name that an error repeats.
const NAME: usize = 200;

/// The folder of outputs.
#[derive(Clone, Copy)]
struct Outputs<'a> {
    root: &'a Path,
    allow_missing: bool,
}

/// The files that an implementation left of a vector.
enum Left {
    Outputs(PathBuf),
    Refused,
    Both,
    Nothing,
}

impl Outputs<'_> {
    /// Fails where the folder holds a file of no vector.
    fn check_names(&self, set: &Set) -> Result<(), Failure> {
        let ids: BTreeSet<&str> = set.manifest.vectors.iter().map(|x| x.id.as_str()).collect();
        let unreadable = |source| files::Error::Read { path: self.root.to_path_buf(), source };
        for found in fs::read_dir(self.root).map_err(unreadable)? {
            let name = found.map_err(unreadable)?.file_name();
            let name = name.to_string_lossy();
            let id = name.strip_suffix(".safetensors").or_else(|| name.strip_suffix(".refused"));
            if !id.is_some_and(|id| ids.contains(id)) {
                let path = self.root.join(shortened(&name, NAME));
                let reason = "must be ID.safetensors or ID.refused of a vector of the set";
                return Err(Failure(format!("{}: {reason}", path.display())));
            }
        }
        Ok(())
    }

    fn of(&self, id: &str) -> Left {
        let [outputs, refused] =
            ["safetensors", "refused"].map(|kind| self.root.join(format!("{id}.{kind}")));
        match (outputs.exists(), refused.exists()) {
            (true, true) => Left::Both,
            (true, false) => Left::Outputs(outputs),
            (false, true) => Left::Refused,
            (false, false) => Left::Nothing,
        }
    }

    /// The outputs of a vector, each in the type that its bounds are for. Fails where they are not outputs of the
    /// pass, and where one is stored in a narrower type.
    fn read(&self, path: &Path, question: &Question) -> Result<Tensors, Failure> {
        let Question { problem, pass, dtype, .. } = question;
        let mut got = files::read_tensors(path, memory::available())?;
        let misfit = |error| files::Error::content(path, error);
        let operands = problem.operands(*pass);
        let outputs: Vec<&Operand> = operands.iter().filter(|x| x.role == Role::Output).collect();
        let known = |name: &String| outputs.iter().any(|x| x.name == name);
        // A file without outputs, or with others, is no part of what is expected.
        let part = self.allow_missing && !got.is_empty() && got.keys().all(known);
        let only: Vec<String> = if part { got.keys().cloned().collect() } else { Vec::new() };
        check_results(problem, *pass, &got, &only).map_err(misfit)?;
        let types = Types::from(*dtype);
        for operand in outputs {
            let Some(tensor) = got.get_mut(operand.name) else { continue };
            let stored = types.of(operand);
            if let (Stored::Float(own), Some(found)) = (stored, tensor.dtype())
                && found != own
            {
                if found.unit_roundoff() >= own.unit_roundoff() {
                    let expected = format!("{own}, or a wider type");
                    let (operand, found) = (operand.name.to_string(), found.to_string());
                    return Err(misfit(Error::Dtype { operand, expected, found }).into());
                }
                *tensor = Tensor::store(&tensor.numbers(operand.name)?, stored);
            }
        }
        Ok(got)
    }
}

/// The outputs that are judged, and the set that judges them.
struct Bench<'a> {
    set: &'a Set,
    folder: Outputs<'a>,
    /// Another profile than that of the vectors.
    claim: Option<Claim>,
}

/// A function that is called for every vector that is done.
type Progressed<'a> = &'a (dyn Fn(usize, usize, &str) + Sync);

impl Bench<'_> {
    fn records(&self, progress: Progressed<'_>) -> Result<Vec<Record>, Failure> {
        let entries = &self.set.manifest.vectors;
        let done = AtomicUsize::new(0);
        let judged = entries.par_iter().with_max_len(1).map(|entry| {
            let start = Instant::now();
            let judged = match entry.result {
                Validity::Valid => self.valid(entry),
                Validity::Invalid => self.invalid(entry),
            };
            progress(done.fetch_add(1, Ordering::Relaxed) + 1, entries.len(), &entry.id);
            let check = if entry.result == Validity::Valid { BOUND } else { "refusal" };
            judged.map(|(verdict, margin)| record(entry, check, verdict, margin, start.elapsed()))
        });
        let mut records = judged.collect::<Result<Vec<_>, Failure>>()?;
        let asked = |entry: &&Entry| entry.probe.as_ref().is_some_and(|probe| probe.question == 1);
        let first: Vec<&Entry> = entries.iter().filter(asked).collect();
        let probes = first.into_par_iter().map(|entry| self.probe(entry));
        records.extend(probes.collect::<Result<Vec<_>, Failure>>()?.into_iter().flatten());
        Ok(records)
    }

    /// A vector without outputs.
    fn missing(&self, what: &str) -> (Verdict, Option<f64>) {
        let text = format!("OUTPUTS has no {what}");
        let verdict = match self.folder.allow_missing {
            true => Verdict::NotAsked(text),
            false => Verdict::Undecided(text),
        };
        (verdict, None)
    }

    fn valid(&self, entry: &Entry) -> Result<(Verdict, Option<f64>), Failure> {
        let loaded = self.set.load(entry, memory::available())?;
        match self.folder.of(&entry.id) {
            Left::Nothing => Ok(self.missing("outputs of it")),
            Left::Refused | Left::Both => {
                Ok((Verdict::Fail("a valid problem was refused".to_string()), None))
            }
            Left::Outputs(path) => {
                let got = self.folder.read(&path, &loaded.question)?;
                Ok(self.judge(&loaded, &self.profile(entry)?, &got)?)
            }
        }
    }

    fn profile(&self, entry: &Entry) -> Result<Profile, Error> {
        let dtype = entry.dtype.unwrap_or(Dtype::F32);
        match self.claim.and_then(|claim| claim.of(dtype)) {
            Some(profile) => Ok(profile),
            None => Profile::by_name(entry.profile.as_deref().unwrap_or_default()),
        }
    }

    /// The verdict of the bounds of a vector, or of those of another claim; and on generic inputs of gate G2.
    fn judge(
        &self,
        loaded: &Loaded,
        profile: &Profile,
        got: &Tensors,
    ) -> Result<(Verdict, Option<f64>), Error> {
        let Question { problem, pass, dtype, inputs } = &loaded.question;
        let mut exact: Bounds = match self.claim {
            None => loaded.bounds.clone(),
            Some(_) => bounds(problem, *pass, *dtype, profile, inputs)?,
        };
        exact.outputs.retain(|name, _| got.contains_key(name));
        let found = g1(&exact, got);
        let text = match found.verdict {
            Verdict::Pass if generic(problem, *pass, inputs).is_ok() => {
                let kernels = Kernels::new(problem, *pass, *dtype, profile, inputs, &exact)?;
                let typical = Typical::new(&kernels)?;
                let statistics = g2(&problem.operands(*pass), profile, &exact, &typical, got);
                match statistics.iter().find(|statistic| statistic.margin() > 1.0) {
                    Some(conspicuous) => conspicuous.to_string(),
                    None => return Ok((Verdict::Pass, Some(found.margin))),
                }
            }
            Verdict::Fail(text) => text,
            other => return Ok((other, Some(found.margin))),
        };
        Ok((Verdict::Fail(text), Some(found.margin)))
    }

    /// Looks at the first few failures of bounds, and adds to each what explains it best.
    fn look(&self, records: &mut [Record]) -> Result<Vec<Look>, Failure> {
        let is_off = |(_, record): &(usize, &mut Record)| {
            record.check == BOUND && record.margin.is_some() && record.verdict.is_negative()
        };
        let failed = records.iter_mut().enumerate().filter(is_off).take(EXPLAINED);
        failed.map(|(at, record)| self.look_at(at, record)).collect()
    }

    fn look_at(&self, at: usize, record: &mut Record) -> Result<Look, Failure> {
        let entries = &self.set.manifest.vectors;
        let entry = entries.iter().find(|entry| entry.id == record.case);
        let entry = entry.ok_or_else(|| Failure(format!("no vector {}", record.case)))?;
        let loaded = self.set.load(entry, memory::available())?;
        let path = self.folder.root.join(format!("{}.safetensors", entry.id));
        let got = self.folder.read(&path, &loaded.question)?;
        let Question { problem, pass, dtype, inputs } = loaded.question;
        let (problem, hints) = (&problem, Hints::default());
        let request = Request { problem, pass, dtype, inputs: &inputs, hints };
        let only: Vec<String> = got.keys().cloned().collect();
        let check = check(&request, &self.profile(entry)?, &got, &only)?;
        if let (Some(best), Verdict::Fail(text)) = (check.explanations.first(), &mut record.verdict)
        {
            *text += &format!("; what explains it: {}", explanation(best));
        }
        Ok(Look { record: at, problem: problem.clone(), check })
    }

    fn invalid(&self, entry: &Entry) -> Result<(Verdict, Option<f64>), Failure> {
        self.set.problem(entry, memory::available())?;
        let error = entry.error.as_ref().map_or("", |error| &error.text);
        Ok(match self.folder.of(&entry.id) {
            Left::Refused => (Verdict::Pass, None),
            Left::Nothing => self.missing("ID.refused"),
            Left::Outputs(_) | Left::Both => {
                let text = format!(
                    "a problem that has no meaning was computed: {}",
                    shortened(error, NAME)
                );
                (Verdict::Fail(text), None)
            }
        })
    }

    /// The judgement of a probe, by its first question: where all are answered.
    fn probe(&self, first: &Entry) -> Result<Option<Record>, Failure> {
        let start = Instant::now();
        let Some(of) = &first.probe else { return Ok(None) };
        let case = |entry: &Entry| entry.id.rsplit_once('.').map(|x| x.0.to_string());
        let own = |entry: &&Entry| {
            let law = entry.probe.as_ref().map(|x| &x.law);
            law == Some(&of.law) && case(entry) == case(first)
        };
        let mut questions: Vec<&Entry> = self.set.manifest.vectors.iter().filter(own).collect();
        questions.sort_by_key(|entry| entry.probe.as_ref().map(|x| x.question));
        let answered = |entry: &&Entry| matches!(self.folder.of(&entry.id), Left::Outputs(_));
        let verdict = match first.id.parse::<Id>().ok().and_then(|id| id.probe()) {
            Some(_) if !questions.iter().all(answered) => {
                Verdict::NotAsked("not every question of it has outputs".to_string())
            }
            Some((probe, _)) => self.judged(&probe, self.profile(first)?, &questions)?,
            None => Verdict::NotAsked("this version of etalon has no such probe".to_string()),
        };
        Ok(Some(record(first, &of.law, verdict, None, start.elapsed())))
    }

    /// The verdict of a probe. That of another version may ask otherwise.
    fn judged(
        &self,
        probe: &Probe,
        profile: Profile,
        questions: &[&Entry],
    ) -> Result<Verdict, Failure> {
        let files = Asked { bench: self, questions, failed: Mutex::new(None) };
        let verdict = probe.judge(|_| profile, &[], None, &files);
        let failed = files.failed.into_inner().unwrap_or_else(PoisonError::into_inner);
        match (failed, verdict) {
            (Some(failure), _) => Err(failure),
            (None, Ok(verdict)) => Ok(verdict),
            (None, Err(reason)) if self.set.manifest.etalon == env!("CARGO_PKG_VERSION") => {
                Err(Failure(reason))
            }
            (None, Err(reason)) => Ok(Verdict::NotAsked(reason)),
        }
    }
}

/// The questions of a probe among the vectors, and their answers.
struct Asked<'a> {
    bench: &'a Bench<'a>,
    questions: &'a [&'a Entry],
    /// A fault of a file.
    failed: Mutex<Option<Failure>>,
}

impl Asked<'_> {
    fn loaded(&self, number: usize) -> Result<(&Entry, Loaded), String> {
        let missing = "it has fewer questions than this version of etalon asks";
        let entry = self.questions.get(number).ok_or(missing)?;
        let loaded = self.bench.set.load(entry, memory::available());
        Ok((entry, loaded.map_err(|error| error.to_string())?))
    }
}

impl Answers for Asked<'_> {
    fn question(&self, number: usize) -> Result<Question, String> {
        Ok(self.loaded(number)?.1.question)
    }

    fn answer(&self, number: usize) -> Result<Option<Tensors>, String> {
        let (entry, loaded) = self.loaded(number)?;
        let Left::Outputs(path) = self.bench.folder.of(&entry.id) else { return Ok(None) };
        self.bench.folder.read(&path, &loaded.question).map(Some).map_err(|failure| {
            let reason = failure.0.clone();
            *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure);
            reason
        })
    }
}

fn record(
    entry: &Entry,
    check: &str,
    verdict: Verdict,
    margin: Option<f64>,
    elapsed: Duration,
) -> Record {
    Record {
        tier: "outputs".to_string(),
        algorithm: entry.algorithm,
        pass: entry.pass.unwrap_or(Pass::Forward),
        dtype: entry.dtype.unwrap_or(Dtype::F32),
        check: check.to_string(),
        case: entry.id.clone(),
        verdict,
        margin,
        elapsed,
    }
}
