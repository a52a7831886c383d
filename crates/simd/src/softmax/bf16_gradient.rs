//! The backward pass in bf16: the weights of [`super::gradient`], 32 queries at a time, rounded to pairs.
//!
//! ```text
//! dv_jᵀ += Σ_i dO_iᵀ P_ij,   dk_jᵀ += Σ_i q_iᵀ ds_ij,   dq_i += Σ_j ds_ij k_j
//! ```
//!
//! P and ds are the right factors of the first two: pairs of two queries, as two rows of scores give them, so that
//! nothing is transposed but the sums, once for each tile of keys. In the third ds is the left factor.

use super::bf16::{
    ACROSS, OF_BLOCK, PANELS, Weights, add_column_pairs, add_visible, multiply_rows, product,
};
use super::packs::Both;
use super::pair::{Pair, RegisterBlock};
use super::scores::{Factors, Row, Strip, slope, strip};
use super::scratch::{Scratch, Share, TileMemory};
use super::weights::joined;
use crate::exp::exp_difference;
use crate::lanes::matrix::{
    BLOCK, F32, Matrix, MatrixKernel, Pairing, Pieces, Product, SIDE, Tiles, WORDS,
};
use crate::lanes::{Isa, Lanes};
use crate::pack::transpose;
use crate::tile::{MAX_KEYS, STRIDE};
use crate::tiles::tiles;
use etalon_problem::Cover;
use std::ops::Range;

/// The kernels of [`super::kernels`], in bf16: the sums of a tile of queries over all its keys.
pub struct Bf16QueryTile<'a, 'm, 'p> {
    pub pair: Pair<'p>,
    pub rows: Range<usize>,
    pub scratch: &'a mut Scratch<'m>,
}

impl MatrixKernel for Bf16QueryTile<'_, '_, '_> {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) {
        let Bf16QueryTile { pair, rows, scratch } = self;
        let Scratch { cut, tiles: memory, sums, .. } = scratch;
        sums.wide.fill(0.0);
        for cols in tiles(0..pair.rule.of.sequence.keys, cut.keys) {
            if pair.rule.cover(rows.clone(), cols.clone()) == Cover::None {
                continue;
            }
            for first in (0..rows.len()).step_by(BLOCK) {
                let at = block(&pair, (&rows, &cols), first, 0);
                let wanted = Wanted { ds: true, capped: true, kept: false };
                let strip = weights(by, &pair, &at, wanted, memory);
                let TileMemory { shares: [share, ..], pieces, .. } = memory;
                let strip = strip.map(|strip| strip.cols);
                grow_queries(by, &pair, (&at, strip), (share, *pieces), sums.wide);
            }
        }
    }
}

/// Adds the products of one tile of queries to the sums of a tile of keys in the scratch. ds is left in a share of the
/// scratch, for [`Bf16ShareTile`].
pub struct Bf16KeyTile<'a, 'm, 'p> {
    /// True if ds is wanted at all.
    pub ds: bool,
    /// True if dS is left in [`Sums::bias`](super::scratch::Sums::bias).
    pub dbias: bool,
    pub pair: Pair<'p>,
    pub rows: Range<usize>,
    pub cols: Range<usize>,
    pub share: usize,
    pub scratch: &'a mut Scratch<'m>,
}

impl MatrixKernel for Bf16KeyTile<'_, '_, '_> {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) {
        let Bf16KeyTile { ds, dbias, pair, rows, cols, share, scratch } = self;
        let Scratch { tiles: memory, sums, .. } = scratch;
        let wanted = Wanted { ds, capped: true, kept: dbias };
        // The blocks of queries and the columns that hold a visible pair.
        let (mut seen_rows, mut seen_cols) = (0..0, 0..0);
        for first in (0..rows.len()).step_by(BLOCK) {
            let at = block(&pair, (&rows, &cols), first, share);
            let seen = weights(by, &pair, &at, wanted, memory).map(|strip| strip.cols);
            if let Some(seen) = &seen {
                seen_rows = joined(&seen_rows, &(first / BLOCK..first / BLOCK + 1));
                seen_cols = joined(&seen_cols, seen);
            }
            let seen = seen.unwrap_or(0..0);
            if dbias {
                let to = sums.bias[first * STRIDE..].chunks_mut(STRIDE);
                for (to, from) in to.zip(memory.x.chunks(STRIDE)).take(BLOCK) {
                    to.fill(0.0);
                    to[seen.clone()].copy_from_slice(&from[seen.clone()]);
                }
            }
            memory.shares[share].strips[first / BLOCK] = [seen.start as u32, seen.end as u32];
        }
        let has_nonfinite = pair.has_nonfinite(&rows, &cols);
        let visible = has_nonfinite.then_some(&*memory.shares[share].visible);
        let here = Columns {
            queries: rows.start / BLOCK + seen_rows.start,
            rows: seen_rows,
            cols: seen_cols,
            visible,
        };
        let [p, of_ds] = memory.pairs.each_ref().map(|words| Pieces::new(words, memory.pieces));
        here.grow(by, sums.values, &pair.queries.dout, p); // (B7)
        if ds {
            here.grow(by, sums.wide, &pair.queries.q, of_ds); // (B6)
        }
    }
}

