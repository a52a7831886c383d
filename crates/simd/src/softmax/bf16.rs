//! Products of bf16 that passes share: of scores, and with weights in tiles.

use super::pair::RegisterBlock;
use super::scores::Strip;
use super::scratch::Words;
use super::weights::Rows;
use crate::lanes::Lanes;
use crate::lanes::matrix::{
    BLOCK, F32, Matrix, Pairing, Pieces, Product, SIDE, Tiles, WORDS, element,
};
use crate::pack::Packed;
use crate::products::Sum;
use crate::tile::{MAX_KEYS, STRIDE};
use std::ops::Range;

/// Tiles of weights side by side: of as many keys as a tile may have.
pub const PANELS: usize = MAX_KEYS / BLOCK;

/// Tiles of a right factor side by side: of as many keys as a tile may have.
pub const ACROSS: usize = MAX_KEYS / SIDE;

/// Words of the weights of 32 queries.
pub const OF_BLOCK: usize = ACROSS * WORDS;

/// The word of row `r` and column `col` in the tiles of a left factor of 32 rows.
#[inline(always)]
fn word_at(r: usize, col: usize) -> usize {
    let line = r / SIDE * PANELS * WORDS + r % SIDE * SIDE;
    line + col / BLOCK * WORDS + col % BLOCK / 2
}

/// C ← Q Kᵀ of a block of 32 queries, in the columns of a strip of a tile of keys, or C + Q Kᵀ unless it is `fresh`.
/// The words of the factors, of `depth` tiles a row, begin with the block, and with the tile.
#[inline(always)]
pub fn multiply_scores<M: Matrix>(
    by: M,
    [q, k]: [&[f32]; 2],
    depth: usize,
    strip: &Strip,
    fresh: bool,
    c: &mut [f32],
) {
    let (from, cols) = (strip.cols.start / SIDE * depth * WORDS, strip.cols.len() / SIDE);
    let a = Tiles { words: q, steps: [depth, 1] };
    let b = Tiles { words: &k[from..], steps: [depth, 1] };
    let c = &mut c[strip.cols.start..];
    by.multiply(Product { c, stride: STRIDE, fresh, a, b, rows: 2, cols, depth });
}

/// sum ← sum + weights · the rows that `words` holds along, of which `depth` panels of 32 are summed.
#[inline(always)]
pub fn multiply_rows<M: Matrix>(
    by: M,
    (sum, stride): (&mut [f32], usize),
    weights: Pieces<'_>,
    words: &[f32],
    depth: usize,
) {
    let cols = stride / SIDE;
    let b = Tiles { words, steps: [1, cols] };
    for words in weights.each() {
        let a = Tiles { words, steps: [PANELS, 1] };
        by.multiply(Product { c: &mut *sum, stride, fresh: false, a, b, rows: 2, cols, depth });
    }
}

/// Makes words of the weights of 32 rows in some columns, which lie [`STRIDE`] apart: those of a left factor.
#[inline(always)]
fn round_rows<M: Matrix>(
    by: M,
    weights: &[f32],
    cols: &Range<usize>,
    words: &mut [f32],
    pieces: usize,
) {
    let (isa, lanes) = (by.isa(), F32::<M>::N);
    for (r, row) in weights.chunks(STRIDE).enumerate().take(BLOCK) {
        for col in cols.clone().step_by(2 * lanes) {
            let pair = [F32::<M>::load(isa, &row[col..]), F32::<M>::load(isa, &row[col + lanes..])];
            Pairing::Neighbours.store(by, pair, (&mut *words, word_at(r, col)), pieces);
        }
    }
}

/// sum ← sum + weights · the rows of `keys`, in the columns `strip` of a tile of keys `cols`: rounded to words, or of
/// operands that are not finite pair by pair, as 0 · NaN would be NaN.
#[inline(always)]
pub fn grow_rows<M: Matrix>(
    by: M,
    weights: &Rows<'_>,
    Sum { acc, stride }: Sum<'_>,
    keys: &Packed<'_>,
    [cols, strip]: [&Range<usize>; 2],
    Words { memory, pieces }: &mut Words<'_>,
) {
    let factor = keys.from((cols.start + strip.start) / BLOCK);
    if weights.has_nonfinite {
        let seen = strip.start..strip.end.min(cols.len());
        add_pairs(
            (acc, stride),
            factor,
            (BLOCK, seen.len()),
            #[inline(always)]
            |r, j| {
                let col = seen.start + j;
                let touched = weights.visible[r * MAX_KEYS + col] & weights.pairs != 0;
                if touched { Some(weights.weights[r * STRIDE + col]) } else { None }
            },
        );
        return;
    }
    round_rows(by, weights.weights, strip, memory, *pieces);
    let words = Pieces::new(memory, *pieces).from(strip.start / BLOCK * WORDS);
    multiply_rows(by, (acc, stride), words, factor, strip.len() / BLOCK);
}

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
    let factors = [queries.from(at.rows.start / BLOCK), keys.from(at.cols.start / BLOCK)];
    multiply_scores(by, factors, depth, strip, fresh, to);
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
    size: (usize, usize),
) {
    add_pairs(
        (sum, stride),
        words,
        size,
        #[inline(always)]
        |r, j| {
            let col = weights.start + j;
            let seen = weights.visible[r * MAX_KEYS + col] != 0;
            if seen { Some(weights.p.weight(word_at(r, col), col % 2)) } else { None }
        },
    );
}

/// The same, where a pair of row `r` and column `j` has the weight `weight(r, j)`, or `None` and adds nothing.
#[inline(always)]
fn add_pairs(
    (sum, stride): (&mut [f32], usize),
    words: &[f32],
    (rows, cols): (usize, usize),
    weight: impl Fn(usize, usize) -> Option<f32>,
) {
    for (r, sum) in sum.chunks_mut(stride).enumerate().take(rows) {
        for j in 0..cols {
            let Some(p) = weight(r, j) else { continue };
            let panel = &words[j / BLOCK * (stride / SIDE) * WORDS + j % BLOCK / 2 * SIDE..];
            for (e, sum) in sum.iter_mut().enumerate() {
                *sum += p * element(panel[e / SIDE * WORDS + e % SIDE], j % 2);
            }
        }
    }
}

/// sumᵀ ← sumᵀ + rowsᵀ · weights of rows of queries that `words` holds in columns, `tall` tiles each, pair by pair: a
/// pair of row `i` and column `j` has the weight `weight(i, j)`, or `None` and adds nothing.
#[inline(always)]
pub fn add_column_pairs(
    sum: &mut [f32],
    (words, tall): (&[f32], usize),
    [rows, cols]: [Range<usize>; 2],
    weight: impl Fn(usize, usize) -> Option<f32>,
) {
    for i in rows {
        let panel = &words[i / BLOCK * tall * WORDS + i % BLOCK / 2..];
        for j in cols.clone() {
            let Some(weight) = weight(i, j) else { continue };
            for d in 0..tall * SIDE {
                let x = element(panel[d / SIDE * WORDS + d % SIDE * SIDE], i % 2);
                sum[d * STRIDE + j] += x * weight;
            }
        }
    }
}
