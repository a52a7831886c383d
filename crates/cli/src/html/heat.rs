//! A picture of margins as SVG.

use super::entities;
use etalon_conformance::check::{Cell, Picture, Side};
use std::fmt::Write;

/// Pixels of a side that has many cells, and of the sides of a cell.
const SIDE: usize = 320;
const SMALLEST: usize = 5;
const LARGEST: usize = 24;

/// Pixels before and above the cells, for numbers.
const LEFT: usize = 44;
const TOP: usize = 20;

/// Pixels between two numbers of a side.
const APART: [usize; 2] = [14, 34];

/// The levels of a cell, each with the largest margin of it; the third is the last within the bounds.
const LEVELS: [(f64, &str); 7] = [
    (0.0625, "up to 1/16"),
    (0.25, "up to 1/4"),
    (1.0, "up to 1"),
    (10.0, "off: up to 10"),
    (100.0, "up to 100"),
    (1e4, "up to 10⁴"),
    (f64::INFINITY, "more"),
];

/// The sign of a cell that is no number, from its corner, and its name.
const SIGNS: [(Cell, &str, &str); 2] =
    [(Cell::NaN, "m.2 .2l.6 .6m0-.6l-.6 .6", "NaN"), (Cell::Infinite, "m.2 .8l.6-.6", "infinite")];

fn level(cell: Cell) -> Option<usize> {
    let last = LEVELS.len() - 1;
    match cell {
        Cell::Free => None,
        Cell::Margin(margin) => Some(LEVELS.iter().position(|x| margin <= x.0).unwrap_or(last)),
        Cell::Infinite | Cell::NaN => Some(last),
    }
}

/// A picture with its numbers, its legend and a line that says what it shows.
pub fn figure(output: &str, picture: &Picture) -> String {
    let Picture { down, across, cells, .. } = picture;
    let (rows, columns) = (down.cells(), across.cells());
    let size = |n: usize| (SIDE / n.max(1)).clamp(SMALLEST, LARGEST);
    let (high, wide) = (size(rows), size(columns));
    let (width, height) = (LEFT + columns * wide + 12, TOP + rows * high + 10);
    let title = entities(&title(output, picture));
    let mut svg = format!(
        "<figure>\n<svg width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" role=\"img\">\
         <title>{title}</title>\n<g transform=\"translate({LEFT} {TOP}) scale({wide} {high})\">\n"
    );
    for at in 0..LEVELS.len() {
        let path = runs(columns, |i| level(cells[i]) == Some(at), cells.len());
        if !path.is_empty() {
            svg += &format!("<path class=\"l{at}\" d=\"{path}\"/>\n");
        }
    }
    for (kind, mark, _) in SIGNS {
        let own = (0..cells.len()).filter(|&i| cells[i] == kind);
        let path: String = own.map(|i| format!("M{} {}{mark}", i % columns, i / columns)).collect();
        if !path.is_empty() {
            svg += &format!("<path class=\"x\" d=\"{path}\"/>\n");
        }
    }
    svg += &lines(down, across);
    svg += &format!("<path class=\"edge\" d=\"M0 0h{columns}v{rows}h-{columns}z\"/>\n</g>\n");
    svg += &numbers(down, across, (wide, high));
    format!("{svg}</svg>\n<figcaption>{title}</figcaption>\n{}</figure>\n", key(cells))
}

/// A picture in words.
fn title(output: &str, picture: &Picture) -> String {
    let Picture { down, across, over, cells } = picture;
    let mut text = match down.name.is_empty() {
        true => format!("{output}: error ÷ bound over {}", across.name),
        false => {
            format!(
                "{output}: error ÷ bound, {} from top to bottom, {} from left to right",
                down.name, across.name
            )
        }
    };
    if !over.is_empty() {
        text += &format!(", the worst of all {}", over.join(", "));
    }
    text += &match (down.step, across.step) {
        (1, 1) => ".".to_string(),
        (i, j) => format!(". A cell is the worst of {i} × {j} entries."),
    };
    for side in [down, across] {
        let Some(tile) = side.lines else { continue };
        let at = if side.at_lines { ", where errors begin and end" } else { "" };
        // Writing to a string does not fail.
        let _ = write!(text, " Lines: every {tile} of {}{at}.", side.name);
    }
    let off = cells.iter().filter(|cell| cell.is_off()).count();
    let _ = write!(text, " {off} of {} cells are off.", cells.len());
    text
}

