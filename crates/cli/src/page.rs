//! A report as a list of blocks, which a terminal, Markdown and HTML show alike.

use crate::markdown::{escape, line};
use crate::table::{PAGE, Table, columns, fold, page};
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
    /// A line for a shell.
    Command(String),
}

/// The columns before an item of a list: an indent, and its mark.
const MARK: usize = 4;

/// For a terminal.
pub fn terminal(blocks: &[Block]) -> String {
    let block = |block: &Block| match block {
        Block::Title(text) | Block::Text(text) => page(text),
        Block::Items(items) => {
            items.iter().map(|item| indented(item)).collect::<Vec<_>>().join("\n")
        }
        Block::Rows(rows) => {
            let mut rows = rows.iter();
            let mut table = Table::new(rows.next().into_iter().flatten());
            rows.for_each(|row| table.add_row(row));
            table.to_string()
        }
        // It is to be copied: no line of it may break.
        Block::Command(line) => format!("  {line}"),
    };
    blocks.iter().map(block).collect::<Vec<_>>().join("\n")
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

/// For a pull request.
pub fn markdown(title: &str, blocks: &[Block]) -> String {
    let mut text = format!("# {}\n", escape(title));
    for block in blocks {
        text += "\n";
        match block {
            Block::Title(title) => text += &format!("## {}\n", escape(title)),
            Block::Text(paragraph) => text += &format!("{}\n", escape(paragraph)),
            Block::Items(items) => {
                items.iter().for_each(|item| text += &format!("- {}\n", escape(item)));
            }
            Block::Rows(rows) => {
                for (index, row) in rows.iter().enumerate() {
                    text += &line(row);
                    if index == 0 {
                        text += &line(&vec!["---".to_string(); row.len()]);
                    }
                }
            }
            Block::Command(line) => text += &format!("```sh\n{line}\n```\n"),
        }
    }
    text
}

const STYLE: &str = "body { font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em } \
    td, th { padding: 0.2em 1em 0.2em 0; text-align: left } pre { background: #eee; padding: 0.5em }";

/// A page of its own, without scripts and without anything from elsewhere.
pub fn html(title: &str, blocks: &[Block]) -> String {
    let mut text = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>{title}</title>\n\
         <style>{STYLE}</style>\n<h1>{title}</h1>\n",
        title = entities(title)
    );
    for block in blocks {
        text += &match block {
            Block::Title(title) => format!("<h2>{}</h2>\n", entities(title)),
            Block::Text(paragraph) => format!("<p>{}</p>\n", entities(paragraph)),
            Block::Items(items) => {
                let items: String =
                    items.iter().map(|item| format!("<li>{}</li>\n", entities(item))).collect();
                format!("<ul>\n{items}</ul>\n")
            }
            Block::Rows(rows) => {
                let rows = rows.iter().enumerate().map(|(at, row)| {
                    let tag = if at == 0 { "th" } else { "td" };
                    let cells: String =
                        row.iter().map(|x| format!("<{tag}>{}</{tag}>", entities(x))).collect();
                    format!("<tr>{cells}</tr>\n")
                });
                format!("<table>\n{}</table>\n", rows.collect::<String>())
            }
            Block::Command(line) => format!("<pre>{}</pre>\n", entities(line)),
        };
    }
    text + "</html>\n"
}

/// No character of a text is markup.
fn entities(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
