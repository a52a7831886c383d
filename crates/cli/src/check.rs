//! `etalon check`: a verdict on the results of somebody's kernel.

pub(crate) mod trace;
pub mod vectors;

use crate::eval::{self, LoadedProblem, Question};
use crate::form::Reports;
use crate::found::Found;
use crate::machine::about;
use crate::options;
use crate::outcome::{Failure, Outcome, Refused, say};
use crate::output::{Given, of_profile};
use crate::page::{quoted, terminal};
use crate::progress::Progress;
use crate::{advice, memory, needs};
use etalon_conformance::check::{Check, check_with_progress, strictest};
use etalon_conformance::profile::Profile;
use etalon_conformance::report::{About, Status};
use etalon_conformance::tensor::{Stored, Tensor, Tensors};
use etalon_conformance::tier::{Hints, Request};
use etalon_conformance::tiers::{check_results, no_output};
use etalon_conformance::vectors as files;
use etalon_problem::{Dtype, Error, Operand, Pass, Precision, Problem, Role, shortened};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const TENSORS: &str = "\
IN holds what `eval` takes, GOT the outputs of your kernel under the names of the formulas: o and lse of \
attention forward, dq, dk and dv of backward. `etalon list` has them with shapes and types.

`etalon check DIR OUTPUTS` judges a folder of outputs against the test vectors that `etalon export DIR` has written; \
`etalon check DIR OUTPUTS --help` has its options.";

#[derive(Debug, clap::Args)]
#[command(after_help = TENSORS)]
pub struct Arguments {
    #[command(flatten)]
    question: Question,
    /// The outputs that it returned.
    #[arg(long, value_name = "GOT.safetensors", required_unless_present = "trace")]
    got: Option<PathBuf>,
    /// In their place what it held after each tile, as `etalon trace` writes it: names the first tile and step that
    /// is off.
    #[arg(
        long,
        value_name = "TRACE.safetensors",
        conflicts_with_all = ["got", "only", "allow_missing", "allow_extra", "generic", "structured"]
    )]
    trace: Option<PathBuf>,
    /// The arithmetic of the kernel: a profile of `etalon list` or declared in a file; usual: the one that
    /// goes with the type of q; auto: the strictest that holds.
    #[arg(long, value_name = "NAME|FILE.json", default_value = "usual")]
    profile: String,
    /// Judges these outputs alone; the others may be absent.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    only: Vec<String>,
    /// Judges what GOT holds; results of the pass that it lacks are named.
    #[arg(long)]
    allow_missing: bool,
    /// Names and ignores tensors of GOT that are no results of the pass.
    #[arg(long)]
    allow_extra: bool,
    /// The inputs are random, whatever they look like: what is conspicuous or cannot be judged is a failure.
    #[arg(long, conflicts_with = "structured")]
    generic: bool,
    /// The inputs are not random, whatever they look like: what is conspicuous or cannot be judged is undecided.
    #[arg(long)]
    structured: bool,
    /// Passes though this share of the elements, from 0 to 1, is undecided.
    #[arg(long, value_name = "SHARE", default_value = "0", value_parser = options::share)]
    allow_undecided: f64,
    #[command(flatten)]
    reports: Reports,
    #[command(flatten)]
    threads: options::Threads,
}

/// Interval between lines of progress.
const INTERVAL: Duration = Duration::from_secs(10);

/// A judgement that a program asks for, in the words of `etalon check`.
#[derive(Debug, Clone)]
pub struct Judgement {
    /// The verdict.
    pub status: Status,
    /// The report, with the verdict in its first line.
    pub text: String,
    /// The report in JSON, as `--report json=PATH` writes it.
    pub json: String,
}

