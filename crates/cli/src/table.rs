//! Tables that fit the terminal, or 100 columns, and never break a word: rows that are too wide stand as lists.

use std::fmt;
use std::io::{IsTerminal, stdout};
use std::sync::OnceLock;
use terminal_size::{Width, terminal_size_of};

/// The columns of a page where there is no terminal: what a log and a pull request show without wrapping.
pub const PAGE: usize = 100;

/// A terminal is taken for no narrower than this, and prose is set no wider than a page.
const NARROWEST: usize = 40;

/// The columns that are there: those that the environment's `COLUMNS` states, of the terminal, or of a page.
pub fn columns() -> usize {
    static COLUMNS: OnceLock<usize> = OnceLock::new();
    *COLUMNS.get_or_init(|| {
        let stated = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
        let terminal = || {
            let size = stdout().is_terminal().then(|| terminal_size_of(stdout())).flatten();
            size.map(|(Width(columns), _)| usize::from(columns))
        };
        stated.or_else(terminal).map_or(PAGE, |columns: usize| columns.max(NARROWEST))
    })
}

/// Between two columns.
const GAP: usize = 2;

/// Before the cells of a row that stands as a list.
const INDENT: usize = 4;

/// Rows under a header. A cell that is too wide continues on the next line, between words.
#[derive(Debug)]
pub struct Table {
    header: Vec<String>,
    /// Each with a cell for each column.
    rows: Vec<Vec<String>>,
    /// Each with the number of the row that it stands over.
    titles: Vec<(usize, String)>,
}

impl Table {
    /// An empty table.
    pub fn new(header: impl IntoIterator<Item = impl ToString>) -> Self {
        let header = header.into_iter().map(|cell| cell.to_string()).collect();
        Table { header, rows: Vec::new(), titles: Vec::new() }
    }

    /// A table of rows, of which the first is the header.
    pub fn of(rows: impl IntoIterator<Item = Vec<String>>) -> Self {
        let mut rows = rows.into_iter();
        let mut table = Table::new(rows.next().unwrap_or_default());
        rows.for_each(|row| table.add_row(row));
        table
    }

    /// Adds a row with a cell for each column.
    pub fn add_row(&mut self, cells: impl IntoIterator<Item = impl ToString>) {
        let mut cells: Vec<String> = cells.into_iter().map(|cell| cell.to_string()).collect();
        cells.resize(self.header.len(), String::new());
        self.rows.push(cells);
    }

    /// Adds a title over the rows that follow, unless it is the last one.
    pub fn add_title(&mut self, title: &str) {
        if self.titles.last().is_none_or(|(_, last)| last != title) {
            self.titles.push((self.rows.len(), title.to_string()));
        }
    }

    /// The cells of a column without its header.
    fn column(&self, at: usize) -> impl Iterator<Item = &str> {
        self.rows.iter().map(move |row| row[at].as_str())
    }

    /// The table in so many columns, or in more where a word alone is longer.
    pub fn within(&self, columns: usize) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = self.write(&mut text, columns);
        text
    }

    /// The width of each column: the content's, or as much less as fits and breaks no word.
    fn widths(&self, columns: usize) -> Vec<usize> {
        let of = |measure: fn(&str) -> usize| -> Vec<usize> {
            let columns = self.header.iter().enumerate();
            let cells = columns.map(|(at, header)| self.column(at).chain([header.as_str()]));
            cells.map(|cells| cells.map(measure).max().unwrap_or(0)).collect()
        };
        let least = of(|cell| cell.split_whitespace().map(width).max().unwrap_or(0));
        let mut widths = of(|cell| cell.lines().map(width).max().unwrap_or(0));
        while widths.iter().map(|width| width + GAP).sum::<usize>() > columns + GAP {
            let loose = (0..widths.len()).filter(|&at| widths[at] > least[at]);
            let Some(widest) = loose.max_by_key(|&at| widths[at]) else { break };
            widths[widest] -= 1;
        }
        widths
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, columns())
    }
}

impl Table {
    fn write(&self, f: &mut dyn fmt::Write, columns: usize) -> fmt::Result {
        let of_numbers = |at: &usize| {
            let mut cells = self.column(*at).filter(|cell| !matches!(*cell, "" | "–")).peekable();
            cells.peek().is_some()
                && cells.all(|cell| cell == "inf" || cell.starts_with(|c: char| c.is_ascii_digit()))
        };
        let widths = self.widths(columns);
        if widths.iter().map(|width| width + GAP).sum::<usize>() > columns + GAP {
            return self.write_as_lists(f, columns);
        }
        let right: Vec<bool> = (0..widths.len()).map(|at| of_numbers(&at)).collect();
        let rule =
            "─".repeat(widths.iter().map(|width| width + GAP).sum::<usize>().saturating_sub(GAP));
        let line = |cells: &[String]| {
            let folded: Vec<_> =
                cells.iter().zip(&widths).map(|(cell, &width)| fold(cell, width)).collect();
            let lines = (0..folded.iter().map(Vec::len).max().unwrap_or(0)).map(|line| {
                let cells =
                    folded.iter().zip(widths.iter().zip(&right)).map(|(lines, (&width, right))| {
                        let cell = lines.get(line).map_or("", String::as_str);
                        if *right { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
                    });
                cells.collect::<Vec<_>>().join("  ").trim_end().to_string()
            });
            lines.collect::<Vec<_>>().join("\n")
        };
        writeln!(f, "{rule}\n{}\n{rule}", line(&self.header))?;
        for (at, row) in self.rows.iter().enumerate() {
            for (_, title) in self.titles.iter().filter(|(over, _)| *over == at) {
                let width = width(&rule);
                writeln!(f, "{:─<width$}", format!("── {title} "))?;
            }
            writeln!(f, "{}", line(row))?;
        }
        write!(f, "{rule}")
    }

    /// Each row as its first cell, and below it the others with their headers.
    fn write_as_lists(&self, f: &mut dyn fmt::Write, columns: usize) -> fmt::Result {
        let rule = "─".repeat(columns);
        writeln!(f, "{rule}")?;
        for (at, row) in self.rows.iter().enumerate() {
            for (_, title) in self.titles.iter().filter(|(over, _)| *over == at) {
                writeln!(f, "{:─<columns$}", format!("── {title} "))?;
            }
            let cells = self.header.iter().zip(row).skip(1).filter(|(_, cell)| !cell.is_empty());
            let named = cells.map(|(header, cell)| match header.as_str() {
                "" => cell.replace('\n', ", "),
                header => format!("{header}: {}", cell.replace('\n', ", ")),
            });
            let all = named.collect::<Vec<_>>().join("; ");
            writeln!(f, "{}", row.first().map_or("", String::as_str))?;
            for line in fold(&all, columns.saturating_sub(INDENT)) {
                writeln!(f, "{:INDENT$}{line}", "")?;
            }
        }
        write!(f, "{rule}")
    }
}

/// A text in lines that fit the page.
pub fn page(text: &str) -> String {
    fold(text, columns().min(PAGE)).join("\n")
}

/// The lines of a text, folded between words to a width that is at least that of every word.
pub fn fold(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    for paragraph in text.lines() {
        let mut line = String::new();
        for word in paragraph.split(' ') {
            if !line.is_empty() && self::width(&line) + 1 + self::width(word) > width {
                lines.push(std::mem::take(&mut line));
            } else if !line.is_empty() {
                line.push(' ');
            }
            line += word;
        }
        lines.push(line);
    }
    lines
}

/// Columns of a text: all characters that etalon prints take one.
fn width(text: &str) -> usize {
    text.chars().count()
}
