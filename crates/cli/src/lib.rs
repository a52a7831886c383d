//! The command `etalon`: arguments, subcommands, exit status. See `etalon --help`.
//!
//! 0: all is well. 1: a verdict is negative. 3: nothing is wrong, but something could not be judged. 2: the
//! arguments or the input cannot be used, or the output cannot be written, or there is not enough memory; one
//! line on stderr says why, and no output file is left behind.

mod advice;
pub mod annotations;
pub mod badge;
mod bench;
mod check;
mod conform;
// This file alone asks whether this build has the cuda tier.
#[cfg_attr(not(feature = "cuda"), path = "no_cuda.rs")]
mod cuda;
mod diagnosis;
mod eval;
mod explain;
mod export;
mod form;
mod found;
pub mod html;
mod journal;
pub mod junit;
mod known;
mod list;
mod live;
mod machine;
pub mod markdown;
mod memory;
pub mod needs;
pub mod noise;
mod options;
mod outcome;
mod output;
pub mod page;
mod plans;
mod power;
mod probe;
pub mod progress;
pub mod report;
mod room;
mod serve;
mod sparsity;
pub mod summary;
pub mod table;
mod trace;
pub mod units;
mod verify;
mod zoo;

pub use check::{Judgement, judge, trace::judge_trace};
pub use conform::{Wanted, cases, conform};
pub use eval::bounds;
pub use outcome::Refused;
pub use trace::trace_of;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use etalon_conformance::report::Status;
use etalon_problem::shortened;
use outcome::{Failure, Outcome, written};
use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;
use std::sync::OnceLock;

/// Measures kernels that train transformers against an exact reference.
#[derive(Debug, Parser)]
#[command(name = "etalon", version)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Checks every tier against every law.
    Verify(verify::Arguments),
    /// Evaluates one pass on your own tensors.
    Eval(eval::Arguments),
    /// Writes what a kernel holds after each tile of a stated walk.
    Trace(trace::Arguments),
    /// Judges the results of your own kernel.
    Check(check::Arguments),
    /// Judges the results of your own kernel on test vectors: `etalon check DIR OUTPUTS`.
    #[command(name = check::vectors::COMMAND, hide = true)]
    CheckVectors(check::vectors::Arguments),
    /// Writes test vectors: problems, inputs, exact results and bounds as files.
    Export(export::Arguments),
    /// Writes inputs on which the right results are known, and judges the results put beside them.
    Probe(probe::Arguments),
    /// Shows which known bugs the laws find: the kill matrix.
    Zoo(zoo::Arguments),
    /// Shows the smallest errors that the gates notice.
    Power(power::Arguments),
    /// Measures time, GFLOP/s and the share of the peak.
    Bench(Box<bench::Arguments>),
    /// Prepares machines with a GPU: an archive of compiled kernels.
    Cuda(cuda::archive::Arguments),
    /// Lists algorithms, passes, tensors, tiers, profiles and laws.
    List(list::Arguments),
    /// Describes a case or a problem, and how the simd tier would compute it.
    Explain(explain::Arguments),
    /// Answers the requests of a suite in another process.
    #[command(hide = true)]
    Serve {
        /// Answers those of the live judge, and computes nothing.
        #[arg(long)]
        null: bool,
    },
}

/// The command line that starts this command in another process, without its arguments, where it is not that of a
/// program of its own.
static PROGRAM: OnceLock<Vec<OsString>> = OnceLock::new();

/// Parses the arguments and runs the command.
pub fn main() -> ExitCode {
    ExitCode::from(answered(std::env::args_os()))
}

/// Runs a command line in a program with another purpose, and returns its exit status. `program` starts this command
/// in another process, where arguments follow it.
pub fn status(program: Vec<OsString>, arguments: Vec<OsString>) -> u8 {
    // A process has one program.
    let _ = PROGRAM.set(program);
    answered(arguments)
}

fn answered(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let limit = output::fail_at_the_size_limit().map_err(|error| error.to_string());
    match limit.and_then(|()| answer(arguments)) {
        Ok(status) => status.exit_status(),
        Err(line) => {
            // If nobody reads stderr, the exit status still tells.
            let _ = writeln!(std::io::stderr(), "error: {line}");
            2
        }
    }
}

/// Runs a command line, the name of the program first: how its verdict ends, or the one line that says why
/// there is none.
pub fn answer(arguments: impl IntoIterator<Item = OsString>) -> Result<Status, String> {
    let arguments = check::vectors::named(arguments.into_iter().collect());
    let outcome = match Cli::command().try_get_matches_from(arguments) {
        Ok(matches) => Cli::from_arg_matches(&matches).map_err(Failure::from).and_then(run),
        Err(error) if error.use_stderr() => Err(Failure::from(error)),
        Err(help_or_version) => written(help_or_version.print()).map(|()| Status::Passed),
    };
    outcome.map_err(|Failure(reason)| one_line(&reason))
}

/// Reads a command line as [`answer`] does, and runs nothing.
pub fn check(arguments: impl IntoIterator<Item = OsString>) -> Result<(), String> {
    match Cli::try_parse_from(check::vectors::named(arguments.into_iter().collect())) {
        Err(error) if error.use_stderr() => Err(one_line(&error.to_string())),
        _ => Ok(()),
    }
}

fn run(cli: Cli) -> Outcome {
    match cli.command {
        Some(Command::Verify(arguments)) => verify::run(&arguments),
        Some(Command::Eval(arguments)) => eval::run(&arguments),
        Some(Command::Trace(arguments)) => trace::run(&arguments),
        Some(Command::Check(arguments)) => check::run(&arguments),
        Some(Command::CheckVectors(arguments)) => check::vectors::run(&arguments),
        Some(Command::Export(arguments)) => export::run(&arguments),
        Some(Command::Probe(arguments)) => probe::run(&arguments),
        Some(Command::Zoo(arguments)) => zoo::run(&arguments),
        Some(Command::Power(arguments)) => power::run(&arguments),
        Some(Command::Bench(arguments)) => bench::run(&arguments),
        Some(Command::Cuda(arguments)) => cuda::archive::run(&arguments),
        Some(Command::List(arguments)) => list::run(&arguments),
        Some(Command::Explain(arguments)) => explain::run(&arguments),
        Some(Command::Serve { null }) => serve::run(null),
        None => written(Cli::command().print_help()).map(|()| Status::Passed),
    }
}

/// The most characters of the line: what it repeats of an argument or a file may have any length.
const LINE: usize = 2000;

/// The fault, without usage, on one line of characters that print; a tip of clap's stands behind a semicolon.
fn one_line(text: &str) -> String {
    let lines = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        .filter(|line| !line.is_empty());
    let line = lines.collect::<Vec<_>>().join(" ").replace(" tip: ", "; ");
    shortened(line.trim_start_matches("error: "), LINE)
}
