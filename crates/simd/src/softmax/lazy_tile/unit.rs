//! The two ways to multiply of the kernels of lazy attention: registers of f32, and tiles of bf16.

use crate::lanes::matrix::{BLOCK, Matrix, Pieces, WORDS};
use crate::lanes::{Isa, Tile};
use crate::pack::Packed;
use crate::products::Sum;
use crate::softmax::bf16;
use crate::softmax::scores::{Block, Factors, Row, Strip, score_block, strip};
use crate::softmax::weights::Rows;
use crate::tile::{MAX_KEYS, MAX_ROWS, STRIDE};
use std::ops::Range;

/// A register beside a unit.
pub type F32<U> = <<U as Unit>::Isa as Isa>::F32;

/// A way to multiply. Methods are `#[inline(always)]`, always.
pub trait Unit: Copy {
    /// The instruction set of what stands between the products.
    type Isa: Isa;

    /// Rows of a block of queries, and columns of a panel of keys.
    const ROWS: usize;
    const COLS: usize;

    /// True if it rounds weights before it multiplies them.
    const ROUNDS: bool;

    fn isa(self) -> Self::Isa;

    /// Rows that are computed of a block, of which so many are left in the tile.
    fn rows(left: usize) -> usize;

    /// S of a block, and in `max` the largest of each row and lane; `None` if no pair of it is visible.
    fn scores(
        self,
        factors: &Factors<'_, '_>,
        block: &mut Block<'_>,
        max: &mut [F32<Self>; BLOCK],
    ) -> Option<Strip>;

    /// sum ← sum + weights · values, in some columns of a block.
    fn grow(self, sum: Sum<'_>, weights: &Rows<'_>, values: Values<'_>, words: Words<'_>);
}

/// The values of some columns of a block.
#[derive(Clone, Copy)]
pub struct Values<'a> {
    pub packed: &'a Packed<'a>,
    /// The keys of the tile.
    pub keys: &'a Range<usize>,
    /// The columns, from the tile's first; panels wide.
    pub cols: &'a Range<usize>,
}

/// Memory for the weights of a block as words.
pub struct Words<'a> {
    pub words: &'a mut [f32],
    /// Numbers of bf16 as whose sum a weight is multiplied.
    pub pieces: usize,
    /// Rows of the block that are computed.
    pub rows: usize,
}

/// Products in registers of f32.
#[derive(Clone, Copy)]
pub struct InRegisters<I>(pub I);

impl<I: Isa> Unit for InRegisters<I> {
    type Isa = I;

    const ROWS: usize = I::Tile::ROWS;
    const COLS: usize = I::Tile::COLS;
    const ROUNDS: bool = false;

    #[inline(always)]
    fn isa(self) -> I {
        self.0
    }

    #[inline(always)]
    fn rows(_: usize) -> usize {
        I::Tile::ROWS
    }

    #[inline(always)]
    fn scores(
        self,
        factors: &Factors<'_, '_>,
        block: &mut Block<'_>,
        max: &mut [I::F32; BLOCK],
    ) -> Option<Strip> {
        score_block(self.0, factors, block, max.first_chunk_mut::<MAX_ROWS>()?)
    }

    #[inline(always)]
    fn grow(self, sum: Sum<'_>, weights: &Rows<'_>, values: Values<'_>, _: Words<'_>) {
        weights.grow(self.0, sum, values.packed, values.keys, values.cols);
    }
}

/// Products in tiles of bf16.
#[derive(Clone, Copy)]
pub struct InTiles<M>(pub M);

impl<M: Matrix> Unit for InTiles<M> {
    type Isa = M::Isa;

    const ROWS: usize = BLOCK;
    const COLS: usize = BLOCK;
    const ROUNDS: bool = true;

    #[inline(always)]
    fn isa(self) -> M::Isa {
        self.0.isa()
    }

    #[inline(always)]
    fn rows(left: usize) -> usize {
        left.min(BLOCK)
    }

    #[inline(always)]
    fn scores(
        self,
        factors: &Factors<'_, '_>,
        block: &mut Block<'_>,
        max: &mut [F32<Self>; BLOCK],
    ) -> Option<Strip> {
        let strip = strip(factors, BLOCK)?;
        let (words, depth) = ([factors.q, factors.k], factors.dim.div_ceil(BLOCK));
        bf16::multiply_scores(self.0, words, depth, &strip, true, block.s);
        let bias = factors.rule.bias(&factors.rows, &factors.cols);
        for (r, max) in max.iter_mut().enumerate().take(factors.rows.len()) {
            let s = &mut block.s[r * STRIDE..][..STRIDE];
            let visible = &mut block.visible[r * MAX_KEYS..][..MAX_KEYS];
            let mut row = Row { r, s, tanh: &mut [], visible };
            *max = row.score(self.isa(), factors, &bias, &strip);
        }
        Some(strip)
    }

    #[inline(always)]
    fn grow(self, sum: Sum<'_>, weights: &Rows<'_>, values: Values<'_>, words: Words<'_>) {
        let Values { packed, keys, cols } = values;
        let Words { words, pieces, rows } = words;
        let (factor, first) = (packed.from((keys.start + cols.start) / BLOCK), cols.start);
        if weights.has_nonfinite {
            let end = cols.end.min(keys.len());
            bf16::add_pairs(
                (sum.acc, sum.stride),
                factor,
                (rows, end - first),
                #[inline(always)]
                |r, j| {
                    let touched = weights.visible[r * MAX_KEYS + first + j] & weights.pairs != 0;
                    if touched { Some(weights.weights[r * STRIDE + first + j]) } else { None }
                },
            );
            return;
        }
        bf16::round_rows(self.0, weights.weights, (rows, cols), words, pieces);
        let weights = Pieces::new(words, pieces).from(first / BLOCK * WORDS);
        bf16::multiply_rows(self.0, (sum.acc, sum.stride), weights, factor, cols.len() / BLOCK);
    }
}
