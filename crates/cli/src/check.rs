//! `etalon check`: a verdict on the results of somebody's kernel.

use crate::eval::{Asked, Question};
use crate::options;
use crate::outcome::{Failure, Outcome, say};
use crate::page::{Block, html, markdown, quoted, terminal};
use crate::progress::Progress;
use crate::units::digits;
use crate::{advice, memory, needs, output};
use etalon_conformance::check::{Check, Explanation, Kind, Output, check_told, strictest};
use etalon_conformance::profile::Profile;
use etalon_conformance::tensor::Tensors;
use etalon_conformance::tier::{Hints, Request};
use etalon_conformance::tiers::check_outputs;
use etalon_conformance::vectors::{self, Draft};
use etalon_problem::{Error, Role};
use std::path::{Path, PathBuf};
use std::time::Duration;

const TENSORS: &str = "\
IN holds what `eval` takes, GOT the outputs of your kernel under the names of the formulas: o and lse of \
attention forward, dq, dk and dv of backward. `etalon list` has them with shapes and types.";

#[derive(Debug, clap::Args)]
#[command(after_help = TENSORS)]
pub struct Arguments {
    #[command(flatten)]
    question: Question,
    /// The outputs that it returned.
    #[arg(long, value_name = "GOT.safetensors")]
    got: PathBuf,
    /// The arithmetic of the kernel: a profile of `etalon list` or declared in a file; usual: the one that
    /// goes with the type of q; auto: the strictest that holds, which decides no exit status.
    #[arg(long, value_name = "NAME|FILE.json", default_value = "usual")]
    profile: String,
    /// Judges these outputs alone; the others may be absent.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    only: Vec<String>,
    /// The inputs are random: fails also where the errors are conspicuous (gate G2).
    #[arg(long)]
    generic: bool,
    /// Writes a report: json=PATH, md=PATH or html=PATH. May be given several times.
    #[arg(long, value_name = "KIND=PATH", value_parser = report_file)]
    report: Vec<(Writer, PathBuf)>,
    #[command(flatten)]
    threads: options::Threads,
}

/// How far apart lines of progress are.
const INTERVAL: Duration = Duration::from_secs(10);

/// Writes a report in one of the forms.
type Writer = fn(&Found) -> Result<String, Failure>;

