//! Operands in f32, or as pairs of bf16, laid out as products read them.

use super::tokens::Token;
use crate::element::Tensor;
use crate::lanes::pairs::word;
use crate::lanes::prefetch::prefetch;
use crate::pack::transpose;
use crate::parallel::share;
use crate::tile::STRIDE;
use crate::tiles::tiles;
use half::bf16;
use ndarray::{ArrayView1, ArrayView2, Ix2, s};
use std::ops::Range;

/// Elements of h that a thread reads before it transposes them.
const READ: usize = 1 << 11;

/// The rows of h of some tokens across: `[⌈tokens/width⌉][D][width]`, the last filled up with zeros; with
/// `pairs`, those of elements side by side, `[⌈tokens/width⌉][⌈D/2⌉][width]`.
pub fn across(
    h: Tensor<'_, Ix2>,
    tokens: &[Token],
    width: usize,
    (pairs, threads): (bool, usize),
    into: &mut [f32],
) {
    let pairs = h.bf16().filter(|_| pairs);
    let dim = h.shape()[1].div_ceil(if pairs.is_some() { 2 } else { 1 });
    let groups = tokens.chunks(width).zip(into.chunks_exact_mut(dim * width));
    share(
        0..threads,
        |_| [0.0; READ],
        groups,
        |(tokens, panel), read| {
            for cols in tiles(0..dim, READ / width / 4 * 4) {
                let wide = cols.len();
                read[tokens.len() * wide..width * wide].fill(0.0);
                for (token, row) in tokens.iter().zip(read.chunks_exact_mut(wide)) {
                    match pairs {
                        Some(h) => words(h.row(token.index), &cols, row),
                        None => h.read_rows(token.index..token.index + 1, cols.clone(), row, wide),
                    }
                }
                transpose(read, wide, wide, &mut panel[cols.start * width..], width);
            }
        },
    );
}

/// The rows of h of some tokens along: `[⌈D/width⌉][rows][width]`, columns beyond D filled up with zeros; with
/// `pairs`, those of tokens that follow each other, `[⌈D/width⌉][rows/2][width]`.
pub fn along(
    h: Tensor<'_, Ix2>,
    tokens: &[Token],
    (rows, width): (usize, usize),
    (pairs, threads): (bool, usize),
    into: &mut [f32],
) {
    let dim = h.shape()[1];
    let pairs = h.bf16().filter(|_| pairs);
    let each = if pairs.is_some() { 2 } else { 1 };
    let panels = tiles(0..dim, width).zip(into.chunks_exact_mut(rows / each * width));
    share(
        0..threads,
        |_| (),
        panels,
        |(cols, panel), ()| {
            for (tokens, row) in tokens.chunks(each).zip(panel.chunks_exact_mut(width)) {
                let first = tokens[0].index;
                match pairs {
                    Some(h) => couple(h, (first, tokens.get(1).map(|x| x.index)), &cols, row),
                    None => h.read_rows(first..first + 1, cols.clone(), row, width),
                }
                row[cols.len()..].fill(0.0);
            }
        },
    );
}

/// Some elements of rows of w as they are, or with `pairs` some of their words: `[…][STRIDE]`. The rows behind
/// the last, up to whole register blocks of `rows`, are 0.
pub fn slice(
    w: Tensor<'_, Ix2>,
    classes: &Range<usize>,
    elements: Range<usize>,
    (rows, pairs): (usize, bool),
    into: &mut [f32],
) {
    match w.bf16().filter(|_| pairs) {
        Some(w) => {
            for (class, into) in classes.clone().zip(into.chunks_mut(STRIDE)) {
                ask(w, class + AHEAD, &(2 * elements.start..2 * elements.end));
                words(w.row(class), &elements, into);
            }
        }
        None => w.read_rows(classes.clone(), elements, into, STRIDE),
    }
    let end = classes.len().next_multiple_of(rows);
    into[classes.len() * STRIDE..end * STRIDE].fill(0.0);
}

/// Some elements of rows of w, as pairs of classes that follow each other: `[⌈classes/2⌉][STRIDE]`.
pub fn class_pairs(
    w: ArrayView2<'_, bf16>,
    classes: &Range<usize>,
    elements: &Range<usize>,
    into: &mut [f32],
) {
    for (first, into) in classes.clone().step_by(2).zip(into.chunks_mut(STRIDE)) {
        let second = (first + 1 < classes.end).then_some(first + 1);
        [first, first + 1].into_iter().for_each(|row| ask(w, row + AHEAD, elements));
        couple(w, (first, second), elements, into);
    }
}

/// Rows are asked for so many before they are read.
const AHEAD: usize = 8;

/// Asks for some elements of a row, if there is such a row.
fn ask(x: ArrayView2<'_, bf16>, row: usize, cols: &Range<usize>) {
    if row < x.nrows()
        && let Some(row) = x.row(row).to_slice()
    {
        prefetch(&row[cols.start..cols.end.min(row.len())]);
    }
}

/// Some words of a row: pairs of its elements, the last perhaps with a 0.
fn words(row: ArrayView1<'_, bf16>, cols: &Range<usize>, into: &mut [f32]) {
    let row = row.slice_move(s![2 * cols.start..row.len().min(2 * cols.end)]);
    match row.to_slice() {
        Some(row) => {
            let (pairs, rest) = row.as_chunks::<2>();
            for (to, [even, odd]) in into.iter_mut().zip(pairs) {
                *to = pair(even, odd);
            }
            if let [last] = rest {
                into[pairs.len()] = pair(last, &bf16::ZERO);
            }
        }
        None => {
            for (to, even) in into.iter_mut().zip((0..row.len()).step_by(2)) {
                *to = pair(&row[even], row.get(even + 1).unwrap_or(&bf16::ZERO));
            }
        }
    }
}

/// Some elements of two rows side by side; zeros for a second that is not there.
fn couple(
    x: ArrayView2<'_, bf16>,
    (first, second): (usize, Option<usize>),
    cols: &Range<usize>,
    into: &mut [f32],
) {
    let row = |i: usize| x.slice_move(s![i, cols.clone()]);
    let (first, second) = (row(first), second.map(row));
    match (first.to_slice(), second.as_ref().and_then(|row| row.to_slice())) {
        (Some(first), Some(second)) => {
            let elements = first.iter().zip(second);
            into.iter_mut().zip(elements).for_each(|(to, (even, odd))| *to = pair(even, odd));
        }
        _ => {
            for (c, to) in into.iter_mut().enumerate().take(cols.len()) {
                *to = pair(&first[c], &second.map_or(bf16::ZERO, |row| row[c]));
            }
        }
    }
}

/// A word of two elements.
fn pair(even: &bf16, odd: &bf16) -> f32 {
    word(even.to_bits().into(), odd.to_bits().into())
}
