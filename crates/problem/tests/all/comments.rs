//! Comments of the workspace open with a noun or a verb, and lie below 120 columns.

use crate::files::{below, root};
use std::fs;

/// Words that open a clause in place of the name of a thing.
const CLAUSES: [&str; 9] =
    ["What", "Which", "Whose", "Where", "Whether", "Those", "That", "How", "Who"];

/// Endings of the names of sources.
const SOURCES: [&str; 8] = [".rs", ".cu", ".cuh", ".h", ".c", ".cpp", ".py", ".sh"];

/// Columns that a line has at most.
const COLUMNS: usize = 119;

/// The text of the comment of a line, and whether the line has nothing else; in Python and shell by `#`, or the
/// opening of a docstring.
fn comment(line: &str, script: bool) -> Option<(&str, bool)> {
    let trimmed = line.trim_start();
    let marks: &[&str] = if script { &["# ", "#"] } else { &["///", "//!", "//"] };
    let whole = marks.iter().find_map(|mark| trimmed.strip_prefix(mark));
    if let Some(text) = whole.filter(|_| !trimmed.starts_with("#!")) {
        return Some((text.trim_start_matches([' ', '*', '-']), true));
    }
    let docstring = trimmed.strip_prefix("\"\"\"").filter(|_| script);
    let behind = line.split_once(if script { " # " } else { " // " }).map(|(_, text)| text);
    docstring.or(behind).map(|text| (text.trim_start(), false))
}

/// The numbers of the lines whose comment opens with a clause, or is too wide.
fn faults(text: &str, script: bool) -> Vec<usize> {
    let mut faults = Vec::new();
    // True within a paragraph of a comment, whose further lines open nothing.
    let mut within = false;
    for (number, line) in text.lines().enumerate() {
        let Some((comment, whole)) = comment(line, script) else {
            within = false;
            continue;
        };
        let first = comment.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
        let opens = !whole || !within;
        if opens && CLAUSES.contains(&first) || whole && line.chars().count() > COLUMNS {
            faults.push(number + 1);
        }
        within = whole && !comment.is_empty();
    }
    faults
}

#[test]
fn comments_open_with_a_noun_or_a_verb() {
    let (root, mut found, mut files) = (root(), Vec::new(), 0);
    for path in
        ["crates", "benches", "python"].into_iter().flat_map(|folder| below(&root.join(folder)))
    {
        let name = path.strip_prefix(&root).unwrap().display().to_string();
        if !SOURCES.iter().any(|ending| name.ends_with(ending)) {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let script = [".py", ".sh"].iter().any(|ending| name.ends_with(ending));
        let faults = faults(&text, script);
        files += 1;
        found.extend(faults.into_iter().map(|line| format!("{name}:{line}")));
    }
    assert!(files > 500, "only {files} files were read");
    assert!(found.is_empty(), "open with a clause, or are wider than {COLUMNS}: {found:#?}");
}

#[test]
fn a_clause_is_found_wherever_a_comment_opens() {
    let text = [
        "//! What it is.",
        "//! Where it lies, on a line that opens nothing.",
        "//!",
        "//! * How it goes.",
        "",
        concat!("let x = 1;", " ", "// Whether so"),
        "/// A noun.",
    ];
    assert_eq!(faults(&text.join("\n"), false), [1, 4, 6]);
    let text = [
        "#!/usr/bin/env Which",
        "# Those",
        "# That, on a line that opens nothing",
        "x = 1  # How",
        "def f():",
        "    \"\"\"Which it is.\"\"\"",
        "#",
        "# Whose",
    ];
    assert_eq!(faults(&text.join("\n"), true), [2, 4, 6, 8]);
    let wide = format!("// {}\nlet y = \"{}\";", "é".repeat(117), "x".repeat(200));
    assert_eq!(faults(&wide, false), [1]);
    assert!(faults(&wide.replace("éé", "é"), false).is_empty());
}
