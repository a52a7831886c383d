//! `etalon probe`: the suite's probes as a folder of files, for a kernel in any language.

mod folder;
mod judge;
mod write;

use crate::form::Reports;
use crate::options::{self, one_of};
use crate::outcome::{Failure, Outcome};
use crate::output::{Given, of_profile};
use etalon_conformance::capabilities::{Capabilities, read_capabilities};
use etalon_problem::{Algorithm, Dtype, Pass};
use std::path::{Path, PathBuf};

const FOLDERS: &str = "\
Every folder in DIR is a question: question.json has the algorithm, the pass and the type, problem.json and \
inputs.safetensors are as `eval` takes them. Your kernel writes outputs.safetensors beside them. With --problem the \
questions are about your problem: its mask, heads, D and options, in the type of --dtype. A capabilities file (its \
schema: etalon list --schema capabilities) says what else your kernel takes, what it returns, and what it does not: \
nothing else is asked. A question that your kernel takes and does not answer is undecided, and the exit status is 3.";

#[derive(Debug, clap::Args)]
#[command(after_help = FOLDERS)]
pub struct Arguments {
    /// Writes the questions into this folder, which must not be there yet, or be empty.
    #[arg(long, value_name = "DIR", required_unless_present = "check", conflicts_with = "check")]
    out: Option<PathBuf>,
    /// Judges the answers in this folder.
    #[arg(long, value_name = "DIR")]
    check: Option<PathBuf>,
    /// Asks about this problem, in place of the suite's own cases. May be given several times.
    #[arg(long, value_name = "P.json", conflicts_with_all = ["check", "algorithm"])]
    problem: Vec<PathBuf>,
    /// The file of the arrays that the masks of the problems name.
    #[arg(long = "in", value_name = "IN.safetensors", requires = "problem")]
    input: Option<PathBuf>,
    /// The passes that are asked for; forward and backward if absent.
    #[arg(long, value_name = "P,…", value_delimiter = ',', requires = "problem",
        value_parser = one_of([Pass::Forward, Pass::Backward]))]
    pass: Vec<Pass>,
    /// Optional cotangents that your kernel reads, such as dlse: without, none is handed in.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', requires = "problem")]
    with: Vec<String>,
    /// The problems that your kernel takes: a file in JSON. Questions outside are not asked.
    #[arg(long, value_name = "FILE.json")]
    capabilities: Option<PathBuf>,
    /// Algorithms; all if absent.
    #[arg(long, value_name = "A,…", value_delimiter = ',', requires = "out",
        value_parser = one_of(Algorithm::ALL))]
    algorithm: Vec<Algorithm>,
    /// The storage type of the tensors.
    #[arg(long, default_value = "f32", conflicts_with = "check", value_parser = one_of(Dtype::ALL))]
    dtype: Dtype,
    /// The seed of the questions, decimal or 0x….
    #[arg(long, default_value = "0", conflicts_with = "check", value_parser = options::seed)]
    seed: u64,
    /// The arithmetic of the kernel, with --check: a profile of `etalon list` or declared in a file; usual: the
    /// one that goes with the type.
    #[arg(long, value_name = "NAME|FILE.json", default_value = "usual", conflicts_with = "out")]
    profile: String,
    /// With --check: passes though this share of the probes, from 0 to 1, is undecided.
    #[arg(long, value_name = "SHARE", default_value = "0", conflicts_with = "out",
        value_parser = options::share)]
    allow_undecided: f64,
    #[command(flatten)]
    reports: Reports,
}

pub fn run(arguments: &Arguments) -> Outcome {
    if arguments.check.is_none() && arguments.reports.are_wanted() {
        return Err(Failure("--report tells of answers: it goes with --check".to_string()));
    }
    match (&arguments.out, &arguments.check) {
        (Some(folder), _) => write::write(arguments, folder),
        (None, Some(folder)) => judge::judge(arguments, folder),
        (None, None) => Err(Failure("--out or --check is needed".to_string())),
    }
}

impl Arguments {
    /// The files that it reads to judge answers.
    fn files<'a>(&'a self, folder: &'a Path) -> Vec<Given<'a>> {
        let capabilities = self.capabilities.as_deref().map(|path| ("--capabilities", path));
        let given = capabilities.into_iter().chain(of_profile(&self.profile));
        given.chain([("--check", folder)]).collect()
    }

    fn capabilities(&self) -> Result<Option<Capabilities>, Failure> {
        Ok(self.capabilities.as_deref().map(read_capabilities).transpose()?)
    }
}
