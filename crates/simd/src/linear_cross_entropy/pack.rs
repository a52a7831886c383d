//! Operands laid out as products read them: in f32, or of bf16 in tiles.

use super::tokens::Token;
use crate::element::Tensor;
use crate::lanes::matrix::{BLOCK, WORDS};
use crate::pack::{BitRows, Form, transpose};
use crate::parallel::share;
use crate::tile::STRIDE;
use crate::tiles::tiles;
use half::bf16;
use ndarray::{ArrayView2, Ix2};
use std::ops::Range;

/// Elements of h that a thread reads before it transposes them.
const READ: usize = 1 << 11;

/// The rows of h of some tokens across: `[⌈tokens/width⌉][D][width]`, the last filled up with zeros.
pub fn across(
    h: Tensor<'_, Ix2>,
    tokens: &[Token],
    width: usize,
    threads: usize,
    into: &mut [f32],
) {
    let dim = h.shape()[1];
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
                    h.read_rows(token.index..token.index + 1, cols.clone(), row, wide);
                }
                transpose(read, wide, wide, &mut panel[cols.start * width..], width);
            }
        },
    );
}

/// The rows of h of some tokens along: `[⌈D/width⌉][rows][width]`, columns beyond D filled up with zeros.
pub fn along(
    h: Tensor<'_, Ix2>,
    tokens: &[Token],
    (rows, width): (usize, usize),
    threads: usize,
    into: &mut [f32],
) {
    let panels = tiles(0..h.shape()[1], width).zip(into.chunks_exact_mut(rows * width));
    share(
        0..threads,
        |_| (),
        panels,
        |(cols, panel), ()| {
            for (token, row) in tokens.iter().zip(panel.chunks_exact_mut(width)) {
                h.read_rows(token.index..token.index + 1, cols.clone(), row, width);
                row[cols.len()..].fill(0.0);
            }
        },
    );
}

/// The rows of h of some tokens across, in tiles: those of 32 tokens, and of these those of 16.
pub fn across_tiles(h: ArrayView2<'_, bf16>, tokens: &[Token], threads: usize, into: &mut [f32]) {
    let (dim, rows) = (h.ncols(), BitRows::new(h));
    let panels = tokens.chunks(BLOCK).zip(into.chunks_mut(Form::len(BLOCK, dim).max(1)));
    share(
        0..threads,
        |_| (),
        panels,
        |(tokens, panel), ()| {
            let number = |i: usize| Some(tokens.get(i)?.index);
            Form::Across.pack(&rows, number, 0..dim, panel);
        },
    );
}

/// The rows of h of some tokens along, in tiles: panels of 32 elements and `rows` tokens, and of these those of 32;
/// with ddh, if there is one, those of h and then those of ddh.
pub fn along_tiles(
    (h, ddh): (ArrayView2<'_, bf16>, Option<ArrayView2<'_, bf16>>),
    tokens: &[Token],
    (rows, threads): (usize, usize),
    into: &mut [f32],
) {
    let all = [Some(BitRows::new(h)), ddh.map(BitRows::new)];
    let all = &all;
    let count = all.iter().flatten().count();
    let panels = tiles(0..h.ncols(), BLOCK).zip(into.chunks_mut(count * Form::len(rows, BLOCK)));
    share(
        0..threads,
        |_| (),
        panels,
        |(cols, panel), ()| {
            for (tokens, blocks) in tokens.chunks(BLOCK).zip(panel.chunks_mut(count * 2 * WORDS)) {
                let number = |i: usize| Some(tokens.get(i)?.index);
                for (rows, block) in all.iter().flatten().zip(blocks.chunks_mut(2 * WORDS)) {
                    Form::Along.pack(rows, number, cols.clone(), block);
                }
            }
        },
    );
}

/// Some elements of rows of w in tiles.
pub fn class_tiles(
    w: &BitRows<'_>,
    classes: &Range<usize>,
    elements: &Range<usize>,
    form: Form,
    into: &mut [f32],
) {
    let panels = into.chunks_mut(Form::len(BLOCK, elements.len()).max(1));
    for (classes, panel) in tiles(classes.clone(), BLOCK).zip(panels) {
        let number = |i| Some(classes.start + i).filter(|i| classes.contains(i));
        form.pack(w, number, elements.clone(), panel);
    }
}

/// Some elements of rows of w as they are: `[…][STRIDE]`. The rows behind the last, up to whole register blocks of
/// `rows`, are 0.
pub fn slice(
    w: Tensor<'_, Ix2>,
    classes: &Range<usize>,
    elements: Range<usize>,
    rows: usize,
    into: &mut [f32],
) {
    w.read_rows(classes.clone(), elements, into, STRIDE);
    let end = classes.len().next_multiple_of(rows);
    into[classes.len() * STRIDE..end * STRIDE].fill(0.0);
}
