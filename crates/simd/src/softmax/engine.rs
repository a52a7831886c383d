//! The two ways to compute a block of weights and its sums: in registers of f32, or in tiles of bf16. All that bodies
//! do between products is the same, in f32.
//!
//! In tiles a block is 32 queries, and a panel 32 keys. The weights of a block lie in rows of f32, as those of
//! registers do; a sum rounds them to words just before it multiplies them: for sums of queries neighbours, for those
//! of keys pairs of two queries, of which the sums are transposed.

use super::bf16::{self, ACROSS, OF_BLOCK};
use super::packs::Both;
use super::pair::{Pair, RegisterBlock};
use super::scores::{Block, Row, Strip, score_block, strip};
use super::scratch::{TileMemory, Words};
use super::weights::{self, Columns, Rows};
use crate::Level;
use crate::lanes::matrix::{
    BLOCK, F32, Matrix, MatrixKernel, Pairing, Pieces, Product, SIDE, Tiles, WORDS,
};
use crate::lanes::{Isa, Kernel, Lanes, Tile};
use crate::pack::Packed;
use crate::products::Sum;
use crate::tile::{MAX_KEYS, MAX_ROWS, STRIDE};
use std::ops::Range;

/// The products of a block, beside its registers.
pub trait Engine: Copy {
    /// The instruction set of the registers.
    type Isa: Isa;
    /// Rows of a block of queries.
    const ROWS: usize;
    /// Columns of a panel of keys.
    const COLS: usize;
    /// Rows of a block of keys whose sums grow together.
    const KEYS: usize;

    /// The token of the registers.
    fn isa(self) -> Self::Isa;

    /// S of a block, into its rows of the memory.
    fn scores(
        self,
        pair: &Pair<'_>,
        at: &RegisterBlock,
        memory: &mut TileMemory<'_>,
    ) -> Option<Strip>;

    /// factor · Σ A Bᵀ of a block in the columns of its strip, over pairs of operands A of queries and B of
    /// keys with rows of `dim` elements; a pair of which one is not there adds nothing.
    fn multiply<const T: usize>(
        self,
        at: &RegisterBlock,
        strip: &Strip,
        dim: usize,
        terms: [(&Both<'_>, &Both<'_>); T],
        factor: Option<f32>,
        to: &mut [f32],
    );

    /// sum ← sum + weights · the rows of `keys`, in the columns `strip` of a tile of keys `cols`.
    fn grow_rows(
        self,
        weights: &Rows<'_>,
        sum: Sum<'_>,
        keys: &Packed<'_>,
        spans: [&Range<usize>; 2],
        words: &mut Words<'_>,
    );

    /// sum ← sum + weightsᵀ · rows, if the pass has such rows; in tiles that is transposed. `pairs` are those that
    /// may be touched, as in [`Rows`].
    fn grow_columns(
        self,
        columns: &Columns<'_>,
        sum: Sum<'_>,
        weights: (&[f32], u8),
        rows: &Packed<'_>,
        words: &mut Words<'_>,
    );
}

/// A kernel of blocks, written once for every engine. `run` is `#[inline(always)]`, always.
pub trait BlockKernel {
    /// Runs inside the gate of `by`.
    fn run<E: Engine>(self, by: E);
}

/// Runs a kernel of blocks: in tiles of bf16, or in registers.
pub fn run(level: Level, in_tiles: bool, kernel: impl BlockKernel) {
    match in_tiles {
        true => level.run_tiles(OfBlocks(kernel)).unwrap_or_default(),
        false => level.run(OfBlocks(kernel)),
    }
}

/// A kernel of blocks, as that of registers and as that of tiles.
struct OfBlocks<K>(K);

impl<K: BlockKernel> Kernel for OfBlocks<K> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        self.0.run(Registers(isa));
    }
}

impl<K: BlockKernel> MatrixKernel for OfBlocks<K> {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) {
        self.0.run(InTiles(by));
    }
}

/// A register of f32 of an engine.
pub type Register<E> = <<E as Engine>::Isa as Isa>::F32;