/// Rectangles of cells that stand side by side, as a path.
fn runs(columns: usize, has: impl Fn(usize) -> bool, cells: usize) -> String {
    let (mut path, mut at) = (String::new(), 0);
    while at < cells {
        let end = (at / columns + 1) * columns;
        let run = (at..end).take_while(|&i| has(i)).count();
        if run > 0 {
            let (x, y) = (at % columns, at / columns);
            // Writing to a string does not fail.
            let _ = write!(path, "M{x} {y}h{run}v1h-{run}z");
        }
        at += run.max(1);
    }
    path
}

/// The lines of tiles of both sides.
fn lines(down: &Side, across: &Side) -> String {
    let mut path = String::new();
    let (rows, columns) = (down.cells(), across.cells());
    for at in places(down) {
        // Writing to a string does not fail.
        let _ = write!(path, "M0 {}h{columns}", at as f64 / down.step as f64);
    }
    for at in places(across) {
        let _ = write!(path, "M{} 0v{rows}", at as f64 / across.step as f64);
    }
    if path.is_empty() { path } else { format!("<path class=\"tile\" d=\"{path}\"/>\n") }
}

/// The entries at which lines stand.
fn places(side: &Side) -> impl Iterator<Item = usize> + '_ {
    side.lines
        .into_iter()
        .flat_map(|tile| (1..).map(move |n| n * tile))
        .take_while(|at| *at < side.extent)
}

/// Numbers of entries beside the cells: the first, those at lines, the last; as many as there is room for.
fn numbers(down: &Side, across: &Side, (wide, high): (usize, usize)) -> String {
    let mut text = String::new();
    let sides = [(down, high, true), (across, wide, false)];
    for (side, size, is_down) in sides.into_iter().filter(|(side, ..)| !side.name.is_empty()) {
        let apart = APART[usize::from(!is_down)];
        let pixel = |entry: usize| entry * size / side.step;
        let last = side.extent - 1;
        let mut shown: Vec<usize> = vec![0];
        for at in places(side).chain([last]) {
            let before = shown.last().map_or(0, |&at| pixel(at));
            let room =
                pixel(at) >= before + apart && (at == last || pixel(at) + apart <= pixel(last));
            if room {
                shown.push(at);
            }
        }
        for at in shown {
            let middle = pixel(at) + size / 2;
            text += &match is_down {
                true => {
                    let (x, y) = (LEFT - 6, TOP + middle + 4);
                    format!("<text x=\"{x}\" y=\"{y}\" text-anchor=\"end\">{at}</text>\n")
                }
                false => {
                    let (x, y) = (LEFT + middle, TOP - 6);
                    format!("<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\">{at}</text>\n")
                }
            };
        }
    }
    text
}

/// The levels and signs that a picture has.
fn key(cells: &[Cell]) -> String {
    let swatch = |class: usize, mark: &str, words: &str| {
        format!(
            "<li><svg width=\"12\" height=\"12\" viewBox=\"0 0 1 1\"><path class=\"l{class}\" d=\"M0 0h1v1H0z\"/>\
             {mark}<path class=\"edge\" d=\"M0 0h1v1H0z\"/></svg>{words}</li>\n"
        )
    };
    let mut text = String::from("<ul class=\"key\">\n");
    for (at, (_, words)) in LEVELS.iter().enumerate() {
        let is_number = |cell: &Cell| matches!(cell, Cell::Margin(_)) && level(*cell) == Some(at);
        if cells.iter().any(is_number) {
            text += &swatch(at, "", words);
        }
    }
    let last = LEVELS.len() - 1;
    for (_, mark, words) in SIGNS.iter().filter(|(kind, ..)| cells.contains(kind)) {
        text += &swatch(last, &format!("<path class=\"x\" d=\"{mark}\"/>"), words);
    }
    if cells.contains(&Cell::Free) {
        text += "<li>blank: nothing is required</li>\n";
    }
    text + "</ul>\n"
}
