//! A report as Markdown: for a pull request or a CI summary.

use crate::html::entities;
use crate::page::{Block, Counted};
use crate::report::{Report, document};
use crate::room::Room;
use crate::units::margin;
use etalon_conformance::check::{Cell, Picture, Spread};
use etalon_problem::shortened;

/// The most bytes: a summary of a job that has a mebibyte is dropped without a word.
pub const LIMIT: usize = 900_000;

/// The bytes that are kept free for what closes it.
const CLOSING: usize = 2048;

/// The most characters of a text.
const TEXT: usize = 2000;

/// The report as Markdown.
pub fn markdown(report: &Report<'_>) -> String {
    let mut room = Room::new(LIMIT - CLOSING);
    room.mark(&format!("# {}\n", escape(&report.title())));
    for section in document(report) {
        room.part(section.end);
        room.mark(&format!("\n## {}\n", section.title));
        section.blocks.iter().for_each(|block| add(&mut room, block));
    }
    if let Some(text) = room.left_out() {
        room.mark(&left(text));
    }
    room.into_text()
}

fn add(room: &mut Room, block: &Block) {
    match block {
        Block::Title(text) => _ = room.add("title", &format!("\n### {}\n", escape(text))),
        Block::Text(text) => _ = room.add("paragraph", &format!("\n{}\n", escape(text))),
        Block::Items(items) => {
            let items = items.iter().map(|item| format!("- {}\n", escape(item)));
            room.list(("item", "\n", ""), items, left);
        }
        Block::Rows(rows) => table(room, rows.iter().cloned()),
        Block::Matrix(rows) => {
            let words = |row: &Vec<(_, String)>| row.iter().map(|cell| cell.1.clone()).collect();
            table(room, rows.iter().map(words));
        }
        Block::Command(line) => code(room, "sh", std::slice::from_ref(line)),
        Block::Code(lines) => code(room, "", lines),
        Block::Pictures(output, pictures) => {
            for picture in pictures {
                code(room, "text", &drawn(output, picture));
            }
        }
        Block::Spreads(names, rows) => {
            let more = ["number", "off", "worst", "margins: 0, 2⁻¹³ … 1 | … 2¹², ∞"];
            let head = names.iter().cloned().chain(more.map(String::from)).collect();
            table(room, std::iter::once(head).chain(rows.iter().map(counts)));
        }
        Block::Folded(title, blocks) => {
            let title = format!("\n<details><summary>{}</summary>\n", entities(title));
            if room.open("group", &title) {
                blocks.iter().for_each(|block| add(room, block));
                room.mark("\n</details>\n");
            }
        }
    }
}

/// A line about what is left out.
fn left(text: String) -> String {
    format!("\n{text}\n")
}

fn table(room: &mut Room, rows: impl Iterator<Item = Vec<String>>) {
    let rows = rows.enumerate().map(|(at, row)| match at {
        0 => format!("{}|{}\n", line(&row), " --- |".repeat(row.len())),
        _ => line(&row),
    });
    room.list(("row", "\n", ""), rows, left);
}

/// Lines between fences that are longer than all in them.
fn code(room: &mut Room, language: &str, lines: &[String]) {
    let lines: Vec<String> = lines.iter().map(|line| shortened(line, TEXT)).collect();
    let longest = lines.iter().flat_map(|line| line.split(|c| c != '`')).map(str::len).max();
    let fence = "`".repeat(longest.unwrap_or(0).max(2) + 1);
    let (open, close) = (format!("\n{fence}{language}\n"), format!("{fence}\n"));
    room.list(("line", &open, &close), lines.into_iter().map(|line| line + "\n"), left);
}

/// The most rows and columns of characters.
const ROWS: usize = 32;
const COLUMNS: usize = 64;

/// A picture in characters: a point is within the bounds, a digit d is off by up to 10^d times the bound.
fn drawn(output: &str, picture: &Picture) -> Vec<String> {
    let Picture { down, across, over, cells } = picture;
    let (rows, columns) = (down.cells(), across.cells());
    let joined = |cells: usize, most: usize| cells.div_ceil(most);
    let (high, wide) = (joined(rows, ROWS), joined(columns, COLUMNS));
    let over =
        if over.is_empty() { String::new() } else { format!(", worst of {}", over.join(", ")) };
    let down_name = if down.name.is_empty() { "" } else { &format!("{} ↓ × ", down.name) };
    let mut lines = vec![
        format!("{output}: {down_name}{} →{over}", across.name),
        format!(
            "a character: {} × {} entries; · within, d: up to 10^d bounds, N NaN, ∞ infinite",
            down.step * high,
            across.step * wide
        ),
    ];
    for top in (0..rows).step_by(high) {
        let mut line = format!("{:>6} ", top * down.step);
        for left in (0..columns).step_by(wide) {
            let own = (top..rows.min(top + high))
                .flat_map(|i| (left..columns.min(left + wide)).map(move |j| i * columns + j));
            let worst = own.fold(Cell::Free, |worst, i| worst.worse(cells[i]));
            line.push(character(worst));
        }
        lines.push(line.trim_end().to_string());
    }
    lines
}

fn character(cell: Cell) -> char {
    match cell {
        Cell::Free => ' ',
        Cell::NaN => 'N',
        Cell::Infinite => '∞',
        Cell::Margin(margin) if margin <= 1.0 => '·',
        Cell::Margin(margin) => {
            let digit = (1..9).find(|&d| margin <= 10f64.powi(d)).unwrap_or(9);
            char::from_digit(digit as u32, 10).unwrap_or('9')
        }
    }
}

/// A row of counted margins, with bars of eight heights.
fn counts(row: &Counted) -> Vec<String> {
    let Counted { names, spread, worst } = row;
    let mut bars = String::new();
    for (at, (count, share)) in spread.bars().enumerate() {
        if at == 1 + Spread::WITHIN {
            bars.push('|');
        }
        let height = (8.0 * share).ceil().clamp(0.0, 8.0) as u32;
        bars.push(if count == 0 { '·' } else { char::from_u32(0x2580 + height).unwrap_or('█') });
    }
    let cells = [spread.all().to_string(), spread.off().to_string(), margin(*worst), bars];
    names.iter().cloned().chain(cells).collect()
}

fn line(cells: &[String]) -> String {
    let cells: Vec<String> = cells.iter().map(|cell| escaped(cell, false)).collect();
    format!("| {} |\n", cells.join(" | "))
}

/// No character of a message may end a cell, a line or a list, or begin markup.
fn escape(text: &str) -> String {
    escaped(text, true)
}

/// The same of a text that begins a line, or does not.
fn escaped(text: &str, begins_line: bool) -> String {
    let (text, mut escaped) = (shortened(text, TEXT), String::new());
    let mut before = ' ';
    for (at, c) in text.char_indices() {
        // A word may have underlines in it.
        let in_word = before.is_alphanumeric() && c == '_';
        let begins = begins_line && at == 0 && matches!(c, '#' | '-' | '+' | '=' | '>');
        match c {
            '<' => escaped += "&lt;",
            '&' => escaped += "&amp;",
            _ if begins || !in_word && "\\`*_[|~".contains(c) => escaped.extend(['\\', c]),
            c => escaped.push(c),
        }
        before = c;
    }
    escaped
}