/// Adds the products with the keys of a [`Bf16KeyTile`] to dq / σ of its queries.
pub struct Bf16ShareTile<'a, 'p> {
    pub pair: Pair<'p>,
    pub rows: Range<usize>,
    pub cols: Range<usize>,
    pub dq: &'a mut [f32],
    pub share: &'a Share<'p>,
    pub pieces: usize,
}

impl MatrixKernel for Bf16ShareTile<'_, '_> {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) {
        let Bf16ShareTile { pair, rows, cols, dq, share, pieces } = self;
        for first in (0..rows.len()).step_by(BLOCK) {
            let at = block(&pair, (&rows, &cols), first, 0);
            let [start, end] = share.strips[first / BLOCK].map(|col| col as usize);
            let strip = (start < end).then_some(start..end);
            grow_queries(by, &pair, (&at, strip), (share, pieces), dq);
        }
    }
}

/// The gradient of the bias of one tile of queries and keys, the sum over every head and sequence that shares the
/// bias, left in the scratch.
pub struct Bf16BiasTile<'a, 'm, P> {
    pub pairs: P,
    pub rows: Range<usize>,
    pub cols: Range<usize>,
    pub scratch: &'a mut Scratch<'m>,
}

impl<'p, P: Iterator<Item = Pair<'p>>> MatrixKernel for Bf16BiasTile<'_, '_, P> {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) {
        let Bf16BiasTile { pairs, rows, cols, scratch } = self;
        let Scratch { tiles: memory, sums, .. } = scratch;
        sums.bias.fill(0.0);
        for pair in pairs {
            let sequence = pair.rule.of.sequence;
            let rows = rows.start..rows.end.min(sequence.queries);
            let cols = cols.start..cols.end.min(sequence.keys);
            if pair.rule.cover(rows.clone(), cols.clone()) == Cover::None {
                continue;
            }
            for first in (0..rows.len()).step_by(BLOCK) {
                let at = block(&pair, (&rows, &cols), first, 0);
                let wanted = Wanted { ds: true, capped: false, kept: true };
                let Some(strip) = weights(by, &pair, &at, wanted, memory) else { continue };
                let sums = sums.bias[first * STRIDE..].chunks_mut(STRIDE);
                for (sums, x) in sums.zip(memory.x.chunks(STRIDE)).take(at.rows.len()) {
                    let (sums, x) = (&mut sums[strip.cols.clone()], &x[strip.cols.clone()]);
                    sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += x); // (B9)
                }
            }
        }
    }
}

/// Writes the sums of a tile of keys, which are transposed, as rows of `width` elements into `to`.
pub fn turn(sums: &[f32], width: usize, keys: usize, to: &mut [f32]) {
    transpose(sums, STRIDE, keys, to, width);
}

/// Queries from row `first` of a tile on against a tile of keys.
#[inline(always)]
fn block(
    pair: &Pair<'_>,
    (rows, cols): (&Range<usize>, &Range<usize>),
    first: usize,
    share: usize,
) -> RegisterBlock {
    let start = rows.start + first;
    RegisterBlock {
        rows: start..rows.end.min(start + BLOCK),
        cols: cols.clone(),
        first,
        share,
        has_nonfinite: pair.has_nonfinite(rows, cols),
    }
}

