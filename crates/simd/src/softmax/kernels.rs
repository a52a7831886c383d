//! The kernels of whole tiles, over the weights of any pass of first or second order.

use super::block::{Body, Term};
use super::engine::{BlockKernel, Engine, run};
use super::pair::Pair;
use super::scores::{ACTIVE, VISIBLE};
use super::scratch::{Scratch, Share, Words};
use super::weights::{Columns, Rows, joined};
use crate::Level;
use crate::products::Sum;
use crate::tile::{MAX_KEYS, STRIDE};
use crate::tiles::tiles;
use std::ops::Range;

/// The sums of one tile of queries over all its keys, left in the scratch: [`Body::ROWS`].
pub struct QueryTile<'a, 'm, 'p, B> {
    /// The weights.
    pub body: B,
    /// The head.
    pub pair: Pair<'p>,
    /// The tile, within the sequence.
    pub rows: Range<usize>,
    /// The thread's memory.
    pub scratch: &'a mut Scratch<'m>,
}

impl<B: Body> QueryTile<'_, '_, '_, B> {
    /// Runs it, in tiles of bf16 or in registers as the scratch is cut.
    pub fn sweep(self, level: Level) {
        run(level, self.scratch.cut.bf16, self);
    }
}

impl<B: Body> BlockKernel for QueryTile<'_, '_, '_, B> {
    #[inline(always)]
    fn run<E: Engine>(self, by: E) {
        let QueryTile { body, pair, rows, scratch } = self;
        let Scratch { cut, tiles: memory, sums, words, .. } = scratch;
        let words = &mut words.of_pieces(B::PIECES);
        sums.numbers.fill(0.0);
        for term in B::ROWS {
            sums.of(term.to).fill(0.0);
        }
        for cols in tiles(0..pair.rule.of.sequence.keys, cut.keys) {
            for block in pair.blocks(E::ROWS, &rows, &cols, None) {
                let Some(strip) = body.weights(by, &pair, &block, memory) else { continue };
                let first = block.rows.start - rows.start;
                body.add_numbers(by, first, &strip, memory, sums);
                for &Term { to, weights, rows } in B::ROWS {
                    let (acc, keys) = (sums.of(to), rows(pair.keys));
                    if keys.panels.is_empty() || acc.is_empty() {
                        continue;
                    }
                    let stride = pair.stride(to, E::COLS);
                    let sum = Sum { acc: &mut acc[first * stride..], stride };
                    let rows = Rows {
                        weights: memory.weights(weights, 0),
                        visible: memory.shares[0].visible,
                        pairs: B::pairs(weights),
                        has_nonfinite: block.has_nonfinite,
                    };
                    by.grow_rows(&rows, sum, keys, [&cols, &strip.cols], words);
                }
            }
        }
    }
}

/// Adds the products of one tile of queries to the sums of a tile of keys in the scratch: [`Body::COLUMNS`].
/// ds is left in a share of the scratch, for [`ShareTile`] and for dbias.
pub struct KeyTile<'a, 'm, 'p, B> {
    /// The weights.
    pub body: B,
    /// The head.
    pub pair: Pair<'p>,
    /// The queries, within the sequence.
    pub rows: Range<usize>,
    /// The keys, within the sequence.
    pub cols: Range<usize>,
    /// The share of the scratch that ds goes to.
    pub share: usize,
    /// The thread's memory.
    pub scratch: &'a mut Scratch<'m>,
}