/// Judges results that a program holds as `etalon check` does, on the threads of the current pool: `profile` is what
/// `--profile` takes, and `generic` says whether the inputs are random, if the caller knows.
pub fn judge(
    problem: &Problem,
    pass: Pass,
    inputs: Tensors,
    got: &Tensors,
    only: &[String],
    (profile, generic): (&str, Option<bool>),
) -> Result<Judgement, Refused> {
    let (mut inputs, dtype) = eval::inputs(problem, pass, inputs)?;
    let mut notes: Vec<String> = eval::unit_loss(problem, pass, &mut inputs)?.into_iter().collect();
    known_outputs(problem, pass, only)?;
    check_results(problem, pass, got, only)?;
    let outputs = problem.operands(pass);
    let outputs: Vec<&Operand> = outputs.iter().filter(|x| x.role == Role::Output).collect();
    notes.extend(own_types(&outputs, dtype, got));
    let claim = options::claim(profile)?;
    let hints = Hints::default();
    let request = Request { problem, pass, dtype, inputs: &inputs, hints };
    let check = judged(&request, got, only, claim, generic, &|_, _, _| {})?;
    if !check.passed {
        notes.extend(held_wider(problem, pass, dtype, &inputs));
    }
    let auto = claim.of(dtype).is_none();
    judgement(Found { check, allow_undecided: 0.0, auto, notes, command: None })
}

fn judgement(found: Found) -> Result<Judgement, Refused> {
    let text = format!("{}\n\n{}", found.verdict(), terminal(&found.blocks()));
    let json = serde_json::to_string(&found).map_err(Failure::from)?;
    Ok(Judgement { status: found.status(), text, json })
}

/// The check of a claim, or of the strictest profile that holds, if there is memory for it.
fn judged(
    request: &Request<'_>,
    got: &Tensors,
    only: &[String],
    claim: options::Claim,
    generic: Option<bool>,
    progress: &(dyn Fn(usize, usize, &str) + Sync),
) -> Result<Check, Refused> {
    let &Request { problem, pass, dtype, .. } = request;
    needs::afford_check(problem, pass, dtype)?;
    let profile = match claim.of(dtype) {
        None => strictest(request, got, only)?,
        claimed => claimed,
    };
    // If none holds, what the usual one says is of most use.
    let profile = profile.unwrap_or_else(|| Profile::flash(dtype));
    needs::afford_stores(problem, &profile)?;
    let check = check_with_progress(request, &profile, got, only, progress)?;
    let check = match generic {
        None => check,
        Some(generic) => check.on_inputs(generic),
    };
    Ok(if claim.of(dtype).is_none() { check.as_strictest() } else { check })
}

pub fn run(arguments: &Arguments) -> Outcome {
    match (&arguments.trace, &arguments.got) {
        (Some(trace), _) => trace::run(arguments, trace),
        (None, Some(got)) => of_outputs(arguments, got),
        (None, None) => Err(Failure("--got or --trace is needed".to_string())), // clap asks for one
    }
}

fn of_outputs(arguments: &Arguments, path: &Path) -> Outcome {
    let (start, about) = (Instant::now(), about());
    let question = &arguments.question;
    let pass = &question.pass;
    let LoadedProblem { problem, inputs, dtype, mut notes } = question.read()?;
    known_outputs(&problem, *pass, &arguments.only)?;
    let Brought { got, only, notes: more } = brought(arguments, path, &problem, dtype)?;
    notes.extend(more);
    check_results(&problem, *pass, &got, &only).map_err(|error| {
        let outputs = problem.operands(*pass).into_iter().filter(|x| x.role == Role::Output);
        on_outputs(path, error, &outputs.map(|x| (x.name, x.axes)).collect::<Vec<_>>())
    })?;
    let drafts = arguments.reports.begin(&arguments.files())?;
    let claim = options::claim(&arguments.profile)?;
    let hints = Hints::default();
    let request = Request { problem: &problem, pass: *pass, dtype, inputs: &inputs, hints };
    let pool = arguments.threads.pool()?;
    let generic = match (arguments.generic, arguments.structured) {
        (false, false) => None,
        (generic, _) => Some(generic),
    };
    let check = pool.install(|| {
        let progress = Progress::on_terminal(INTERVAL);
        let check = judged(&request, &got, &only, claim, generic, &|done, all, what| {
            progress.report(done, all, what);
        });
        progress.finish();
        check
    })?;
    let command = command(arguments, ("got", path), &check.profile);
    let (auto, allow_undecided) = (claim.of(dtype).is_none(), arguments.allow_undecided);
    if !check.passed && question.dtype.is_none() {
        notes.extend(held_wider(&problem, *pass, dtype, &inputs));
    }
    let found = Found { check, allow_undecided, auto, notes, command: Some(command) };
    let case = question.problem.display().to_string();
    let about = About { threads: pool.current_num_threads(), ..about };
    let report = found.report("etalon check", (about, "outputs", &case), start.elapsed());
    let written = drafts.finish(&report, &|| serde_json::to_string_pretty(&found));
    say(&format!("{}\n{}", terminal(&found.blocks()), found.verdict()))?;
    written.map(|()| found.status())
}