/// Registers of f32 alone.
#[derive(Clone, Copy)]
pub struct Registers<I>(pub I);

impl<I: Isa> Engine for Registers<I> {
    type Isa = I;
    const ROWS: usize = I::Tile::ROWS;
    const COLS: usize = I::Tile::COLS;
    const KEYS: usize = I::Tile::ROWS;

    #[inline(always)]
    fn isa(self) -> I {
        self.0
    }

    #[inline(always)]
    fn scores(
        self,
        pair: &Pair<'_>,
        at: &RegisterBlock,
        memory: &mut TileMemory<'_>,
    ) -> Option<Strip> {
        let q = &pair.queries.q.across.panels[at.rows.start * pair.dim..];
        let k = pair.keys.k.across.from(at.cols.start / I::Tile::COLS);
        let factors = pair.factors(at, [q, k]);
        let mut block = Block {
            s: &mut memory.p[at.weights(Self::ROWS)],
            tanh: memory.tanh,
            visible: &mut memory.shares[at.share].visible[at.first * MAX_KEYS..],
        };
        let mut max = [I::F32::splat(self.0, f32::NEG_INFINITY); MAX_ROWS];
        score_block(self.0, &factors, &mut block, &mut max)
    }

    #[inline(always)]
    fn multiply<const T: usize>(
        self,
        at: &RegisterBlock,
        strip: &Strip,
        dim: usize,
        terms: [(&Both<'_>, &Both<'_>); T],
        factor: Option<f32>,
        to: &mut [f32],
    ) {
        weights::multiply(self.0, at, strip, dim, terms, factor, to);
    }

    #[inline(always)]
    fn grow_rows(
        self,
        weights: &Rows<'_>,
        sum: Sum<'_>,
        keys: &Packed<'_>,
        [cols, strip]: [&Range<usize>; 2],
        _: &mut Words<'_>,
    ) {
        weights.grow(self.0, sum, keys, cols, strip);
    }

    #[inline(always)]
    fn grow_columns(
        self,
        columns: &Columns<'_>,
        Sum { acc, stride }: Sum<'_>,
        weights: (&[f32], u8),
        rows: &Packed<'_>,
        _: &mut Words<'_>,
    ) {
        columns.grow(self.0, acc, stride, weights, rows);
    }
}

/// Tiles of bf16, and registers between them.
#[derive(Clone, Copy)]
pub struct InTiles<M>(pub M);

impl<M: Matrix> Engine for InTiles<M> {
    type Isa = M::Isa;
    const ROWS: usize = BLOCK;
    const COLS: usize = BLOCK;
    const KEYS: usize = BLOCK;

    #[inline(always)]
    fn isa(self) -> M::Isa {
        self.0.isa()
    }

    #[inline(always)]
    fn scores(
        self,
        pair: &Pair<'_>,
        at: &RegisterBlock,
        memory: &mut TileMemory<'_>,
    ) -> Option<Strip> {
        let factors = pair.factors(at, [&[]; 2]);
        let strip = strip(&factors, BLOCK)?;
        let s = &mut memory.p[at.weights(Self::ROWS)];
        let (q, k) = (&pair.queries.q.across, &pair.keys.k.across);
        bf16::product(self.0, at, &strip, (q, k), true, s);
        let bias = pair.rule.bias(&at.rows, &at.cols);
        let visible = &mut memory.shares[at.share].visible[at.first * MAX_KEYS..];
        for r in 0..BLOCK {
            let s = &mut s[r * STRIDE..][..STRIDE];
            let tanh = &mut memory.tanh[r * STRIDE..][..STRIDE];
            let visible = &mut visible[r * MAX_KEYS..][..MAX_KEYS];
            let _ = Row { r, s, tanh, visible }.score(self.isa(), &factors, &bias, &strip);
        }
        Some(strip)
    }

