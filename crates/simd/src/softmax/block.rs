//! A register block of queries against a tile of keys, and which products sums grow by.

use super::engine::Engine;
use super::packs::{Keys, Queries};
use super::rule::{Raise, ScoreRule};
use super::scores::{Strip, VISIBLE};
use super::scratch::{Sums, Target, TileMemory, Weight};
use super::stats::Stats;
use crate::pack::Packed;
use crate::tile::STRIDE;
use etalon_problem::Cover;
use std::ops::Range;

/// One query head of a sequence with its key head.
#[derive(Clone, Copy)]
pub struct Pair<'a> {
    /// The visible pairs, and the scale, softcap and bias of their scores.
    pub rule: ScoreRule<'a>,
    /// ddbias of this sequence and head.
    pub ddbias: Option<Raise<'a>>,
    /// ddτ of this head.
    pub ddtau: f32,
    /// The queries.
    pub queries: &'a Queries<'a>,
    /// The keys and values.
    pub keys: &'a Keys<'a>,
    /// The statistics of the rows.
    pub stats: Stats<'a>,
    /// D.
    pub dim: usize,
    /// E.
    pub value_dim: usize,
}

/// A register block of queries against a tile of keys.
#[derive(Clone)]
pub struct RegisterBlock {
    /// The queries, within the sequence.
    pub rows: Range<usize>,
    /// The keys, within the sequence.
    pub cols: Range<usize>,
    /// Its first row in the tile's memory.
    pub first: usize,
    /// The share of the scratch that ds goes to.
    pub share: usize,
    /// True if an operand is not finite, so that only visible pairs may be touched.
    pub has_nonfinite: bool,
}

impl RegisterBlock {
    /// Its rows of the tile's memory.
    #[inline(always)]
    pub fn weights<E: Engine>(&self) -> Range<usize> {
        self.first * STRIDE..(self.first + E::ROWS) * STRIDE
    }
}

/// The hot part of a sweep: the weights of a register block. Weights and sums have names, so that
/// the products which a sweep takes are a table.
pub trait Body: Copy + Send + Sync {
    /// The products that grow sums of a tile of queries: weights times rows of the keys.
    const ROWS: &'static [Term<OfKeys>];
    /// The products that grow sums of a tile of keys: weights times rows of the queries.
    const COLUMNS: &'static [Term<OfQueries>];
    /// The weights that are summed to the gradient of the bias.
    const BIAS: Weight;
    /// Numbers of bf16 as whose sum a weight is multiplied in tiles, at least.
    const PIECES: usize = 1;
    /// True if kernels of its own compute it in tiles of bf16: those of [`super::bf16_gradient`].
    const HAS_TILES: bool = false;

    /// True if ds is wanted, beside P.
    fn has_ds(&self) -> bool {
        true
    }

    /// The pairs that products with a weight may touch where operands are not finite.
    fn pairs(_: Weight) -> u8 {
        VISIBLE
    }

    /// Computes the weights of a block, into its rows of the memory. Columns outside the returned
    /// strip are zero, if the body has sums of keys or of the bias.
    fn weights<E: Engine>(
        self,
        by: E,
        pair: &Pair<'_>,
        block: &RegisterBlock,
        memory: &mut TileMemory<'_>,
    ) -> Option<Strip>;

    /// Adds the sums of the rows of weights themselves, of rows from `first` on.
    #[inline(always)]
    fn add_numbers<E: Engine>(
        self,
        _by: E,
        _first: usize,
        _strip: &Strip,
        _memory: &TileMemory<'_>,
        _sums: &mut Sums<'_>,
    ) {
    }
}

/// sum += weights · rows, or weightsᵀ · rows.
pub struct Term<R> {
    pub to: Target,
    pub weights: Weight,
    /// The rows, packed along; a term whose rows are not packed is left out.
    pub rows: R,
}

/// Some rows of the keys, or of the queries.
pub type OfKeys = for<'a> fn(&'a Keys<'a>) -> &'a Packed<'a>;
pub type OfQueries = for<'a> fn(&'a Queries<'a>) -> &'a Packed<'a>;

impl<'a> Pair<'a> {
    /// True if a tile holds operands that are not finite.
    pub fn has_nonfinite(&self, rows: &Range<usize>, cols: &Range<usize>) -> bool {
        self.queries.non_finite.touches(rows.clone()) || self.keys.non_finite.touches(cols.clone())
    }

    /// S of a block, into its rows of the memory.
    #[inline(always)]
    pub fn scores<E: Engine>(
        &self,
        by: E,
        at: &RegisterBlock,
        memory: &mut TileMemory<'_>,
    ) -> Option<Strip> {
        // ddbias may be anything where the bias is −∞.
        let note_visible = at.has_nonfinite || self.ddbias.is_some() || self.rule.hides();
        by.scores(self, at, note_visible, memory)
    }

    /// lse of a block's rows.
    #[inline(always)]
    pub fn lse<E: Engine>(&self, at: &RegisterBlock) -> &'a [f32] {
        &self.queries.lse[at.rows.start..at.rows.start + E::ROWS]
    }

    /// The distance between two rows of a sum.
    #[inline(always)]
    pub fn stride<E: Engine>(&self, to: Target) -> usize {
        let dim = if matches!(to, Target::Wide) { self.dim } else { self.value_dim };
        dim.next_multiple_of(E::COLS)
    }

    /// The register blocks of a tile in order, if it holds a visible pair. With a share to keep them
    /// in, each has rows of its own in memory; otherwise all use the first.
    #[inline(always)]
    pub fn blocks<E: Engine>(
        &self,
        rows: &Range<usize>,
        cols: &Range<usize>,
        kept: Option<usize>,
    ) -> impl Iterator<Item = RegisterBlock> + use<E> {
        let has_nonfinite = self.has_nonfinite(rows, cols);
        let seen = self.rule.cover(rows.clone(), cols.clone()) != Cover::None;
        let (rows, cols) = (if seen { rows.clone() } else { rows.start..rows.start }, cols.clone());
        (0..rows.len()).step_by(E::ROWS).map(
            #[inline(always)]
            move |first| {
                let start = rows.start + first;
                RegisterBlock {
                    rows: start..rows.end.min(start + E::ROWS),
                    cols: cols.clone(),
                    first: if kept.is_some() { first } else { 0 },
                    share: kept.unwrap_or(0),
                    has_nonfinite,
                }
            },
        )
    }
}