/// dq ← dq + ds K of a block, in the columns of a strip. (B5)
#[inline(always)]
fn grow_queries<M: Matrix>(
    by: M,
    pair: &Pair<'_>,
    (at, strip): (&RegisterBlock, Option<Range<usize>>),
    (share, pieces): (&Share<'_>, usize),
    dq: &mut [f32],
) {
    let Some(strip) = strip else { return };
    let stride = pair.dim.next_multiple_of(BLOCK);
    let (c, k) = (&mut dq[at.first * stride..], &pair.keys.k.along);
    let words = k.from((at.cols.start + strip.start) / BLOCK);
    let ds = Pieces::new(share.ds, pieces).from(at.first / SIDE * PANELS * WORDS);
    if at.has_nonfinite {
        let visible = &share.visible[at.first * MAX_KEYS..];
        let weights = Weights { p: ds, visible, start: strip.start };
        add_visible(c, stride, words, &weights, (at.rows.len(), strip.len()));
        return;
    }
    let ds = ds.from(strip.start / BLOCK * WORDS);
    multiply_rows(by, (c, stride), ds, words, strip.len() / BLOCK);
}

/// The part of a tile of weights that holds visible pairs, seen from the keys.
struct Columns<'a> {
    /// The first block of queries, within the sequence, and all of them, from the tile's first.
    queries: usize,
    rows: Range<usize>,
    cols: Range<usize>,
    /// Marks of the pairs, if an operand is not finite.
    visible: Option<&'a [u8]>,
}

impl Columns<'_> {
    /// sumᵀ ← sumᵀ + Xᵀ · weights, if the pass has such rows X of queries.
    #[inline(always)]
    fn grow<M: Matrix>(&self, by: M, sum: &mut [f32], x: &Both<'_>, weights: Pieces<'_>) {
        let Columns { queries, rows, cols, visible } = self;
        let x = &x.along;
        if x.panels.is_empty() || rows.is_empty() {
            return;
        }
        let (words, tall) = (x.from(*queries), x.panel / WORDS);
        let c = &mut sum[cols.start..];
        let weights = weights.from(rows.start * OF_BLOCK + cols.start / SIDE * WORDS);
        if let Some(visible) = visible {
            let visible = &visible[rows.start * BLOCK * MAX_KEYS + cols.start..];
            // As 0 · NaN would be NaN.
            add_column_pairs(
                c,
                (words, tall),
                [0..rows.len() * BLOCK, 0..cols.len()],
                #[inline(always)]
                |i, j| {
                    let line = i / BLOCK * OF_BLOCK + i % BLOCK / 2 * SIDE;
                    let seen = visible[i * MAX_KEYS + j] != 0;
                    let word = line + j / SIDE * WORDS + j % SIDE;
                    if seen { Some(weights.weight(word, i % 2)) } else { None }
                },
            );
            return;
        }
        let a = Tiles { words, steps: [1, tall] };
        let (wide, depth) = (cols.len() / SIDE, rows.len());
        for words in weights.each() {
            by.multiply(Product {
                c: &mut *c,
                stride: STRIDE,
                fresh: false,
                a,
                b: Tiles { words, steps: [1, ACROSS] },
                rows: tall,
                cols: wide,
                depth,
            });
        }
    }
}

/// Weights of a block that are wanted beside P.
#[derive(Clone, Copy)]
struct Wanted {
    /// ds, in its pairs.
    ds: bool,
    /// True if S′ is applied; otherwise dS stands in place of ds.
    capped: bool,
    /// True if it is left in place of dP, too, in f32.
    kept: bool,
}

/// The weights of a block: P and ds in pairs of queries, ds also in pairs of keys, in its share. Beside the returned
/// strip the former are zeros.
#[inline(always)]
fn weights<M: Matrix>(
    by: M,
    pair: &Pair<'_>,
    at: &RegisterBlock,
    wanted: Wanted,
    memory: &mut TileMemory<'_>,
) -> Option<Strip> {
    let factors = Factors { note_visible: at.has_nonfinite, ..pair.factors(at, [&[]; 2]) };
    let strip = strip(&factors, BLOCK);
    let end = at.cols.len().next_multiple_of(BLOCK);
    let seen = strip.as_ref().map_or(0..0, |strip| strip.cols.clone());
    for beside in [0..seen.start, seen.end..end] {
        for words in &mut memory.pairs {
            let tiles = beside.start / SIDE * WORDS..beside.end / SIDE * WORDS;
            let apart = words.len() / memory.pieces;
            for piece in words.chunks_exact_mut(apart) {
                piece[at.first / BLOCK * OF_BLOCK..][tiles.clone()].fill(0.0);
            }
        }
        for visible in
            memory.shares[at.share].visible[at.first * MAX_KEYS..].chunks_mut(MAX_KEYS).take(BLOCK)
        {
            visible[beside.clone()].fill(0);
        }
    }
    let strip = strip?;
    let (queries, keys) = (pair.queries, pair.keys);
    product(by, at, &strip, (&queries.q.across, &keys.k.across), true, memory.p);
    let values = wanted.ds && pair.value_dim > 0;
    if values {
        product(by, at, &strip, (&queries.dout.across, &keys.v.across), true, memory.x); // (B2)
    }
    let bias = pair.rule.bias(&at.rows, &at.cols);
    for r in (0..BLOCK).step_by(2) {
        for r in r..r + 2 {
            let visible =
                &mut memory.shares[at.share].visible[(at.first + r) * MAX_KEYS..][..MAX_KEYS];
            let s = &mut memory.p[r * STRIDE..][..STRIDE];
            let tanh = &mut memory.tanh[r * STRIDE..][..STRIDE];
            let _ = Row { r, s, tanh, visible }.score(by.isa(), &factors, &bias, &strip);
        }
        two_rows(by, pair, at, r, &strip, (wanted, values), memory);
    }
    Some(strip)
}

