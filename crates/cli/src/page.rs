//! Prose, tables and pictures as a list of blocks, which a terminal, Markdown and HTML show.

use crate::table::{PAGE, Table, columns, fold, page};
use etalon_conformance::check::{Picture, Spread};
use etalon_conformance::report::Status;
use etalon_problem::shortened;
use std::path::Path;

/// The most characters of a path in a command.
const PATH: usize = 1000;

/// A path as a shell takes it.
pub fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./=,:+@%".contains(c);
    match !text.is_empty() && text.chars().all(plain) {
        true => text,
        false => format!("'{}'", shortened(&text, PATH).replace('\'', "'\\''")),
    }
}

/// A part of a report.
#[derive(Debug, Clone)]
pub enum Block {
    /// A heading.
    Title(String),
    /// A paragraph.
    Text(String),
    /// A list.
    Items(Vec<String>),
    /// A table, its header first.
    Rows(Vec<Vec<String>>),
    /// A table of verdicts, its header first: cells with a status bear it, others are names.
    Matrix(Vec<Vec<(Option<Status>, String)>>),
    /// A line for a shell.
    Command(String),
    /// Lines as they stand in a file, or for a shell.
    Code(Vec<String>),
    /// Margins of the output of this name. Lists of places say as much on a terminal.
    Pictures(&'static str, Vec<Picture>),
    /// Margins counted, with the words of the first columns.
    Spreads(Vec<String>, Vec<Counted>),
    /// Blocks under a line that opens them.
    Folded(String, Vec<Block>),
}

/// Margins of something, counted.
#[derive(Debug, Clone)]
pub struct Counted {
    /// Its names, for each column one.
    pub names: Vec<String>,
    /// The margins.
    pub spread: Spread,
    /// The largest of them.
    pub worst: f64,
}

/// The columns before an item of a list: an indent, and its mark.
const MARK: usize = 4;

/// For a terminal: prose, lists, tables and commands.
pub fn terminal(blocks: &[Block]) -> String {
    let block = |block: &Block| match block {
        Block::Title(text) | Block::Text(text) => page(text),
        Block::Items(items) => {
            items.iter().map(|item| indented(item)).collect::<Vec<_>>().join("\n")
        }
        Block::Rows(rows) => Table::of(rows.clone()).to_string(),
        // It is to be copied: no line of it may break.
        Block::Command(line) => format!("  {line}"),
        // Files alone have these.
        Block::Matrix(_) | Block::Code(_) | Block::Folded(..) => String::new(),
        Block::Pictures(..) | Block::Spreads(..) => String::new(),
    };
    let texts = blocks.iter().map(block).filter(|text| !text.is_empty());
    texts.collect::<Vec<_>>().join("\n")
}

fn indented(item: &str) -> String {
    let lines = fold(item, columns().min(PAGE) - MARK);
    lines
        .iter()
        .enumerate()
        .map(|(at, line)| if at == 0 { format!("  - {line}") } else { format!("    {line}") })
        .collect::<Vec<_>>()
        .join("\n")
}
