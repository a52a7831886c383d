//! The suite on a program that somebody brings (`verify --candidate`).

mod finding;
mod words;

use crate::diagnosis::studies;
use crate::journal::{Journal, Run};
use crate::outcome::Failure;
use crate::output::Given;
use crate::page::quoted;
use crate::report::Study;
use crate::{known, options, output};
use etalon_conformance::candidate::{Answer, Candidate};
use etalon_conformance::capabilities::{Capabilities, Kernel, parse_capabilities};
use etalon_conformance::cases::{Depth, Spec};
use etalon_conformance::generate::fnv;
use etalon_conformance::laws::Kind;
use etalon_conformance::live::{Hello, Limits, Program, REFUSES, Said, UNASKED};
use etalon_conformance::profile::Profile;
use etalon_conformance::report::{Record, Report, Verdict};
use etalon_conformance::suite::{self, Part, SuiteOptions};
use etalon_conformance::tier::{Request, Tier};
use etalon_conformance::vectors::read_text;
use etalon_problem::{Algorithm, Error, shortened};
pub use finding::Finding;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{Write, stderr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// A program that somebody brings.
#[derive(Debug, clap::Args)]
pub struct Brought {
    /// A program of somebody: the command line that starts it. It answers on its standard streams, as docs/protocol.md
    /// says. `verify` judges it in place of etalon's own tiers; `bench` times it beside one, and judges timed calls.
    #[arg(long, value_name = "COMMAND")]
    candidate: Option<String>,
    /// The program's capabilities; if absent, those of its hello.
    #[arg(long, value_name = "FILE.json", requires = "candidate")]
    capabilities: Option<PathBuf>,
    /// The arithmetic that the program claims: a profile of `etalon list` or a file; usual if absent.
    #[arg(long, value_name = "NAME|FILE.json", requires = "candidate")]
    profile: Option<String>,
    /// Seconds in which the program must answer a request; 20 if absent.
    #[arg(long, value_name = "SECONDS", requires = "candidate", value_parser = seconds)]
    limit: Option<Duration>,
    /// Sends tensors in frames, and offers the program no files to share.
    #[arg(long, requires = "candidate")]
    frames: bool,
}

#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    brought: Brought,
    /// The program claims the same bits in every call, and is asked.
    #[arg(long, requires = "candidate")]
    deterministic: bool,
    /// New starts of the program after it ended, or was ended; 10 if absent.
    #[arg(long, value_name = "N", requires = "candidate")]
    restarts: Option<usize>,
    /// Failures that are known, PASS LAW CASE on a line: they do not fail the run, and one that passes does.
    #[arg(long, value_name = "FILE", requires = "candidate")]
    known: Option<PathBuf>,
    /// Keeps what is done in a file, and goes on where the run in it stopped.
    #[arg(long = "continue", value_name = "FILE", requires = "candidate")]
    journal: Option<PathBuf>,
    /// Prints one verdict in JSON in place of the table: status, worst place, suspects, next case, replay.
    #[arg(long, requires = "candidate")]
    json: bool,
}

/// Options of a run that etalon's own tiers share.
pub struct Asked<'a> {
    pub run: &'a options::Run,
    pub depth: Depth,
    pub part: Option<Part>,
    pub cases: &'a [Spec],
    pub laws: &'a [String],
    pub allow_undecided: f64,
    /// True if failures are shown in detail.
    pub details: bool,
}

/// A run that is over.
pub struct Judged {
    pub report: Report,
    pub finding: Finding,
    /// Failures in detail.
    pub studies: Vec<Study>,
}

/// Seconds above 0, to a day.
fn seconds(text: &str) -> Result<Duration, Error> {
    const DAY: f64 = 86400.0;
    let seconds = text.parse::<f64>().ok().filter(|seconds| *seconds > 0.0 && *seconds <= DAY);
    let seconds = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| Error::value("limit", "seconds above 0, at most 86400", text))
}

/// Seconds for an answer, and at least for a start, which may load libraries.
const CALL: Duration = Duration::from_secs(20);
const START: Duration = Duration::from_secs(60);

/// Starts again, if nobody says how many.
const RESTARTS: usize = 10;

