//! Outcome of a subcommand, and its printing.

use anstream::AutoStream;
use anstyle::{AnsiColor, Style};
use etalon_conformance::report::Status;
use etalon_problem::Error;
use std::fmt;
use std::io::{self, ErrorKind, Write};

/// Why there is no result: one line for the user.
#[derive(Debug)]
pub struct Failure(pub String);

impl<E: fmt::Display> From<E> for Failure {
    fn from(error: E) -> Self {
        Failure(error.to_string())
    }
}

/// Why there is no judgement.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Refused {
    /// The question cannot be judged.
    #[error(transparent)]
    Question(#[from] Error),
    /// A profile or an output is unknown, or there is not enough memory: one line.
    #[error("{0}")]
    Other(String),
}

impl From<Failure> for Refused {
    fn from(Failure(line): Failure) -> Self {
        Refused::Other(line)
    }
}

/// The status that decides the exit status.
pub type Outcome = Result<Status, Failure>;

/// Prints lines to standard output; on a terminal that wants colours, verdicts have one.
pub fn say(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    let plain = AutoStream::choice(&out) == anstream::ColorChoice::Never;
    let text = if plain { text.to_string() } else { coloured(text) };
    written(writeln!(out, "{text}"))
}

/// The words of a verdict that a line begins with, and their colours.
const VERDICTS: [(&str, AnsiColor); 3] =
    [("PASSED", AnsiColor::Green), ("FAILED", AnsiColor::Red), ("UNDECIDED", AnsiColor::Yellow)];

/// Lines of which the verdicts that they begin with are coloured.
fn coloured(text: &str) -> String {
    let line = |line: &str| {
        let found = VERDICTS
            .iter()
            .find_map(|(word, colour)| Some((word, colour, line.strip_prefix(word)?)));
        let Some((word, colour, rest)) = found else { return line.to_string() };
        let style = Style::new().bold().fg_color(Some((*colour).into()));
        format!("{style}{word}{style:#}{rest}")
    };
    text.split('\n').map(line).collect::<Vec<_>>().join("\n")
}

/// Outcome of writing to standard output: a closed pipe is no error, since its reader has read enough, but a full disk
/// is.
pub fn written(result: io::Result<()>) -> Result<(), Failure> {
    match result.and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure(format!("standard output cannot be written: {error}")))
        }
        _ => Ok(()),
    }
}
