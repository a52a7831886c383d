//! Weights in tiles of bf16, and products with them pair by pair.

use super::pair::RegisterBlock;
use super::scores::Strip;
use crate::lanes::Lanes;
use crate::lanes::matrix::{
    BLOCK, F32, Matrix, Pairing, Pieces, Product, SIDE, Tiles, WORDS, element,
};
use crate::pack::Packed;
use crate::tile::{MAX_KEYS, STRIDE};

/// Tiles of weights side by side: of as many keys as a tile may have.
pub const PANELS: usize = MAX_KEYS / BLOCK;

/// Tiles of a right factor side by side: of as many keys as a tile may have.
pub const ACROSS: usize = MAX_KEYS / SIDE;

/// Words of the weights of 32 queries.
pub const OF_BLOCK: usize = ACROSS * WORDS;

/// C ← A Bᵀ of rows of queries and of keys, in the columns of a strip, or C + A Bᵀ unless it is `fresh`.
#[inline(always)]
pub fn product<M: Matrix>(
    by: M,
    at: &RegisterBlock,
    strip: &Strip,
    (queries, keys): (&Packed<'_>, &Packed<'_>),
    fresh: bool,
    to: &mut [f32],
) {
    // Tiles of a panel, which is two rows of them.
    let depth = queries.panel / (2 * WORDS);
    let a = Tiles { words: queries.from(at.rows.start / BLOCK), steps: [depth, 1] };
    let from = (at.cols.start + strip.cols.start) / BLOCK;
    let b = Tiles { words: keys.from(from), steps: [depth, 1] };
    let (c, cols) = (&mut to[strip.cols.start..], strip.cols.len() / SIDE);
    by.multiply(Product { c, stride: STRIDE, fresh, a, b, rows: 2, cols, depth });
}

/// Writes the words of two registers of weights into memory that holds as many of each piece.
#[inline(always)]
pub fn store<M: Matrix>(
    by: M,
    pairing: Pairing,
    pair: [F32<M>; 2],
    (to, at): (&mut [f32], usize),
    pieces: usize,
) {
    let (first, rest) = pairing.of(by, pair, pieces);
    first.store(&mut to[at..]);
    if let Some(rest) = rest {
        let apart = to.len() / pieces;
        rest.store(&mut to[apart + at..]);
    }
}

/// The weights of a block of 32 queries, as the left factor of a product.
pub struct Weights<'a> {
    /// `[2][PANELS]` tiles.
    pub p: Pieces<'a>,
    /// Marks of the pairs, rows [`MAX_KEYS`] apart.
    pub visible: &'a [u8],
    /// The first column of the strip.
    pub start: usize,
}

/// sum ← sum + weights · the rows that `words` holds along, pair by pair: a pair that is not visible must add nothing
/// at all, as 0 · NaN would be NaN. Slow, and only for operands that are not finite.
#[inline(always)]
pub fn add_visible(
    sum: &mut [f32],
    stride: usize,
    words: &[f32],
    weights: &Weights<'_>,
    (rows, cols): (usize, usize),
) {
    for (r, sum) in sum.chunks_mut(stride).enumerate().take(rows) {
        let line = r / SIDE * PANELS * WORDS + r % SIDE * SIDE;
        for j in 0..cols {
            let col = weights.start + j;
            if weights.visible[r * MAX_KEYS + col] == 0 {
                continue;
            }
            let p = weights.p.weight(line + col / BLOCK * WORDS + col % BLOCK / 2, col % 2);
            let panel = &words[j / BLOCK * (stride / SIDE) * WORDS + j % BLOCK / 2 * SIDE..];
            for (e, sum) in sum.iter_mut().enumerate() {
                *sum += p * element(panel[e / SIDE * WORDS + e % SIDE], j % 2);
            }
        }
    }
}
