//! Tables that fit 100 columns and never break a word.

use std::fmt;

/// The columns of a page: what a terminal, a log and a pull request show without wrapping.
const PAGE: usize = 100;

/// Between two columns.
const GAP: usize = 2;

/// Rows under a header. A cell that is too wide continues on the next line, between words.
#[derive(Debug)]
pub struct Table {
    header: Vec<String>,
    rows: Vec<Row>,
}

#[derive(Debug)]
enum Row {
    Cells(Vec<String>),
    /// A title over the rows that follow.
    Title(String),
}

impl Table {
    /// An empty table.
    pub fn new(header: impl IntoIterator<Item = impl ToString>) -> Self {
        Table { header: strings(header), rows: Vec::new() }
    }

    /// Adds a row with a cell for each column.
    pub fn add_row(&mut self, cells: impl IntoIterator<Item = impl ToString>) {
        let mut cells = strings(cells);
        cells.resize(self.header.len(), String::new());
        self.rows.push(Row::Cells(cells));
    }

    /// Adds a title over the rows that follow.
    pub fn add_title(&mut self, title: impl ToString) {
        self.rows.push(Row::Title(title.to_string()));
    }

    /// The cells of a column without its header.
    fn column(&self, index: usize) -> impl Iterator<Item = &str> {
        self.rows.iter().filter_map(move |row| match row {
            Row::Cells(cells) => Some(cells[index].as_str()),
            Row::Title(_) => None,
        })
    }

    /// The width of each column: the content's, or as much less as fits the page and breaks no word.
    fn widths(&self) -> Vec<usize> {
        let of = |measure: fn(&str) -> usize| -> Vec<usize> {
            let header = self.header.iter().enumerate();
            let widest = header
                .map(|(at, header)| self.column(at).map(measure).fold(measure(header), usize::max));
            widest.collect()
        };
        let least = of(|cell| cell.split_whitespace().map(width).max().unwrap_or(0));
        let mut widths = of(|cell| cell.lines().map(width).max().unwrap_or(0));
        let page = PAGE - GAP * (widths.len().max(1) - 1);
        while widths.iter().sum::<usize>() > page {
            let loose = (0..widths.len()).filter(|&at| widths[at] > least[at]);
            let Some(widest) = loose.max_by_key(|&at| widths[at]) else { break };
            widths[widest] -= 1;
        }
        widths
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths = self.widths();
        let of_numbers = |at: usize| {
            let mut cells = self.column(at).filter(|cell| !matches!(*cell, "" | "–")).peekable();
            cells.peek().is_some()
                && cells.all(|cell| cell.starts_with(|c: char| c.is_ascii_digit()))
        };
        let columns: Vec<(usize, bool)> =
            widths.iter().enumerate().map(|(at, &width)| (width, of_numbers(at))).collect();
        let rule = "─".repeat(widths.iter().sum::<usize>() + GAP * (widths.len().max(1) - 1));
        writeln!(f, "{rule}")?;
        write_row(f, &self.header, &columns)?;
        writeln!(f, "{rule}")?;
        for row in &self.rows {
            match row {
                Row::Cells(cells) => write_row(f, cells, &columns)?,
                Row::Title(title) => writeln!(f, "{title}")?,
            }
        }
        write!(f, "{rule}")
    }
}

/// Writes the lines of a row. A column has a width, and its numbers stand on the right.
fn write_row(
    f: &mut fmt::Formatter<'_>,
    cells: &[String],
    columns: &[(usize, bool)],
) -> fmt::Result {
    let folded: Vec<Vec<String>> =
        cells.iter().zip(columns).map(|(cell, &(width, _))| fold(cell, width)).collect();
    for line in 0..folded.iter().map(Vec::len).max().unwrap_or(0) {
        let mut text = String::new();
        for (lines, &(width, right)) in folded.iter().zip(columns) {
            let cell = lines.get(line).map_or("", String::as_str);
            text += &if right { format!("{cell:>width$}") } else { format!("{cell:<width$}") };
            text += &" ".repeat(GAP);
        }
        writeln!(f, "{}", text.trim_end())?;
    }
    Ok(())
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

fn strings(cells: impl IntoIterator<Item = impl ToString>) -> Vec<String> {
    cells.into_iter().map(|cell| cell.to_string()).collect()
}