/// The weights of rows `r` and `r + 1` of a block, whose scores and dP are in memory.
#[inline(always)]
fn two_rows<M: Matrix>(
    by: M,
    pair: &Pair<'_>,
    at: &RegisterBlock,
    r: usize,
    strip: &Strip,
    (Wanted { ds, capped, kept }, values): (Wanted, bool),
    memory: &mut TileMemory<'_>,
) {
    let (isa, lanes, zero) = (by.isa(), F32::<M>::N, F32::<M>::splat(by.isa(), 0.0));
    let TileMemory { p: s, x: dp, tanh, pairs: [p, of_ds], pieces, shares, .. } = memory;
    let pieces = *pieces;
    let Share { ds: by_row, visible, .. } = &mut shares[at.share];
    let row = at.rows.start + r;
    let lse = [pair.queries.lse[row], pair.queries.lse[row + 1]];
    let of_row = row - pair.stats.first;
    let delta = [pair.stats.delta[of_row], pair.stats.delta[of_row + 1]];
    let capped = capped && pair.rule.softcap.is_some();
    let band = at.first / BLOCK * OF_BLOCK + r / 2 * SIDE;
    let line = (at.first + r) / SIDE * PANELS * WORDS + r % SIDE * SIDE;
    for col in strip.cols.clone().step_by(2 * lanes) {
        let open = strip.is_open(col / BLOCK * BLOCK);
        let [mut weights, mut gradients] = [[[zero; 2]; 2]; 2];
        for q in 0..2 {
            let (max, less) = (F32::<M>::splat(isa, lse[q]), F32::<M>::splat(isa, delta[q]));
            for h in 0..2 {
                let (col, place) = (col + h * lanes, (r + q) * STRIDE + col + h * lanes);
                let mut weight = exp_difference(isa, F32::<M>::load(isa, &s[place..]), max); // (F4)
                let of_p = if values { F32::<M>::load(isa, &dp[place..]) } else { zero };
                let mut gradient = weight * (of_p - less); // (B3)
                if capped {
                    gradient = gradient * slope(isa, F32::<M>::load(isa, &tanh[place..])); // (B4)
                }
                if !open {
                    // A row that sees no key at all reads as zeros: its scores with keys that are not finite are NaN.
                    let visible = &visible[(at.first + r + q) * MAX_KEYS + col..][..lanes];
                    let blind = lse[q] == f32::INFINITY;
                    weight = concealed(isa, weight, visible, blind);
                    gradient = concealed(isa, gradient, visible, blind);
                }
                if kept {
                    gradient.store(&mut dp[place..]);
                }
                weights[q][h] = weight;
                gradients[q][h] = gradient;
            }
        }
        for h in 0..2 {
            let col = col + h * lanes;
            let to = band + col / SIDE * WORDS + col % SIDE;
            let pair = [weights[0][h], weights[1][h]];
            Pairing::Stacked.store(by, pair, (p, to), pieces);
            if ds {
                let pair = [gradients[0][h], gradients[1][h]];
                Pairing::Stacked.store(by, pair, (of_ds, to), pieces);
            }
        }
        for q in 0..2 {
            let to = line + q * SIDE + col / BLOCK * WORDS + col % BLOCK / 2;
            if ds {
                Pairing::Neighbours.store(by, gradients[q], (by_row, to), pieces);
            }
        }
    }
    for (q, lse) in lse.iter().enumerate() {
        if *lse == f32::INFINITY {
            let visible = &mut visible[(at.first + r + q) * MAX_KEYS..];
            for edge in strip.edges() {
                visible[edge].fill(0);
            }
        }
    }
}

/// Weights, 0 where a pair is not visible.
#[inline(always)]
fn concealed<I: Isa>(isa: I, x: I::F32, visible: &[u8], blind: bool) -> I::F32 {
    let mut all = [0.0; SIDE];
    x.store(&mut all);
    for (x, &visible) in all.iter_mut().zip(visible) {
        *x = if visible != 0 && !blind { *x } else { 0.0 };
    }
    I::F32::load(isa, &all)
}
