//! How a subcommand ends, and how it prints.

use etalon_conformance::report::Status;
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

/// The status that decides the exit status.
pub type Outcome = Result<Status, Failure>;

/// Prints a line to standard output.
pub fn say(text: &str) -> Result<(), Failure> {
    written(writeln!(io::stdout().lock(), "{text}"))
}

/// What came of writing to standard output: a closed pipe is no error, since its reader has read
/// enough, but a full disk is.
pub fn written(result: io::Result<()>) -> Result<(), Failure> {
    match result.and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure(format!("standard output cannot be written: {error}")))
        }
        _ => Ok(()),
    }
}
