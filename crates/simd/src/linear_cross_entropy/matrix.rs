//! Products over tiles of bf16 ([`crate::lanes::matrix`]).
//!
//! Logits lie in bands of f32, as elsewhere. Their gradients, rounded once, take the place of a band: of every 32
//! tokens 32 tiles. The first 16 are those of 16 classes each, with pairs of tokens, the factor of dw. Of the
//! others, 8 belong to the first 16 tokens and 8 to the next; each is of 32 classes, with pairs of classes, the
//! factor of dh. In the second order a band has both x and da, of every 32 tokens in turn, as h and ddh along do: so
//! one product is the sum of x h and da ddh.

use crate::lanes::Lanes;
use crate::lanes::matrix::{
    BLOCK, F32, Matrix, MatrixKernel, Pairing, Pieces, Product, SIDE, Tiles, WORDS,
};
use crate::lanes::pairs::word;
use crate::lanes::prefetch::Lines;
use crate::tile::{BAND, STRIDE};
use etalon_problem::linear_cross_entropy::shard::TILE;
use std::ops::Range;

/// Words of a row of w that a thread copies at a time, at most: with the logits of a band they stay in the L2 cache.
pub const SLICE: usize = 512;

/// Tiles of 256 classes and 32 tokens, with pairs of tokens; and with either pairs.
const HALF: usize = TILE / SIDE;
const BOTH: usize = 2 * HALF;

/// C ← A · B or C + A · B, 32 columns at a time, of which B has both tiles `panel` tiles behind those before. It
/// asks for the next panel of B while one is multiplied.
#[inline(always)]
fn multiply<M: Matrix>(by: M, all: Product<'_>, panel: usize) {
    let Product { c, stride, fresh, a, b, rows, cols, depth } = all;
    for col in 0..cols / 2 {
        let right = &b.words[col * panel * WORDS..];
        let next = right.as_ptr().wrapping_add(panel * WORDS);
        // Both tiles of a step lie side by side, or in two runs.
        let run = depth * b.steps[1] * WORDS;
        let mut then = Lines::new(next, (2 / b.steps[1], run), b.steps[0] * WORDS);
        let asks = if col + 1 < cols / 2 { then.beyond(rows / 2, 0) } else { 0 };
        for row in (0..rows).step_by(2) {
            by.multiply(Product {
                c: &mut c[row * SIDE * stride + col * BLOCK..],
                stride,
                fresh,
                a: Tiles { words: &a.words[row * a.steps[0] * WORDS..], ..a },
                b: Tiles { words: right, ..b },
                rows: 2,
                cols: 2,
                depth,
            });
            then.ask_more(asks);
        }
    }
}

/// Adds to (C1) of a tile of classes and of the tokens of a band what some elements of h and w make of it.
pub struct Logits<'a> {
    /// Tiles of w, of so many words of each row, and of h, of `dim` words, from the first that is multiplied.
    pub w: &'a [f32],
    pub words: usize,
    pub h: &'a [f32],
    pub dim: usize,
    pub classes: usize,
    pub tokens: usize,
    /// `[padded][BAND]`; where `fresh`, whatever it holds.
    pub z: &'a mut [f32],
    pub fresh: bool,
}

impl MatrixKernel for Logits<'_> {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) {
        let Logits { w, words, h, dim, classes, tokens, z, fresh } = self;
        let product = Product {
            c: z,
            stride: BAND,
            fresh,
            a: Tiles { words: w, steps: [words / SIDE, 1] },
            b: Tiles { words: h, steps: [dim / SIDE, 1] },
            rows: whole(classes),
            cols: whole(tokens),
            depth: words / SIDE,
        };
        multiply(by, product, 2 * dim / SIDE);
    }
}

/// Tiles of 16 in whole blocks of `len`.
fn whole(len: usize) -> usize {
    2 * len.div_ceil(BLOCK)
}