    #[inline(always)]
    fn multiply<const T: usize>(
        self,
        at: &RegisterBlock,
        strip: &Strip,
        _: usize,
        terms: [(&Both<'_>, &Both<'_>); T],
        factor: Option<f32>,
        to: &mut [f32],
    ) {
        let mut fresh = true;
        for (a, b) in terms {
            if !a.across.panels.is_empty() && !b.across.panels.is_empty() {
                bf16::product(self.0, at, strip, (&a.across, &b.across), fresh, to);
                fresh = false;
            }
        }
        if !fresh && factor.is_none() {
            return;
        }
        let factor = F32::<M>::splat(self.isa(), factor.unwrap_or(0.0));
        for r in 0..BLOCK {
            let row = &mut to[r * STRIDE..][strip.cols.clone()];
            if fresh {
                row.fill(0.0);
                continue;
            }
            for x in row.chunks_exact_mut(F32::<M>::N) {
                (F32::<M>::load(self.isa(), x) * factor).store(x);
            }
        }
    }

    #[inline(always)]
    fn grow_rows(
        self,
        weights: &Rows<'_>,
        sum: Sum<'_>,
        keys: &Packed<'_>,
        spans: [&Range<usize>; 2],
        words: &mut Words<'_>,
    ) {
        bf16::grow_rows(self.0, weights, sum, keys, spans, words);
    }

    #[inline(always)]
    fn grow_columns(
        self,
        columns: &Columns<'_>,
        Sum { acc, .. }: Sum<'_>,
        (weights, pairs): (&[f32], u8),
        rows: &Packed<'_>,
        words: &mut Words<'_>,
    ) {
        if rows.panels.is_empty() || columns.rows.is_empty() || columns.cols.is_empty() {
            return;
        }
        let by = self.0;
        let bands = columns.rows.start / BLOCK..columns.rows.end.div_ceil(BLOCK);
        let cols = columns.cols.start / BLOCK * BLOCK..columns.cols.end.next_multiple_of(BLOCK);
        let (a, tall) = (rows.from(columns.tile / BLOCK + bands.start), rows.panel / WORDS);
        if columns.has_nonfinite {
            return add_visible_columns(columns, acc, (weights, pairs), (a, tall, bands.start));
        }
        for r in (bands.start * BLOCK..bands.end * BLOCK).step_by(2) {
            let line = r / BLOCK * OF_BLOCK + r % BLOCK / 2 * SIDE;
            let (even, odd) = (&weights[r * STRIDE..], &weights[(r + 1) * STRIDE..]);
            let (even, odd) = (&even[..STRIDE], &odd[..STRIDE]);
            for col in cols.clone().step_by(F32::<M>::N) {
                let pair = [
                    F32::<M>::load(self.isa(), &even[col..]),
                    F32::<M>::load(self.isa(), &odd[col..]),
                ];
                let to = line + col / SIDE * WORDS + col % SIDE;
                Pairing::Stacked.store(by, pair, (&mut *words.memory, to), words.pieces);
            }
        }
        let first = bands.start * OF_BLOCK + cols.start / SIDE * WORDS;
        for words in Pieces::new(words.memory, words.pieces).from(first).each() {
            by.multiply(Product {
                c: &mut acc[cols.start..],
                stride: STRIDE,
                fresh: false,
                a: Tiles { words: a, steps: [1, tall] },
                b: Tiles { words, steps: [1, ACROSS] },
                rows: tall,
                cols: cols.len() / SIDE,
                depth: bands.len(),
            });
        }
    }
}

/// Sums of keys pair by pair, from rows of queries whose first block is `band`: a pair that may not be touched must
/// add nothing at all, as 0 · NaN would be NaN. Slow, for operands that are not finite; weights are not rounded.
#[inline(always)]
fn add_visible_columns(
    Columns { rows, cols, visible, .. }: &Columns<'_>,
    sum: &mut [f32],
    (weights, pairs): (&[f32], u8),
    (words, tall, band): (&[f32], usize, usize),
) {
    let start = band * BLOCK;
    bf16::add_column_pairs(
        sum,
        (words, tall),
        [rows.start - start..rows.end - start, cols.clone()],
        #[inline(always)]
        |i, j| {
            let touched = visible[(start + i) * MAX_KEYS + j] & pairs != 0;
            if touched { Some(weights[(start + i) * STRIDE + j]) } else { None }
        },
    );
}
