//! Scores with the maxima of their rows, which the forward pass of lazy attention asks of an [`Engine`].

use crate::lanes::matrix::{BLOCK, Matrix};
use crate::lanes::{Isa, Tile};
use crate::softmax::bf16;
use crate::softmax::engine::{Engine, InTiles, Register, Registers};
use crate::softmax::scores::{Block, Factors, Row, Strip, score_block, strip};
use crate::tile::{MAX_KEYS, MAX_ROWS, STRIDE};

/// An engine whose scores come with the maxima of their rows. Methods are `#[inline(always)]`, always.
pub trait Unit: Engine {
    /// True if it rounds weights before it multiplies them.
    const ROUNDS: bool;

    /// Rows that are computed of a block, of which so many are left in the tile.
    fn rows(left: usize) -> usize;

    /// S of a block, and in `max` the largest of each row and lane; `None` if no pair of it is visible.
    fn score_rows(
        self,
        factors: &Factors<'_, '_>,
        block: &mut Block<'_>,
        max: &mut [Register<Self>; BLOCK],
    ) -> Option<Strip>;
}

impl<I: Isa> Unit for Registers<I> {
    const ROUNDS: bool = false;

    #[inline(always)]
    fn rows(_: usize) -> usize {
        I::Tile::ROWS
    }

    #[inline(always)]
    fn score_rows(
        self,
        factors: &Factors<'_, '_>,
        block: &mut Block<'_>,
        max: &mut [I::F32; BLOCK],
    ) -> Option<Strip> {
        score_block(self.0, factors, block, max.first_chunk_mut::<MAX_ROWS>()?)
    }
}

impl<M: Matrix> Unit for InTiles<M> {
    const ROUNDS: bool = true;

    #[inline(always)]
    fn rows(left: usize) -> usize {
        left.min(BLOCK)
    }

    #[inline(always)]
    fn score_rows(
        self,
        factors: &Factors<'_, '_>,
        block: &mut Block<'_>,
        max: &mut [Register<Self>; BLOCK],
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
}