impl<B: Body> BlockKernel for KeyTile<'_, '_, '_, B> {
    #[inline(always)]
    fn run<E: Engine>(self, by: E) {
        let KeyTile { body, pair, rows, cols, share, scratch } = self;
        let Scratch { tiles: memory, sums, words, .. } = scratch;
        // The rows and columns of the tile that hold a visible pair.
        let (mut seen_rows, mut seen_cols) = (0..0, 0..0);
        memory.active.fill(0..0);
        for block in pair.blocks(E::ROWS, &rows, &cols, Some(share)) {
            let strip = body.weights(by, &pair, &block, memory);
            if let Some(strip) = &strip {
                let here = block.rows.start - rows.start..block.rows.end - rows.start;
                seen_rows = joined(&seen_rows, &here);
                seen_cols = joined(&seen_cols, &strip.cols);
            }
            let cols = strip.map_or(0..0, |strip| strip.cols);
            memory.shares[share].strips[block.first / E::ROWS] =
                [cols.start as u32, cols.end as u32];
        }
        if seen_rows.is_empty() {
            return;
        }
        let columns = Columns {
            rows: seen_rows,
            cols: seen_cols,
            tile: rows.start,
            has_nonfinite: pair.has_nonfinite(&rows, &cols),
            visible: memory.shares[share].visible,
        };
        for &Term { to, weights, rows } in B::COLUMNS {
            let (pairs, rows) = (B::pairs(weights), rows(pair.queries));
            let weights = (memory.weights(weights, share), pairs);
            let stride = pair.stride(to, E::COLS);
            if pairs != ACTIVE {
                let sum = Sum { acc: sums.of(to), stride };
                by.grow_columns(&columns, sum, weights, rows, words);
                continue;
            }
            for columns in columns.active([E::KEYS, E::COLS], &memory.active) {
                let sum = Sum { acc: sums.of(to), stride };
                by.grow_columns(&columns, sum, weights, rows, words);
            }
        }
    }
}

/// Adds the products with the keys of a [`KeyTile`] to dq / σ of its queries.
pub struct ShareTile<'a, 'm, 'p> {
    /// The head.
    pub pair: Pair<'p>,
    /// The queries, within the sequence.
    pub rows: Range<usize>,
    /// The keys, within the sequence.
    pub cols: Range<usize>,
    /// The sum of dq.
    pub dq: &'a mut [f32],
    /// The weights ds of the tile of keys.
    pub share: &'a Share<'p>,
    /// The thread's memory.
    pub words: &'a mut Words<'m>,
}

impl BlockKernel for ShareTile<'_, '_, '_> {
    #[inline(always)]
    fn run<E: Engine>(self, by: E) {
        let ShareTile { pair, rows, cols, dq, share, words } = self;
        let has_nonfinite = pair.has_nonfinite(&rows, &cols);
        let stride = pair.dim.next_multiple_of(E::COLS);
        for first in (0..rows.len()).step_by(E::ROWS) {
            let [start, end] = share.strips[first / E::ROWS].map(|col| col as usize);
            if start == end {
                continue;
            }
            let rows = Rows {
                weights: &share.ds[first * STRIDE..],
                visible: &share.visible[first * MAX_KEYS..],
                pairs: VISIBLE,
                has_nonfinite,
            };
            let sum = Sum { acc: &mut dq[first * stride..], stride };
            by.grow_rows(&rows, sum, &pair.keys.k.along, [&cols, &(start..end)], words); // (B5)
        }
    }
}

/// The gradient of the bias of one tile of queries and keys, the sum over every head and sequence
/// that shares the bias, left in the scratch: [`Body::BIAS`].
pub struct BiasTile<'a, 'm, B, P> {
    /// The weights.
    pub body: B,
    /// The heads and sequences, in the order of the sum.
    pub pairs: P,
    /// The queries, within the sequences.
    pub rows: Range<usize>,
    /// The keys, within the sequences.
    pub cols: Range<usize>,
    /// The thread's memory.
    pub scratch: &'a mut Scratch<'m>,
}

impl<'p, B: Body, P: Iterator<Item = Pair<'p>>> BlockKernel for BiasTile<'_, '_, B, P> {
    #[inline(always)]
    fn run<E: Engine>(self, by: E) {
        let BiasTile { body, pairs, rows, cols, scratch } = self;
        let Scratch { tiles: memory, sums, .. } = scratch;
        sums.bias.fill(0.0);
        for pair in pairs {
            let sequence = pair.rule.of.sequence;
            let rows = rows.start..rows.end.min(sequence.queries);
            let cols = cols.start..cols.end.min(sequence.keys);
            for block in pair.blocks(E::ROWS, &rows, &cols, None) {
                if body.weights(by, &pair, &block, memory).is_none() {
                    continue;
                }
                let weights = memory.weights(B::BIAS, 0);
                for (r, i) in block.rows.clone().enumerate() {
                    let x = &weights[r * STRIDE..][..cols.len()];
                    let sum = &mut sums.bias[(i - rows.start) * STRIDE..][..cols.len()];
                    sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x); // (B9) (D15)
                }
            }
        }
    }
}
