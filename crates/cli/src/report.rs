//! A report: what a command found, for every form that people and CI systems read. Renderers read this alone.

mod causes;
mod chosen;
mod document;

pub use causes::{Cause, causes};
pub use chosen::chosen;
pub use document::{Section, document};

use crate::page::Block;
use etalon_conformance::check::Spread;
use etalon_conformance::report::{self, Record, Status};

/// The command that asks a record again, for a shell.
pub type Replay<'a> = Box<dyn Fn(&Record) -> String + 'a>;

/// Findings of a command.
pub struct Report<'a> {
    /// The command, as in `etalon check`.
    pub command: &'static str,
    /// The status with which it ends.
    pub status: Status,
    /// The line with which it ends, which begins with the status.
    pub verdict: String,
    /// Records of every check, with place, time and settings.
    pub run: report::Report,
    /// Some of the records in detail: the failures that are looked at, and outputs that are all there is.
    pub studies: Vec<Study>,
    /// Tables of the command's own, each with its title.
    pub tables: Vec<(&'static str, Vec<Vec<String>>)>,
    /// Notes beside them.
    pub notes: Vec<String>,
    /// The command for each record that shows it again.
    pub replay: Replay<'a>,
}

/// Outputs in detail.
pub struct Study {
    /// Its title.
    pub title: String,
    /// The status of it.
    pub status: Status,
    /// The findings: tables, places, pictures, diagnosis, the simplest problem, the command that shows it again.
    pub blocks: Vec<Block>,
    /// The margins of the elements of each output, and the largest.
    pub spreads: Vec<(&'static str, Spread, f64)>,
}

impl Report<'_> {
    /// The title of every form: the command and the verdict.
    pub fn title(&self) -> String {
        format!("{}: {}", self.command, self.verdict)
    }
}
