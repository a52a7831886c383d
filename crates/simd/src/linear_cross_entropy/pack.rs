//! Operands in f32, laid out as products read them.

use super::tokens::Token;
use crate::element::Tensor;
use crate::pack::transpose;
use crate::parallel::share;
use crate::tile::STRIDE;
use crate::tiles::tiles;
use ndarray::Ix2;
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
    let dim = h.shape()[1];
    let panels = tiles(0..dim, width).zip(into.chunks_exact_mut(rows * width));
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

/// Some elements of rows of w as they are: `[…][STRIDE]`. The rows behind the last, up to whole register
/// blocks of `rows`, are 0.
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
