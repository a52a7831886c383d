//! A report as one page of its own: no scripts, nothing from elsewhere, at most two megabytes.

mod bars;
mod heat;
mod style;

use crate::page::Block;
use crate::report::{Report, document};
use crate::room::Room;
use etalon_conformance::report::Status;
use etalon_problem::shortened;

/// The most bytes of a page. Browsers show as much at once.
pub const LIMIT: usize = 2_000_000;

/// The bytes that are kept free for what closes a page.
const CLOSING: usize = 4096;

/// The most characters of a text of a table or a list.
const TEXT: usize = 2000;

/// The most bytes of a cell that is not broken into lines.
const SHORT: usize = 24;

/// The report as a page in HTML, which is well-formed XML, too.
pub fn html(report: &Report<'_>) -> String {
    let mut room = Room::new(LIMIT - CLOSING);
    let (title, status) = (entities(&report.title()), report.status.name());
    room.mark(&format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<title>{title}</title>\n\
         <style>{}</style>\n</head>\n<body>\n<header class=\"{status}\">\n<p>{}</p>\n<h1>{}</h1>\n</header>\n<main>\n",
        style::STYLE,
        entities(report.command),
        entities(&report.verdict),
    ));
    for section in document(report) {
        room.part(section.end);
        room.mark(&format!("<section>\n<h2>{}</h2>\n", entities(section.title)));
        section.blocks.iter().for_each(|block| add(&mut room, block));
        room.mark("</section>\n");
    }
    if let Some(text) = room.left_out() {
        room.mark(&left(text));
    }
    room.mark("</main>\n</body>\n</html>\n");
    room.into_text()
}

fn add(room: &mut Room, block: &Block) {
    match block {
        Block::Title(text) => _ = room.add("title", &format!("<h3>{}</h3>\n", entities(text))),
        Block::Text(text) => _ = room.add("paragraph", &format!("<p>{}</p>\n", entities(text))),
        Block::Items(items) => {
            let items = items.iter().map(|item| format!("<li>{}</li>\n", entities(item)));
            room.list(("item", "<ul>\n", "</ul>\n"), items, left);
        }
        Block::Rows(rows) => {
            let plain = |row: &Vec<String>| row.iter().map(|x| (None, x.clone())).collect();
            table(room, &rows.iter().map(plain).collect::<Vec<_>>());
        }
        Block::Matrix(rows) => table(room, rows),
        Block::Command(line) => {
            _ = room.add("command", &format!("<pre>{}</pre>\n", entities(line)));
        }
        Block::Code(lines) => {
            let lines = lines.iter().map(|line| format!("{}\n", entities(line)));
            room.list(("line", "<pre>", "</pre>\n"), lines, left);
        }
        Block::Pictures(output, pictures) => {
            let figures: String = pictures.iter().map(|x| heat::figure(output, x)).collect();
            _ = room.add("picture", &format!("<div class=\"figures\">\n{figures}</div>\n"));
        }
        Block::Spreads(names, rows) => {
            room.list(("row", &bars::head(names), bars::FOOT), rows.iter().map(bars::row), left);
        }
        Block::Folded(title, blocks) => {
            let title = format!("<details>\n<summary>{}</summary>\n", entities(title));
            if room.open("group", &title) {
                blocks.iter().for_each(|block| add(room, block));
                room.mark("</details>\n");
            }
        }
    }
}

/// A line about what is left out.
fn left(text: String) -> String {
    format!("<p class=\"left\">{}</p>\n", entities(&text))
}

fn table(room: &mut Room, rows: &[Vec<(Option<Status>, String)>]) {
    let has_head = rows.first().is_some_and(|head| head.iter().any(|(_, text)| !text.is_empty()));
    let tag = |at: usize| if at == 0 { "th" } else { "td" };
    let row = |(at, row): (usize, &Vec<(Option<Status>, String)>)| {
        let tag = tag(at);
        let cell = |(status, text): &(Option<Status>, String)| match status {
            None if text.len() <= SHORT => {
                format!("<{tag} class=\"short\">{}</{tag}>", entities(text))
            }
            None => format!("<{tag}>{}</{tag}>", entities(text)),
            Some(own) => {
                let (class, mark) = (own.name(), mark(*own));
                format!("<{tag} class=\"{class}\">{mark} {}</{tag}>", entities(text))
            }
        };
        format!("<tr>{}</tr>\n", row.iter().map(cell).collect::<String>())
    };
    let rows = rows.iter().enumerate().skip(usize::from(!has_head)).map(row);
    room.list(("row", "<div class=\"wide\"><table>\n", "</table></div>\n"), rows, left);
}

/// A sign that tells a status without colours.
fn mark(status: Status) -> &'static str {
    match status {
        Status::Passed => "✓",
        Status::Undecided => "?",
        Status::Failed => "✗",
    }
}

/// A text in which no character is markup, of limited length. What does not print is escaped.
pub fn entities(text: &str) -> String {
    let text = shortened(text, TEXT);
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