impl Arguments {
    /// The files that it reads.
    fn files(&self) -> Vec<Given<'_>> {
        let judged = [("--got", &self.got), ("--trace", &self.trace)];
        let judged = judged.into_iter().filter_map(|(name, path)| Some((name, path.as_deref()?)));
        let question = self.question.files().into_iter();
        question.chain(judged).chain(of_profile(&self.profile)).collect()
    }
}

/// Fails where `--only` names what is no output of the pass.
fn known_outputs(problem: &Problem, pass: Pass, only: &[String]) -> Result<(), Failure> {
    let outputs = problem.operands(pass).into_iter().filter(|x| x.role == Role::Output);
    let outputs: Vec<&str> = outputs.map(|x| x.name).collect();
    let Some(name) = only.iter().find(|name| !outputs.contains(&name.as_str())) else {
        return Ok(());
    };
    let advice = advice::did_you_mean(name, outputs.iter().copied());
    Err(Failure(format!("--only: {}{advice}", no_output(problem, pass, name))))
}

/// Results that are judged.
struct Brought {
    got: Tensors,
    /// Their names, or none where they are all.
    only: Vec<String>,
    notes: Vec<String>,
}

/// Tensors of GOT that the arguments ask for, each in the type in which it is stored.
fn brought(
    arguments: &Arguments,
    path: &Path,
    problem: &Problem,
    dtype: Dtype,
) -> Result<Brought, Failure> {
    let Arguments { question, only, .. } = arguments;
    let operands = problem.operands(question.pass);
    let outputs: Vec<&Operand> = operands.iter().filter(|x| x.role == Role::Output).collect();
    let known = |name: &str| !arguments.allow_extra || outputs.iter().any(|x| x.name == name);
    let (mut got, extra) = files::read_known(path, memory::available(), known)?;
    let (mut only, mut notes) = (only.clone(), Vec::new());
    if !extra.is_empty() {
        let names = extra.iter().map(|name| shortened(name, NAME)).collect::<Vec<_>>();
        notes.push(format!("Ignored: {}.", names.join(", ")));
    }
    if arguments.allow_missing {
        let wanted = |x: &&&Operand| only.is_empty() || only.iter().any(|name| name == x.name);
        let (there, missing): (Vec<&Operand>, Vec<&Operand>) =
            outputs.iter().filter(wanted).partition(|x| got.contains_key(x.name));
        if there.is_empty() {
            let path = path.display();
            return Err(Failure(format!("{path}: it holds no result of {}", question.pass)));
        }
        if !missing.is_empty() {
            let names: Vec<&str> = missing.iter().map(|x| x.name).collect();
            notes.push(format!("Not judged, being absent: {}.", names.join(", ")));
        }
        only = there.iter().map(|x| x.name.to_string()).collect();
    }
    if question.dtype.is_some() {
        for operand in outputs.iter().filter(|x| x.precision == Precision::Storage) {
            let Some(tensor) = got.get_mut(operand.name) else { continue };
            if tensor.dtype().is_some()
                && let Some(own) = tensor.narrowed(operand.name, dtype)?
            {
                *tensor = own;
            }
        }
    }
    notes.extend(own_types(&outputs, dtype, &got));
    Ok(Brought { got, only, notes })
}

