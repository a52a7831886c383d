//! The pass of a problem that a figure is of.

use crate::table::Table;
use crate::units::counted;
use etalon_problem::{Axis, Pass, Problem};
use serde::Serialize;

/// An algorithm, the extents that are printed, and a pass.
#[derive(Debug, Serialize)]
pub struct Subject {
    pub algorithm: &'static str,
    /// The mask, or the decay.
    pub mask: String,
    pub batch: usize,
    pub length: usize,
    pub dim: usize,
    pub heads: usize,
    pub key_heads: usize,
    pub pass: &'static str,
}

impl Subject {
    pub fn new(problem: &Problem, mask: &str, pass: Pass) -> Subject {
        Subject {
            algorithm: problem.algorithm().name(),
            mask: mask.to_string(),
            batch: problem.extent(Axis::Batch),
            length: length(problem),
            dim: problem.extent(Axis::Dim),
            heads: problem.extent(Axis::QueryHeads),
            key_heads: problem.extent(Axis::KeyHeads),
            pass: pass.name(),
        }
    }

    /// Its heads and batch elements in words.
    pub fn heads(&self) -> String {
        let (heads, batch) = (counted(self.heads, "head"), counted(self.batch, "batch element"));
        format!("{heads} ({} of keys), {batch}", self.key_heads)
    }
}

/// Queries, tokens, or targets: a problem has one of the three.
pub fn length(problem: &Problem) -> usize {
    [Axis::Queries, Axis::Tokens, Axis::Targets].map(|axis| problem.extent(axis)).iter().product()
}

/// A table of rows, those of an algorithm under its name.
pub fn table<'a>(
    header: impl IntoIterator<Item = &'static str>,
    rows: impl Iterator<Item = (&'a Subject, Vec<String>)>,
) -> String {
    let mut rows: Vec<(&Subject, Vec<String>)> = rows.collect();
    rows.sort_by_key(|(subject, _)| subject.algorithm);
    let mut table = Table::new(header);
    for (subject, row) in rows {
        table.add_title(subject.algorithm);
        table.add_row(row);
    }
    table.to_string()
}