/// Bytes of the program's stderr that are handed on.
const SAID: usize = 64 << 10;

/// Cases of the beginning that are judged again at the end, with other elements.
const AGAIN: usize = 6;

impl Brought {
    /// True if there is one.
    pub fn is_wanted(&self) -> bool {
        self.candidate.is_some()
    }

    /// Limits with so many new starts.
    pub fn limits(&self, restarts: Option<usize>) -> Limits {
        let call = self.limit.unwrap_or(CALL);
        let restarts = restarts.unwrap_or(RESTARTS).min(usize::MAX / 4);
        Limits { call, start: call.max(START), restarts }
    }

    /// Its command line.
    pub fn command(&self) -> &str {
        self.candidate.as_deref().unwrap_or_default()
    }

    /// The profile that it claims, as it was given.
    pub fn claim(&self) -> &str {
        self.profile.as_deref().unwrap_or("usual")
    }

    /// The profile that it claims; `None`: the usual of each type.
    pub fn profile(&self) -> Result<Option<Profile>, Failure> {
        match options::claim(self.claim())? {
            options::Claim::Usual => Ok(None),
            options::Claim::Profile(profile) => Ok(Some(profile)),
            options::Claim::Auto => {
                Err(Error::value("profile", "a claim: usual, a name or a file", "auto").into())
            }
        }
    }

    /// The files that it reads.
    pub fn files(&self) -> Vec<Given<'_>> {
        let capabilities = self.capabilities.as_deref().map(|path| ("--capabilities", path));
        let profile = self.profile.as_deref().and_then(output::of_profile);
        capabilities.into_iter().chain(profile).collect()
    }

    /// The options that decide how it is asked, for a shell.
    fn again(&self) -> String {
        let quote = |text: &str| quoted(Path::new(text));
        let mut line = format!(" --candidate {}", quote(self.command()));
        if let Some(path) = &self.capabilities {
            line += &format!(" --capabilities {}", quoted(path));
        }
        if let Some(profile) = &self.profile {
            line += &format!(" --profile {}", quote(profile));
        }
        if let Some(limit) = self.limit {
            line += &format!(" --limit {}", limit.as_secs_f64());
        }
        line + if self.frames { " --frames" } else { "" }
    }
}

impl Arguments {
    /// True if a program is to be judged.
    pub fn is_wanted(&self) -> bool {
        self.brought.is_wanted()
    }

    /// True if the verdict is printed in JSON.
    pub fn in_json(&self) -> bool {
        self.json
    }

    /// The files that it reads, and the one that it goes on with.
    pub fn files(&self) -> Vec<Given<'_>> {
        let own = [("--known", &self.known), ("--continue", &self.journal)];
        let own = own.into_iter().filter_map(|(name, path)| Some((name, path.as_deref()?)));
        own.chain(self.brought.files()).collect()
    }

    /// The command that asks one case by one law again, for a shell.
    pub fn replay(&self, case: &str, law: &str) -> String {
        format!("{} --case {case} --law {law}", self.again())
    }

    /// The command that repeats a whole run.
    pub fn repeat(&self, depth: Depth, seed: u64) -> String {
        let known = self.known.as_deref().map(|path| format!(" --known {}", quoted(path)));
        format!("{}{} --depth {depth} --seed {seed}", self.again(), known.unwrap_or_default())
    }

    /// The command with the options that decide what is asked of the program.
    fn again(&self) -> String {
        let line = format!("etalon verify{}", self.brought.again());
        line + if self.deterministic { " --deterministic" } else { "" }
    }
}