/// A note that names the results in another type than goes with the main tensors.
fn own_types(outputs: &[&Operand], dtype: Dtype, got: &Tensors) -> Option<String> {
    let own = outputs.iter().filter_map(|x| {
        let own = Stored::Float(got.get(x.name)?.dtype()?);
        (own != Stored::of(x.precision, dtype)).then(|| format!("{} in {own}", x.name))
    });
    let own: Vec<String> = own.collect();
    (!own.is_empty()).then(|| format!("Judged as stored: {}.", own.join(", ")))
}

/// The most characters of a name that a note repeats.
const NAME: usize = 100;

/// A note where all main tensors hold numbers of a narrower type than their own: the kernel may compute in
/// that.
fn held_wider(problem: &Problem, pass: Pass, dtype: Dtype, inputs: &Tensors) -> Option<String> {
    let operands = problem.operands(pass);
    let main = operands.iter().filter(|x| x.role.is_given() && x.precision == Precision::Storage);
    let main: Vec<(&str, &Tensor)> =
        main.filter_map(|x| Some((x.name, inputs.get(x.name)?))).collect();
    let all = |own: &Dtype| {
        let narrowed = |(name, x): &(&str, &Tensor)| matches!(x.narrowed(name, *own), Ok(Some(_)));
        own.unit_roundoff() > dtype.unit_roundoff() && main.iter().all(narrowed)
    };
    let own = [Dtype::Bf16, Dtype::F16, Dtype::F32].into_iter().find(all)?;
    let names: Vec<&str> = main.iter().map(|(name, _)| *name).collect();
    Some(format!(
        "{} hold {dtype}, and only numbers that {own} has. If the kernel computes in {own}, say --dtype {own}, or \
         write its tensors in that type.",
        names.join(", ")
    ))
}

/// An error about the file of the outputs, with advice.
fn on_outputs(
    path: &Path,
    error: Error,
    outputs: &[(&'static str, Vec<etalon_problem::Axis>)],
) -> Failure {
    let advice = match &error {
        Error::Unexpected { operand, .. } => {
            advice::did_you_mean(operand, outputs.iter().map(|(name, _)| *name))
        }
        _ => String::new(),
    };
    let axes = |name: &str| outputs.iter().find(|x| x.0 == name).map(|(_, axes)| axes.clone());
    let Failure(line) = advice::on_tensors(&files::Error::content(path, error), axes);
    Failure(line + &advice)
}

/// The command that makes a check again of a file that an argument names, for a shell.
fn command(arguments: &Arguments, (what, file): (&str, &Path), profile: &Profile) -> String {
    // A declared one has no name: its file stands for it.
    let profile = match Profile::by_name(profile.name) {
        Ok(profile) => profile.to_string(),
        Err(_) => quoted(Path::new(&arguments.profile)),
    };
    let Arguments { question, only, generic, structured, allow_undecided, .. } = arguments;
    let Question { algorithm, pass, problem, input, dtype } = question;
    let [problem, input, file] = [problem.as_path(), input, file].map(quoted);
    let mut line = format!(
        "etalon check {algorithm} {pass} --problem {problem} --in {input} --{what} {file} --profile {profile}"
    );
    if !only.is_empty() {
        line += &format!(" --only {}", only.join(","));
    }
    if let Some(dtype) = dtype {
        line += &format!(" --dtype {dtype}");
    }
    for (given, word) in
        [(arguments.allow_missing, " --allow-missing"), (arguments.allow_extra, " --allow-extra")]
    {
        line += if given { word } else { "" };
    }
    for (given, name) in [(generic, " --generic"), (structured, " --structured")] {
        line += if *given { name } else { "" };
    }
    if *allow_undecided > 0.0 {
        line += &format!(" --allow-undecided {allow_undecided}");
    }
    line
}
