//! `etalon check`: a verdict on the results of somebody's kernel.

pub mod vectors;

use crate::eval::{self, LoadedProblem, Question};
use crate::options;
use crate::outcome::{Failure, Outcome, Refused, say};
use crate::output::{self, Writer};
use crate::page::{Block, html, markdown, quoted, terminal};
use crate::progress::Progress;
use crate::units::{counted, digits, margin};
use crate::{advice, memory, needs};
use etalon_conformance::check::{Check, Explanation, Kind, Output, check_with_progress, strictest};
use etalon_conformance::profile::Profile;
use etalon_conformance::report::Status;
use etalon_conformance::tensor::{Stored, Tensor, Tensors};
use etalon_conformance::tier::{Hints, Request};
use etalon_conformance::tiers::{check_results, no_output};
use etalon_conformance::vectors as files;
use etalon_problem::{Dtype, Error, Operand, Pass, Precision, Problem, Role, shortened};
use std::path::{Path, PathBuf};
use std::time::Duration;

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
    #[arg(long, value_name = "GOT.safetensors")]
    got: PathBuf,
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
    /// Writes a report: json=PATH, md=PATH or html=PATH. May be given several times.
    #[arg(long, value_name = "KIND=PATH", value_parser = report_file)]
    report: Vec<(Writer<Found>, PathBuf)>,
    #[command(flatten)]
    threads: options::Threads,
}

/// Interval between lines of progress.
const INTERVAL: Duration = Duration::from_secs(10);

/// Reads KIND=PATH.
fn report_file(text: &str) -> Result<(Writer<Found>, PathBuf), Error> {
    const FORMS: [(&str, Writer<Found>); 3] = [
        ("json", |found| Ok(serde_json::to_string_pretty(found)?)),
        ("md", |found| Ok(markdown(&found.title(), &found.blocks()))),
        ("html", |found| Ok(html(&found.title(), &found.blocks()))),
    ];
    options::report_file(text, &FORMS)
}