/// Rounded gradients of logits, in bands.
#[derive(Clone, Copy)]
pub struct Rounded<'a> {
    /// From the first band that is read.
    pub pieces: Pieces<'a>,
    /// 1: da; 2: x and da.
    pub orders: usize,
}

impl<'a> Rounded<'a> {
    /// From a tile of a block of 32 tokens on, of the words of every piece.
    #[inline(always)]
    fn from(&self, block: usize, tile: usize) -> Pieces<'a> {
        self.pieces.from((block * BOTH * self.orders + tile) * WORDS)
    }
}

/// Rounds the gradients of the logits of a band.
pub struct Round<'a> {
    /// da, or x, `[padded][BAND]`. What is of no class or token becomes 0, up to whole blocks of classes.
    pub da: &'a mut [f32],
    pub classes: usize,
    pub tokens: usize,
    /// The bands of tiles of each piece, the second only of two.
    pub to: [&'a mut [f32]; 2],
    pub pieces: usize,
    /// The number of these gradients among those of the band, and how many these are.
    pub order: usize,
    pub orders: usize,
}

impl MatrixKernel for Round<'_> {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) {
        let Round { da, classes, tokens, to, pieces, order, orders } = self;
        let [to, of_rest] = to;
        let block = |token: usize| (token / BLOCK * orders + order) * BOTH;
        let lanes = F32::<M>::N;
        let rows = da.chunks_exact_mut(BAND).take(classes.next_multiple_of(BLOCK));
        for (class, row) in rows.enumerate() {
            row[if class < classes { tokens } else { 0 }..].fill(0.0);
        }
        for class in 0..classes.next_multiple_of(BLOCK) {
            let [tile, row] = [class / SIDE, class % SIDE];
            for token in (0..BAND).step_by(2 * lanes) {
                let at = block(token) + tile;
                let at = at * WORDS + row * SIDE + token % BLOCK / 2;
                let pair = [load(by, da, class, token), load(by, da, class, token + lanes)];
                let (first, rest) = Pairing::Neighbours.of(by, pair, pieces);
                first.store(&mut to[at..]);
                if let Some(rest) = rest {
                    rest.store(&mut of_rest[at..]);
                }
            }
            if class % 2 == 1 {
                continue;
            }
            let [tile, row] = [class / BLOCK, class % BLOCK / 2];
            for token in (0..BAND).step_by(lanes) {
                let at = block(token) + HALF + token % BLOCK / SIDE * HALF / 2 + tile;
                let at = at * WORDS + row * SIDE + token % SIDE;
                let pair = [load(by, da, class, token), load(by, da, class + 1, token)];
                let (first, rest) = Pairing::Stacked.of(by, pair, pieces);
                first.store(&mut to[at..]);
                if let Some(rest) = rest {
                    rest.store(&mut of_rest[at..]);
                }
            }
        }
    }
}

/// A register of a band.
#[inline(always)]
fn load<M: Matrix>(by: M, band: &[f32], class: usize, token: usize) -> F32<M> {
    F32::<M>::load(by.isa(), &band[class * BAND + token..])
}

/// (C17), or a sum of (C28): some elements of dh of some tokens, transposed, from one tile of classes.
pub struct HiddenLeaf<'a> {
    /// Bands of gradients, from the first of the tokens, and the number of those that are read.
    pub da: Rounded<'a>,
    pub order: usize,
    pub classes: usize,
    pub tokens: usize,
    /// These elements of the rows of w, or of ddw, in columns.
    pub w: &'a [f32],
    pub elements: usize,
    /// A row for every element, and more up to whole blocks; `stride` tokens; and whether they begin with 0.
    pub sums: &'a mut [f32],
    pub stride: usize,
    pub fresh: bool,
}

