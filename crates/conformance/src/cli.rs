//! The command line: arguments, subcommands, exit status.
//!
//! 0: all is well. 1: a verdict is negative. 2: the arguments or the input cannot be used; one line
//! on stderr says why, and no output file is left behind.

mod bench;
mod eval;
mod explain;
mod list;
mod options;
mod plans;
mod table;
mod verify;
mod zoo;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use std::fmt;
use std::io::Write;
use std::process::ExitCode;

/// Measures kernels that train transformers against an exact reference.
#[derive(Debug, Parser)]
#[command(name = "etalon", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Holds every tier to every law.
    Verify(verify::Arguments),
    /// Evaluates one pass on your own tensors.
    Eval(eval::Arguments),
    /// Shows which known bugs the laws find: the kill matrix.
    Zoo(zoo::Arguments),
    /// Measures time, GFLOP/s and the share of the peak.
    Bench(bench::Arguments),
    /// Lists algorithms, passes, tiers, levels, profiles and laws.
    List(list::Arguments),
    /// Says in words what a case or a problem is, and how the simd tier would go about it.
    Explain(explain::Arguments),
}

/// Why there is no result: one line for the user.
#[derive(Debug)]
struct Failure(String);

impl<E: fmt::Display> From<E> for Failure {
    fn from(error: E) -> Self {
        Failure(error.to_string())
    }
}

/// Whether every verdict is positive.
type Outcome = Result<bool, Failure>;

/// Parses the arguments and runs the command.
pub fn main() -> ExitCode {
    let matches = match Cli::command().try_get_matches() {
        Ok(matches) => matches,
        Err(error) if error.use_stderr() => return refuse(&one_line(&error.to_string())),
        Err(help_or_version) => {
            // Nobody is left to tell that a closed pipe did not take the help.
            let _ = help_or_version.print();
            return ExitCode::SUCCESS;
        }
    };
    let outcome = Cli::from_arg_matches(&matches).map_err(Failure::from).and_then(run);
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(Failure(reason)) => refuse(&reason),
    }
}

fn run(cli: Cli) -> Outcome {
    match cli.command {
        Command::Verify(arguments) => verify::run(&arguments),
        Command::Eval(arguments) => eval::run(&arguments),
        Command::Zoo(arguments) => zoo::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::List(arguments) => list::run(&arguments),
        Command::Explain(arguments) => explain::run(&arguments),
    }
}

/// Prints to stdout. Whoever closed the pipe has read enough: that is no error.
fn say(text: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{text}");
}

fn refuse(reason: &str) -> ExitCode {
    eprintln!("error: {}", one_line(reason).trim_start_matches("error: "));
    ExitCode::from(2)
}

/// What is wrong, without usage and advice, on one line.
fn one_line(text: &str) -> String {
    text.lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        .filter(|line| !line.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}