/// A check, and the command that makes it again.
#[derive(serde::Serialize)]
struct Found {
    #[serde(flatten)]
    check: Check,
    /// The share of the elements that may be undecided in results that pass.
    allow_undecided: f64,
    /// True if the profile is the strictest that holds, and no claim.
    auto: bool,
    /// Assumptions, omissions and ignored tensors.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    command: Option<String>,
}

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
    let found = Found { check, allow_undecided: 0.0, auto, notes, command: None };
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
    let question = &arguments.question;
    let pass = &question.pass;
    let LoadedProblem { problem, inputs, dtype, mut notes } = question.read()?;
    known_outputs(&problem, *pass, &arguments.only)?;
    let Brought { got, only, notes: more } = brought(arguments, &problem, dtype)?;
    notes.extend(more);
    check_results(&problem, *pass, &got, &only).map_err(|error| {
        let outputs = problem.operands(*pass).into_iter().filter(|x| x.role == Role::Output);
        on_outputs(&arguments.got, error, &outputs.map(|x| (x.name, x.axes)).collect::<Vec<_>>())
    })?;
    let drafts = output::begin(&arguments.report)?;
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
    let command = command(arguments, &check.profile);
    let (auto, allow_undecided) = (claim.of(dtype).is_none(), arguments.allow_undecided);
    if !check.passed && question.dtype.is_none() {
        notes.extend(held_wider(&problem, *pass, dtype, &inputs));
    }
    let found = Found { check, allow_undecided, auto, notes, command: Some(command) };
    output::finish_all(drafts, &found)?;
    say(&format!("{}\n{}", terminal(&found.blocks()), found.verdict()))?;
    Ok(found.status())
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
fn brought(arguments: &Arguments, problem: &Problem, dtype: Dtype) -> Result<Brought, Failure> {
    let Arguments { question, only, .. } = arguments;
    let operands = problem.operands(question.pass);
    let outputs: Vec<&Operand> = operands.iter().filter(|x| x.role == Role::Output).collect();
    let known = |name: &str| !arguments.allow_extra || outputs.iter().any(|x| x.name == name);
    let (mut got, extra) = files::read_known(&arguments.got, memory::available(), known)?;
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
            let path = arguments.got.display();
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

/// The command that makes a check again, for a shell.
fn command(arguments: &Arguments, profile: &Profile) -> String {
    // A declared one has no name: its file stands for it.
    let profile = match Profile::by_name(profile.name) {
        Ok(profile) => profile.to_string(),
        Err(_) => quoted(Path::new(&arguments.profile)),
    };
    let Arguments { question, got, only, generic, structured, allow_undecided, .. } = arguments;
    let Question { algorithm, pass, problem, input, dtype } = question;
    let [problem, input, got] = [problem, input, got].map(|path| quoted(path));
    let mut line = format!(
        "etalon check {algorithm} {pass} --problem {problem} --in {input} --got {got} --profile {profile}"
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

impl Found {
    /// The status of the check, where undecided elements are not allowed.
    fn status(&self) -> Status {
        match self.check.status {
            Status::Undecided if self.check.undecided() <= self.allow_undecided => Status::Passed,
            status => status,
        }
    }

    fn title(&self) -> String {
        format!("etalon check: {}", self.verdict())
    }

    fn verdict(&self) -> String {
        let Check { algorithm, pass, dtype, profile, outputs, .. } = &self.check;
        let (status, of) = (self.status(), format!("{algorithm} {pass} in {dtype}"));
        let count = |so: fn(&Output) -> bool| outputs.iter().filter(|output| so(output)).count();
        let all = counted(outputs.len(), "output");
        let off = count(|output| output.off > 0);
        let doubtful = count(|output| output.undecided > 0);
        let bounds = format!("the bounds of {profile}");
        let text = match (off, self.check.status) {
            (0, Status::Passed) if self.auto => {
                format!("{profile} is the strictest profile that holds for {of}")
            }
            (0, Status::Passed) => format!("{all} of {of} within {bounds}"),
            (0, _) if status == Status::Passed => format!(
                "{} % undecided ({} % allowed), all else within {bounds}",
                digits(100.0 * self.check.undecided()),
                digits(100.0 * self.allow_undecided)
            ),
            (0, _) if self.check.too_wide && doubtful == 0 => {
                format!(
                    "{profile} is the strictest profile that may hold for {of}, and too wide to judge it"
                )
            }
            (0, _) if doubtful == 0 => format!("errors of {of} are conspicuous, within {bounds}"),
            (0, _) => format!("{bounds} cannot judge {doubtful} of {all} of {of}"),
            (_, _) if self.auto => {
                format!("no profile holds for {of}; this is what {profile} says")
            }
            _ => format!("{off} of {all} of {of} beyond {bounds}"),
        };
        format!("{status}: {text}")
    }

    /// All but the verdict; little of it where all is well.
    fn blocks(&self) -> Vec<Block> {
        let check = &self.check;
        let mut blocks = vec![Block::Rows(rows(check))];
        blocks.extend(self.notes.iter().cloned().map(Block::Text));
        for output in check.outputs.iter().filter(|output| output.off > 0) {
            blocks.push(Block::Title(format!("{}: {}", output.name, worst(output))));
            blocks.push(Block::Items(output.places.clone()));
        }
        let within = || check.outputs.iter().filter(|output| output.off == 0);
        let doubts: Vec<String> = within().filter_map(|output| output.doubt.clone()).collect();
        let sharp: Vec<String> = within().filter_map(right_though_uninformative).collect();
        if !sharp.is_empty() {
            blocks.push(Block::Title(
                "What the bounds judge only with simulated kernels:".to_string(),
            ));
            blocks.push(Block::Items(sharp));
        }
        if !doubts.is_empty() {
            blocks.push(Block::Title("What the bounds cannot judge:".to_string()));
            blocks.push(Block::Items(doubts));
        }
        let conspicuous: Vec<String> =
            check.outputs.iter().flat_map(|output| output.conspicuous.clone()).collect();
        if !conspicuous.is_empty() {
            blocks.push(Block::Title("Conspicuous errors (gate G2):".to_string()));
            blocks.push(Block::Items(conspicuous));
        }
        blocks.extend(self.what_would_decide().map(Block::Text));
        blocks.extend(self.explained());
        if let (true, Some(command)) = (self.status() != Status::Passed, &self.command) {
            blocks.push(Block::Text("To see it again:".to_string()));
            blocks.push(Block::Command(command.clone()));
        }
        blocks
    }

    /// The next step where nothing is off, but something could be wrong.
    fn what_would_decide(&self) -> Option<String> {
        let check = &self.check;
        let off = check.outputs.iter().any(|output| output.off > 0);
        if off || check.status == Status::Passed {
            return None;
        }
        if !check.conspicuous && check.outputs.iter().all(|output| output.undecided == 0) {
            return Some(DECIDES.to_string());
        }
        let inputs = match &check.structured {
            _ if check.generic => {
                let text = "The inputs are random: a correct kernel does not err so.";
                return Some(format!("{text} If they are not, say --structured."));
            }
            Some(reason) => {
                format!("The inputs are not random ({reason}), so that this may be no error.")
            }
            None => "The inputs count as structured, so that this may be no error.".to_string(),
        };
        Some(format!("{inputs} {DECIDES}"))
    }

    fn explained(&self) -> Vec<Block> {
        let check = &self.check;
        let mut blocks = Vec::new();
        if !check.explanations.is_empty() {
            blocks.push(Block::Title("What explains it:".to_string()));
            blocks.push(Block::Items(check.explanations.iter().map(explanation).collect()));
        }
        blocks.extend(check.next.clone().map(Block::Text));
        if !check.parts.is_empty() {
            let parts = check.parts.join("; ");
            let text =
                format!("The problem is large: explanations were tried on parts of it, {parts}.");
            blocks.push(Block::Text(text));
        }
        blocks.extend(check.not_tried.clone().map(Block::Text));
        blocks
    }
}

const DECIDES: &str = "What would decide: random inputs with a mean of 0 and scores of a deviation of about 1, a \
    narrower --profile, or `etalon probe`, whose right answers are known exactly.";

/// The table of the outputs, its header first.
fn rows(check: &Check) -> Vec<Vec<String>> {
    let header = ["output", "off", "of", "worst margin", "rms error", "slope"].map(String::from);
    let row = |output: &Output| {
        let slope = output.slope.map_or("–".to_string(), |slope| format!("{:+.1e}", slope.value));
        let (margin, error) = (margin(output.margin), digits(output.error));
        let name = output.name.to_string();
        vec![name, output.off.to_string(), output.elements.to_string(), margin, error, slope]
    };
    [header.to_vec()].into_iter().chain(check.outputs.iter().map(row)).collect()
}

/// The elements that count as right though they are uninformative, in a sentence.
fn right_though_uninformative(output: &Output) -> Option<String> {
    let &Output { name, uninformative, elements, undecided, .. } = output;
    (uninformative > 0 && undecided == 0).then(|| {
        let (have, their, they) =
            if uninformative == 1 { ("has a bound", "its row", "it errs") } else { ("have bounds", "their rows", "they err") };
        format!(
            "{uninformative} of {elements} elements of {name} {have} wider than half of the scale of {their}, or none; \
             {they} no more than simulated correct kernels"
        )
    })
}

fn worst(output: &Output) -> String {
    let Output { axes, shape, .. } = output;
    let Some(worst) = &output.worst else { return format!("has no elements, {shape:?}") };
    format!(
        "worst at {:?} of [{}]: got {:.6e}, exact {:.6e} ± {:.1e}",
        worst.index,
        axes.join(", "),
        worst.got,
        worst.exact,
        worst.bound
    )
}

fn explanation(explanation: &Explanation) -> String {
    let Explanation { kind, id, text, left, part, .. } = explanation;
    let name = match kind {
        Kind::Pattern | Kind::Convention | Kind::Reading => String::new(),
        Kind::Mutant => format!("{id}, "),
    };
    let left = left.map(|left| format!(" (leaves {} % of the difference)", digits(100.0 * left)));
    let part = part.as_ref().map_or(String::new(), |part| format!("; {part}"));
    format!("{name}{text}{}{part}", left.unwrap_or_default())
}