/// Judges the program within its capabilities.
pub fn judge(arguments: &Arguments, asked: &Asked<'_>) -> Result<Judged, Failure> {
    let (brought, limits) = (&arguments.brought, arguments.brought.limits(arguments.restarts));
    let profile = brought.profile()?;
    let list = arguments.known.as_deref().map(|path| Ok::<_, Failure>((known::read(path)?, path)));
    let list = list.transpose()?;
    let (program, hello) = start(brought, limits)?;
    let (text, capabilities) = capabilities(brought, &hello)?;
    let answer = |request: &Request<'_>| program.answer(request);
    let lost = || program.lost();
    let slow = asked.depth == Depth::Smoke;
    let candidates = candidates(&hello.name, &capabilities, (profile, slow), (&answer, &lost));
    let seed = seed(arguments, asked.run)?;
    let run = Run {
        etalon: env!("CARGO_PKG_VERSION").to_string(),
        candidate: brought.command().to_string(),
        capabilities: format!("{:x}", fnv(&text)),
        choices: format!("{:x}", fnv(&choices(arguments, asked, profile))),
        seed,
    };
    let journal = arguments.journal.as_deref().map(|path| Journal::open(path, &run)).transpose()?;
    let mut algorithms = asked.run.algorithms();
    algorithms.retain(|of| capabilities.kernels.iter().any(|kernel| kernel.algorithm == *of));
    if !asked.cases.is_empty() {
        algorithms.retain(|of| asked.cases.iter().any(|spec| spec.algorithm == *of));
    }
    let options = SuiteOptions {
        algorithms,
        depth: asked.depth,
        seed,
        kinds: vec![Kind::Gate, Kind::Probe, Kind::Meaning],
        cases: asked.cases.to_vec(),
        laws: asked.laws.to_vec(),
        part: asked.part,
        profile,
        allow_undecided: asked.allow_undecided,
        capabilities: Some(&capabilities),
        promises: if arguments.deterministic { vec!["determinism"] } else { Vec::new() },
        journal: journal.as_ref().map(|journal| journal as &dyn suite::Journal),
        ..SuiteOptions::own(candidates.iter().map(|candidate| candidate as &dyn Tier).collect())
    };
    let mut report = asked.run.watch(|progress| {
        let mut report = suite::run(&options, progress);
        again(&options, &mut report);
        report
    })?;
    journal.as_ref().map_or(Ok(()), Journal::check)?;
    report.records.iter_mut().for_each(|record| of_program(&mut record.verdict));
    report.about.candidate = Some(brought.command().to_string());
    report.about.profile = profile.map_or("usual", |profile| profile.name);
    let mut notes = list.map_or(Vec::new(), |(list, path)| known::take(&mut report, &list, path));
    if let Some(journal) = journal.as_ref().filter(|journal| journal.count() > 0) {
        notes.push(format!("{} of the cases were judged by an earlier run", journal.count()));
    }
    if program.ends() > 0 {
        notes.push(format!("its process ended, or was ended, {} times", program.ends()));
    }
    let replay = |case: &str, law: &str| arguments.replay(case, law);
    let (finding, studies) = asked.run.watch(|_| {
        let name = hello.name.clone();
        let finding = Finding::of(&report, &candidates, &capabilities, &replay, (name, notes));
        let build = |spec: &Spec| spec.build_for(&capabilities);
        let again = |record: &Record| replay(&record.case, &record.check);
        let studies = match asked.details {
            true => studies(&report, &options.tiers, &build, &again),
            false => Vec::new(),
        };
        (finding, studies)
    })?;
    Ok(Judged { report, finding, studies })
}

/// Starts the program, and guards this process from it.
pub fn start(brought: &Brought, limits: Limits) -> Result<(Arc<Program>, Hello), Failure> {
    let command = words::words(brought.command())?;
    close();
    let program = Program::new(command, limits, said()).offered(!brought.frames);
    let program = Arc::new(program);
    output::end_with(&program)?;
    let hello = program.start().map_err(|fault| {
        Failure(format!("the candidate {}: it {fault}", shortened(brought.command(), SHOWN)))
    })?;
    Ok((program, hello))
}

/// The most characters of a command line in an error.
const SHOWN: usize = 300;

/// Closes the memory of this process, which holds exact results, to others of the same user.
fn close() {
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{DumpableBehavior, set_dumpable_behavior};
        // If it fails, the page still says what a candidate may read.
        let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    }
}

/// Hands on what the program writes to stderr, up to a limit.
fn said() -> Box<Said> {
    let (left, told) = (AtomicUsize::new(SAID), AtomicBool::new(false));
    Box::new(move |bytes| {
        let take = |left: usize| Some(left.saturating_sub(bytes.len()));
        let before = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).unwrap_or(0);
        let shown = &bytes[..bytes.len().min(before)];
        // If nobody reads stderr, the verdict still tells.
        let mut out = stderr().lock();
        let _ = out.write_all(shown);
        if shown.len() < bytes.len() && !told.swap(true, Ordering::Relaxed) {
            let _ = writeln!(out, "\n(no more of the candidate's stderr is shown)");
        }
    })
}