impl MatrixKernel for HiddenLeaf<'_> {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) {
        let HiddenLeaf { da, order, classes, tokens, w, elements, sums, stride, fresh } = self;
        let rows = whole(elements);
        for (piece, words) in da.from(0, order * BOTH + HALF).each().enumerate() {
            let product = Product {
                c: &mut *sums,
                stride,
                fresh: fresh && piece == 0,
                a: Tiles { words: w, steps: [1, rows] },
                b: Tiles { words, steps: [HALF / 2, 1] },
                rows,
                cols: whole(tokens),
                depth: classes.div_ceil(BLOCK),
            };
            multiply(by, product, BOTH * da.orders);
        }
    }
}

/// (C18), or (C29): some elements of dw of some classes of a tile, from some tokens.
pub struct HeadRows<'a> {
    /// Bands of gradients, and the first of the classes, which begins 16 of them.
    pub da: Rounded<'a>,
    pub first: usize,
    pub classes: usize,
    pub tokens: usize,
    /// These elements of the rows of h, along, in panels of so many tokens; with 2 `along` those of ddh, too.
    pub h: &'a [f32],
    pub along: usize,
    pub panel: usize,
    pub elements: usize,
    /// Rows [`STRIDE`] apart, up to whole blocks, and whether they begin with 0.
    pub sums: &'a mut [f32],
    pub fresh: bool,
}

impl MatrixKernel for HeadRows<'_> {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) {
        let HeadRows { da, first, classes, tokens, h, along, panel, elements, sums, fresh } = self;
        for part in parts(&da, tokens) {
            let (from, depth) = (part.start / BLOCK, part.len().div_ceil(BLOCK));
            for (piece, words) in da.from(from, first / SIDE).each().enumerate() {
                let product = Product {
                    c: &mut *sums,
                    stride: STRIDE,
                    fresh: fresh && part.start == 0 && piece == 0,
                    // x alone where there is no ddh.
                    a: Tiles { words, steps: [1, BOTH * da.orders / along] },
                    b: Tiles { words: &h[from * 2 * along * WORDS..], steps: [1, 2] },
                    rows: whole(classes),
                    cols: whole(elements),
                    depth: depth * along,
                };
                multiply(by, product, panel / SIDE * along);
            }
        }
    }
}

/// Tokens that are summed with one piece and then with the next: of one piece all, of two those of a band, since how
/// many bands come at once depends on the budget, and the order of a sum must not.
#[inline(always)]
fn parts(da: &Rounded<'_>, tokens: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let size = if da.pieces.count == 1 { tokens.max(1) } else { BAND };
    let starts = (0..tokens.max(1)).step_by(size);
    starts.map(
        #[inline(always)]
        move |start| start..tokens.min(start + size),
    )
}

/// (C19), or (C30), of the rounded gradients of logits, added to `sums`: [`HeadRows`] where h is 1.
pub struct BiasRows<'a> {
    pub da: Rounded<'a>,
    pub first: usize,
    pub tokens: usize,
    pub sums: &'a mut [f32],
    /// Rows [`STRIDE`] apart.
    pub scratch: &'a mut [f32],
}

impl MatrixKernel for BiasRows<'_> {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) {
        let BiasRows { da, first, tokens, sums, scratch } = self;
        let (ones, classes) = ([word(ONE, ONE); WORDS], sums.len());
        for (sum, row) in sums.iter().zip(scratch.chunks_mut(STRIDE)) {
            row[0] = *sum;
        }
        for part in parts(&da, tokens) {
            let (from, depth) = (part.start / BLOCK, part.len().div_ceil(BLOCK));
            for words in da.from(from, first / SIDE).each() {
                by.multiply(Product {
                    c: &mut *scratch,
                    stride: STRIDE,
                    fresh: false,
                    a: Tiles { words, steps: [1, BOTH * da.orders] },
                    b: Tiles { words: &ones, steps: [0, 0] },
                    rows: whole(classes),
                    cols: 2,
                    depth,
                });
            }
        }
        for (sum, row) in sums.iter_mut().zip(scratch.chunks(STRIDE)) {
            *sum = row[0];
        }
    }
}

/// 1 in bf16.
const ONE: u32 = 0x3f80;