/// Reads KIND=PATH.
fn report_file(text: &str) -> Result<(Writer, PathBuf), Error> {
    const FORMS: [(&str, Writer); 3] = [
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
    /// Whether what is conspicuous counts.
    generic: bool,
    /// Whether the profile is the strictest that holds, and no claim.
    auto: bool,
    command: String,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let Arguments { question, only, .. } = arguments;
    let pass = &question.pass;
    let Asked { problem, inputs, dtype } = question.read()?;
    let got = vectors::read_tensors(&arguments.got, memory::available())?;
    check_outputs(&problem, *pass, dtype, &got, only).map_err(|error| {
        let outputs = problem.operands(*pass).into_iter().filter(|x| x.role == Role::Output);
        on_outputs(&arguments.got, error, &outputs.map(|x| (x.name, x.axes)).collect::<Vec<_>>())
    })?;
    let drafts = arguments.report.iter().map(|(write, path)| Ok((write, Draft::new(path)?)));
    let drafts = drafts.collect::<Result<Vec<_>, Failure>>()?;
    let claim = options::claim(&arguments.profile)?;
    let hints = Hints::default();
    let request = Request { problem: &problem, pass: *pass, dtype, inputs: &inputs, hints };
    let pool = arguments.threads.pool()?;
    let judged = |got: &Tensors| -> Result<Check, Failure> {
        needs::afford_check(&problem, *pass, dtype)?;
        let profile = match claim.of(dtype) {
            None => strictest(&request, got, only)?,
            claimed => claimed,
        };
        // If none holds, what the usual one says is of most use.
        let profile = profile.unwrap_or_else(|| Profile::flash(dtype));
        let progress = Progress::on_terminal(INTERVAL);
        let told = check_told(&request, &profile, got, only, &|done, all, what| {
            progress.tell(done, all, what);
        });
        progress.finish();
        Ok(told?)
    };
    let check = pool.install(|| judged(&got))?;
    let (generic, command) = (arguments.generic, command(arguments, &check.profile));
    let auto = claim.of(dtype).is_none();
    let found = Found { check, generic, auto, command };
    for (write, draft) in drafts {
        output::finish(draft, write(&found)?.as_bytes())?;
    }
    say(&format!("{}\n{}", terminal(&found.blocks()), found.verdict()))?;
    Ok(found.passed() || auto)
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
    let Failure(line) = advice::on_tensors(&vectors::Error::content(path, error), axes);
    Failure(line + &advice)
}

/// The command that makes a check again, for a shell.
fn command(arguments: &Arguments, profile: &Profile) -> String {
    // A declared one has no name: its file stands for it.
    let profile = match Profile::by_name(profile.name) {
        Ok(profile) => profile.to_string(),
        Err(_) => quoted(Path::new(&arguments.profile)),
    };
    let Arguments { question, got, only, generic, .. } = arguments;
    let Question { algorithm, pass, problem, input } = question;
    let [problem, input, got] = [problem, input, got].map(|path| quoted(path));
    let mut line = format!(
        "etalon check {algorithm} {pass} --problem {problem} --in {input} --got {got} --profile {profile}"
    );
    if !only.is_empty() {
        line += &format!(" --only {}", only.join(","));
    }
    if *generic {
        line += " --generic";
    }
    line
}

impl Found {
    fn passed(&self) -> bool {
        self.check.passed && !(self.generic && self.check.conspicuous)
    }

    fn title(&self) -> String {
        format!("etalon check: {}", self.verdict())
    }

    fn verdict(&self) -> String {
        let Check { algorithm, pass, dtype, profile, outputs, .. } = &self.check;
        let of = format!("{algorithm} {pass} in {dtype}");
        let off = outputs.iter().filter(|output| output.off > 0).count();
        match (off, self.passed()) {
            (0, _) if self.auto => {
                format!("{profile} is the strictest profile that holds for {of}")
            }
            (_, _) if self.auto => {
                format!("no profile holds for {of}; this is what {profile} says")
            }
            (0, true) => format!(
                "PASSED: {} of {of} within the bounds of {profile}",
                counted(outputs.len(), "output")
            ),
            (0, false) => {
                format!("FAILED: errors of {of} are conspicuous, within the bounds of {profile}")
            }
            _ => format!(
                "FAILED: {off} of {} of {of} beyond the bounds of {profile}",
                counted(outputs.len(), "output")
            ),
        }
    }

    /// All but the verdict; little of it where all is well.
    fn blocks(&self) -> Vec<Block> {
        let check = &self.check;
        let mut blocks = vec![Block::Rows(rows(check))];
        for output in check.outputs.iter().filter(|output| output.off > 0) {
            blocks.push(Block::Title(format!("{}: {}", output.name, worst(output))));
            blocks.push(Block::Items(output.places.clone()));
        }
        let conspicuous: Vec<String> =
            check.outputs.iter().flat_map(|output| output.conspicuous.clone()).collect();
        if !conspicuous.is_empty() {
            blocks.push(Block::Title("Conspicuous errors (gate G2):".to_string()));
            blocks.push(Block::Items(conspicuous));
        }
        if check.conspicuous && check.passed {
            blocks.push(Block::Text(CONSPICUOUS.to_string()));
        }
        blocks.extend(self.explained());
        if !self.passed() {
            blocks.push(Block::Text("To see it again:".to_string()));
            blocks.push(Block::Command(self.command.clone()));
        }
        blocks
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

const CONSPICUOUS: &str = "On random inputs this is a systematic error that the bounds are too wide to see; on \
    structured ones it may be none. Check other random inputs: if it shows again, it is one. With --generic it \
    fails.";

fn counted(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// The table of the outputs, its header first.
fn rows(check: &Check) -> Vec<Vec<String>> {
    let header = ["output", "off", "of", "worst margin", "rms error", "slope"].map(String::from);
    let row = |output: &Output| {
        let slope = output.slope.map_or("–".to_string(), |slope| format!("{:+.1e}", slope.value));
        let [margin, error] = [output.margin, output.error].map(digits);
        let name = output.name.to_string();
        vec![name, output.off.to_string(), output.elements.to_string(), margin, error, slope]
    };
    [header.to_vec()].into_iter().chain(check.outputs.iter().map(row)).collect()
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