/// Capabilities, with their text.
pub fn capabilities(brought: &Brought, hello: &Hello) -> Result<(String, Capabilities), Failure> {
    let (text, path) = match (&brought.capabilities, &hello.capabilities) {
        (Some(path), _) => (read_text(path)?, path.as_path()),
        (None, Some(text)) => (text.clone(), Path::new("the candidate's hello")),
        (None, None) => {
            return Err(Failure(
                "the candidate declares no capabilities in its hello: name a file by --capabilities"
                    .to_string(),
            ));
        }
    };
    let capabilities = parse_capabilities(path, &text)?;
    Ok((text, capabilities))
}

/// The door to a program, and why it is closed, if so.
type Door<'a> = (Answer<'a>, &'a (dyn Fn() -> Option<String> + Sync));

/// The program as a tier of each algorithm that it takes.
fn candidates<'a>(
    name: &str,
    capabilities: &'a Capabilities,
    (profile, slow): (Option<Profile>, bool),
    (answer, lost): Door<'a>,
) -> Vec<Candidate<'a>> {
    let has =
        |of: &Algorithm| capabilities.kernels.iter().any(|kernel: &Kernel| kernel.algorithm == *of);
    let own = Algorithm::ALL.into_iter().filter(has);
    let candidate = |algorithm| {
        let name = name.to_string();
        Candidate { name, algorithm, capabilities, profile, answer, slow, lost: Some(lost) }
    };
    own.map(candidate).collect()
}

/// The seed that was given, or that of the run which goes on; else one that no program can know.
fn seed(arguments: &Arguments, run: &options::Run) -> Result<u64, Failure> {
    let begun = arguments.journal.as_deref().map_or(Ok(None), Journal::seed)?;
    let random = || RandomState::new().build_hasher().finish();
    Ok(run.seed.or(begun).unwrap_or_else(random))
}

/// Other choices that decide the records of a run.
fn choices(arguments: &Arguments, asked: &Asked<'_>, profile: Option<Profile>) -> String {
    let Asked { depth, part, cases, laws, .. } = asked;
    let part = part.map(|part| part.to_string());
    let cases: Vec<String> = cases.iter().map(Spec::to_string).collect();
    format!("{depth} {part:?} {cases:?} {laws:?} {profile:?} {}", arguments.deterministic)
}

/// Judges cases of the beginning again, with other elements: a program may be right for some calls only.
fn again(options: &SuiteOptions<'_>, report: &mut Report) {
    if !options.cases.is_empty() || report.checks() == 0 {
        return;
    }
    let mut cases: Vec<Spec> = Vec::new();
    for record in &report.records {
        let Ok(spec) = record.case.parse::<Spec>() else { continue };
        let other = Spec { seed: !options.seed, ..spec };
        if !spec.is_large() && !cases.contains(&other) && cases.len() < AGAIN {
            cases.push(other);
        }
    }
    let options = SuiteOptions {
        tiers: options.tiers.clone(),
        algorithms: options.algorithms.clone(),
        kinds: vec![Kind::Gate],
        laws: vec!["bound".to_string()],
        promises: Vec::new(),
        cases,
        part: None,
        journal: None,
        ..*options
    };
    let more = suite::run(&options, &|_, _, _| {});
    report.records.extend(more.records);
    report.simplest.extend(more.simplest);
}

/// The verdict on the program. What it refuses though its capabilities take it is not judged, so that none passes by
/// refusing; a case that could notice nothing, as a random seed may draw one, is no fault of the program.
fn of_program(verdict: &mut Verdict) {
    *verdict = match verdict {
        Verdict::Unsupported(reason)
            if [REFUSES, UNASKED].iter().any(|part| reason.starts_with(part)) =>
        {
            Verdict::Undecided(reason.clone())
        }
        Verdict::Vacuous(reason) => {
            Verdict::NotAsked(format!("a case that judges nothing was drawn: {reason}"))
        }
        _ => return,
    };
}
