//! A query head with its key head, and the register blocks of its tiles.

use super::packs::{Keys, Queries};
use super::rule::{Raise, ScoreRule};
use super::scores::Factors;
use super::scratch::Target;
use super::stats::Stats;
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
    /// Its rows of the tile's memory, of which there are `height`.
    #[inline(always)]
    pub fn weights(&self, height: usize) -> Range<usize> {
        self.first * STRIDE..(self.first + height) * STRIDE
    }
}

impl<'a> Pair<'a> {
    /// True if a tile holds operands that are not finite.
    pub fn has_nonfinite(&self, rows: &Range<usize>, cols: &Range<usize>) -> bool {
        self.queries.non_finite.touches(rows.clone()) || self.keys.non_finite.touches(cols.clone())
    }

    /// A block of scores, of which panels of q and k begin with the block and with the tile.
    #[inline(always)]
    pub fn factors<'f>(&'f self, at: &RegisterBlock, [q, k]: [&'f [f32]; 2]) -> Factors<'f, 'a> {
        Factors {
            rule: &self.rule,
            rows: at.rows.clone(),
            cols: at.cols.clone(),
            q,
            k,
            dim: self.dim,
            // ddbias may be anything where the bias is −∞.
            note_visible: at.has_nonfinite || self.ddbias.is_some() || self.rule.hides(),
        }
    }

    /// lse of the `height` rows of a block.
    #[inline(always)]
    pub fn lse(&self, at: &RegisterBlock, height: usize) -> &'a [f32] {
        &self.queries.lse[at.rows.start..at.rows.start + height]
    }

    /// The distance between two rows of a sum, in panels of so many columns.
    #[inline(always)]
    pub fn stride(&self, to: Target, width: usize) -> usize {
        let dim = if matches!(to, Target::Wide) { self.dim } else { self.value_dim };
        dim.next_multiple_of(width)
    }

    /// The blocks of a tile in order, of `height` rows, if it holds a visible pair. With a share to keep
    /// them in, each has rows of its own in memory; otherwise all use the first.
    #[inline(always)]
    pub fn blocks(
        &self,
        height: usize,
        rows: &Range<usize>,
        cols: &Range<usize>,
        kept: Option<usize>,
    ) -> impl Iterator<Item = RegisterBlock> + use<> {
        let has_nonfinite = self.has_nonfinite(rows, cols);
        let seen = self.rule.cover(rows.clone(), cols.clone()) != Cover::None;
        let (rows, cols) = (if seen { rows.clone() } else { rows.start..rows.start }, cols.clone());
        (0..rows.len()).step_by(height).map(
            #[inline(always)]
            move |first| {
                let start = rows.start + first;
                RegisterBlock {
                    rows: start..rows.end.min(start + height),
                    cols: cols.clone(),
                    first: if kept.is_some() { first } else { 0 },
                    share: kept.unwrap_or(0),
                    has_nonfinite,
                }
            },
        )
    }
}
