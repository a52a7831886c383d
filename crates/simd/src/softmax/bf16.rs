//! Weights in tiles of bf16, and products with them pair by pair.

use crate::lanes::Lanes;
use crate::lanes::matrix::{BLOCK, F32, Matrix, Pairing, Pieces, SIDE, WORDS, element};
use crate::tile::MAX_KEYS;

/// Tiles of weights side by side: of as many keys as a tile may have.
pub const PANELS: usize = MAX_KEYS / BLOCK;

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
