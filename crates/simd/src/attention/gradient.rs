//! The kernels of the backward pass.
//!
//! All three sweeps share one step, [`Pair::block`], for a register block of queries against a tile
//! of keys:
//!
//! ```text
//! S  = σ·Q Kᵀ, softcap, bias, mask          (F1) (F2)
//! P  = e^(S − lse)                          (F4)
//! dP = dO Vᵀ                                (B2)
//! dS = P ⊙ (dP − δ),  ds = S′ ⊙ dS          (B3) (B4)
//! ```
//!
//! * [`QueryTile`], for one tile of queries: dq = σ Σ ds K (B5).
//! * [`KeyTile`], for one tile of keys: dk = σ Σ dsᵀ Q (B6), dv = Σ Pᵀ dO (B7) and, if asked for, its
//!   part of dq.
//! * [`BiasTile`], for one tile of queries and keys: dbias = Σ dS (B9).
//!
//! attention_lse is the same with values of no width: dP = 0 and δ = −dlse, so that dS = dlse·P (L2).

use crate::aligned::Aligned;
use crate::exp::exp_difference;
use crate::heads::{Cut, Rule};
use crate::lanes::{Isa, Kernel, Lanes};
use crate::level::compiled_here;
use crate::pack::{Packed, touches};
use crate::packs::{Keys, Queries};
use crate::products::{Along, Sum};
use crate::scores::{Block, Factors, MAX_ROWS, Strip, score_block, slope};
use crate::tile::{MAX_KEYS, STRIDE, Tile};
use etalon_problem::{Cover, Error};
use std::ops::Range;

/// One query head of a sequence with its key head.
#[derive(Clone, Copy)]
pub struct Pair<'a> {
    /// Which pairs count.
    pub rule: Rule<'a>,
    /// The queries.
    pub queries: &'a Queries,
    /// The keys and values.
    pub keys: &'a Keys,
    /// D.
    pub dim: usize,
    /// E.
    pub value_dim: usize,
}

/// The memory of one thread.
pub struct Scratch {
    cut: Cut,
    /// P of a tile, rows [`STRIDE`] apart.
    p: Aligned,
    /// tanh(s/c) of a register block.
    tanh: Aligned,
    /// The shares of dq that wait for their turn, and room for the next.
    shares: Vec<Share>,
    /// dq of a tile of queries, or dk of a tile of keys.
    pub wide: Aligned,
    /// dv of a tile of keys.
    pub values: Aligned,
    /// dbias of a tile, rows [`STRIDE`] apart.
    pub bias: Aligned,
}

/// What a tile of keys and queries has for dq.
struct Share {
    /// dP, then dS or ds of a tile, rows [`STRIDE`] apart.
    ds: Aligned,
    /// Which pairs of a tile are visible, rows [`MAX_KEYS`] apart.
    visible: Vec<bool>,
    /// The columns of each register block of a tile that were computed.
    strips: Vec<Option<Strip>>,
}

impl Scratch {
    /// The scratch for operands of D = `dim` and E = `value_dim`, for `shares` shares of dq and for
    /// dbias.
    pub fn new(
        cut: &Cut,
        (dim, value_dim): (usize, usize),
        shares: usize,
        dbias: bool,
    ) -> Result<Self, Error> {
        let what = "the scratch of a thread";
        let tile = || Aligned::zeros(cut.queries * STRIDE, what);
        let rows = cut.queries.max(cut.keys.next_multiple_of(cut.rows));
        let sum =
            |dim: usize| Aligned::zeros(dim.next_multiple_of(cut.cols).saturating_mul(rows), what);
        let share = |_| {
            let visible = vec![false; cut.queries * MAX_KEYS];
            Ok(Share { ds: tile()?, visible, strips: vec![None; cut.queries / cut.rows] })
        };
        Ok(Scratch {
            cut: *cut,
            p: tile()?,
            tanh: Aligned::zeros(cut.rows * STRIDE, what)?,
            shares: (0..shares).map(share).collect::<Result<_, Error>>()?,
            wide: sum(dim)?,
            values: sum(value_dim)?,
            bias: if dbias { tile()? } else { Aligned::default() },
        })
    }

    /// ds of a share, rows [`STRIDE`] apart.
    pub fn ds(&self, share: usize) -> &[f32] {
        &self.shares[share].ds
    }

    /// Bytes of its memory.
    pub fn bytes(&self) -> usize {
        let Scratch { p, tanh, shares, wide, values, bias, .. } = self;
        let share = |Share { ds, visible, strips }: &Share| {
            ds.bytes() + visible.len() + size_of_val(&strips[..])
        };
        let tiles = [p, tanh, wide, values, bias].map(Aligned::bytes);
        tiles.iter().sum::<usize>() + shares.iter().map(share).sum::<usize>()
    }
}

impl Pair<'_> {
    /// Whether a tile holds operands that are not finite.
    fn careful(&self, rows: &Range<usize>, cols: &Range<usize>) -> bool {
        touches(&self.queries.non_finite, rows.clone())
            || touches(&self.keys.non_finite, cols.clone())
    }

    /// P and ds of the register block that begins at row `first` of a tile, into rows from `first` on
    /// of the scratch and of the step's share; columns outside the returned strip are zero. Where
    /// the step is not capped, dS stands in place of ds; without gradients nothing does.
    #[inline(always)]
    fn block<I: Isa>(
        &self,
        isa: I,
        tile: &Range<usize>,
        first: usize,
        cols: Range<usize>,
        step: Step,
        scratch: &mut Scratch,
    ) -> Option<Strip> {
        let Scratch { p, tanh, shares, .. } = scratch;
        let Share { ds, visible, .. } = &mut shares[step.share];
        let start = tile.start + first;
        let rows = start..tile.end.min(start + I::Tile::ROWS);
        let panel = cols.start / I::Tile::COLS;
        let factors = Factors {
            rule: &self.rule,
            q: &self.queries.q.across.panels[start * self.dim..],
            k: self.keys.k.across.from(panel),
            dim: self.dim,
        };
        let here = first * STRIDE..(first + I::Tile::ROWS) * STRIDE;
        let (p, ds) = (&mut p[here.clone()], &mut ds[here]);
        let visible = &mut visible[first * MAX_KEYS..];
        let mut block = Block { s: p, tanh, visible };
        let mut max = [I::F32::splat(isa, f32::NEG_INFINITY); MAX_ROWS];
        let cols_len = cols.len().next_multiple_of(I::Tile::COLS);
        let strip = score_block(isa, factors, rows, cols, step.careful, &mut block, &mut max);
        let Some(strip) = strip else {
            clear([p, ds], visible, 0..cols_len, I::Tile::ROWS);
            return None;
        };
        clear([p, ds], visible, 0..strip.cols.start, I::Tile::ROWS);
        clear([p, ds], visible, strip.cols.end..cols_len, I::Tile::ROWS);
        let dout = &self.queries.dout.across.panels[start * self.value_dim..];
        if step.gradients {
            for column in strip.cols.clone().step_by(I::Tile::COLS) {
                let v =
                    &self.keys.v.across.panels[(panel * I::Tile::COLS + column) * self.value_dim..];
                let mut tile = I::Tile::zero(isa);
                tile.add_panel(isa, dout, v, self.value_dim); // (B2)
                tile.store(&mut ds[column..], STRIDE);
            }
        }
        let capped = step.capped && self.rule.softcap.is_some();
        for r in 0..I::Tile::ROWS {
            let lse = I::F32::splat(isa, self.queries.lse[start + r]);
            let delta = I::F32::splat(isa, self.queries.delta[start + r]);
            let at = r * STRIDE + strip.cols.start..r * STRIDE + strip.cols.end;
            let tanh = tanh[at.clone()].chunks_exact(I::F32::N);
            let ds = ds[at.clone()].chunks_exact_mut(I::F32::N);
            for ((p, ds), tanh) in p[at].chunks_exact_mut(I::F32::N).zip(ds).zip(tanh) {
                let weight = exp_difference(isa, I::F32::load(isa, p), lse); // (F4)
                weight.store(p);
                if step.gradients {
                    let mut x = weight * (I::F32::load(isa, ds) - delta); // (B3)
                    if capped {
                        x = x * slope(isa, I::F32::load(isa, tanh)); // (B4)
                    }
                    x.store(ds);
                }
            }
        }
        for edge in strip.edges() {
            let lse = &self.queries.lse[start..start + I::Tile::ROWS];
            blind(lse, visible, &edge);
            select([&mut *p, &mut *ds], visible, &edge, I::Tile::ROWS);
        }
        Some(strip)
    }
}

/// What a sweep asks of a block.
#[derive(Debug, Clone, Copy)]
struct Step {
    /// Whether to write down what is visible even where the mask allows all.
    careful: bool,
    /// Whether ds is wanted at all.
    gradients: bool,
    /// Whether S′ is applied.
    capped: bool,
    /// The share of the scratch that ds goes to.
    share: usize,
}

/// Nothing is visible in these columns of a block: its weights are 0.
pub(super) fn clear<const W: usize>(
    mut weights: [&mut [f32]; W],
    visible: &mut [bool],
    cols: Range<usize>,
    rows: usize,
) {
    if cols.is_empty() {
        return;
    }
    for r in 0..rows {
        for weights in &mut weights {
            weights[r * STRIDE..][cols.clone()].fill(0.0);
        }
        let seen = cols.start..cols.end.min(MAX_KEYS);
        visible[r * MAX_KEYS..][seen].fill(false);
    }
}

/// Rows that saw no key see none: as zeros their scores with keys that are not finite would be NaN.
pub(super) fn blind(lse: &[f32], visible: &mut [bool], cols: &Range<usize>) {
    if cols.is_empty() {
        return;
    }
    for (r, _) in lse.iter().enumerate().filter(|&(_, &lse)| lse == f32::INFINITY) {
        visible[r * MAX_KEYS..][cols.clone()].fill(false);
    }
}

/// The weights of an invisible pair are 0, even where 0 times its operands is NaN.
pub(super) fn select<const W: usize>(
    mut weights: [&mut [f32]; W],
    visible: &[bool],
    cols: &Range<usize>,
    rows: usize,
) {
    if cols.is_empty() {
        return;
    }
    for r in 0..rows {
        let visible = &visible[r * MAX_KEYS..][cols.clone()];
        for weights in &mut weights {
            for (weight, &visible) in weights[r * STRIDE..][cols.clone()].iter_mut().zip(visible) {
                *weight = if visible { *weight } else { 0.0 };
            }
        }
    }
}

/// dq / σ of one tile of queries, left in [`Scratch::wide`].
pub struct QueryTile<'a, 'p> {
    /// The head.
    pub pair: Pair<'p>,
    /// The tile, within the sequence.
    pub rows: Range<usize>,
    /// The thread's memory.
    pub scratch: &'a mut Scratch,
}

compiled_here!(QueryTile<'_, '_>);

impl Kernel for QueryTile<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let QueryTile { pair, rows, scratch } = self;
        let stride = pair.dim.next_multiple_of(I::Tile::COLS);
        scratch.wide.fill(0.0);
        for cols in Cut::tiles(0..pair.rule.sequence.keys, scratch.cut.keys) {
            if pair.rule.cover(rows.clone(), cols.clone()) == Cover::None {
                continue;
            }
            let careful = pair.careful(&rows, &cols);
            let step = Step { careful, gradients: true, capped: true, share: 0 };
            for first in (0..rows.len()).step_by(I::Tile::ROWS) {
                let strip = pair.block(isa, &rows, first, cols.clone(), step, scratch);
                if let Some(strip) = strip {
                    let Scratch { wide, shares, .. } = &mut *scratch;
                    let sum = Sum { acc: &mut wide[first * stride..], stride };
                    let rows = shares[0].rows(first, careful);
                    rows.grow(isa, sum, &pair.keys.k.along, &cols, &strip); // (B5)
                }
            }
        }
    }
}

/// The weights of one register block of queries.
pub(super) struct Rows<'a> {
    /// The weights, rows [`STRIDE`] apart.
    pub weights: &'a [f32],
    /// Which pairs are visible, rows [`MAX_KEYS`] apart.
    pub visible: &'a [bool],
    /// Whether an operand is not finite, so that only visible pairs may be touched.
    pub careful: bool,
}

impl Share {
    /// The weights of the register block that begins at row `first`.
    #[inline(always)]
    fn rows(&self, first: usize, careful: bool) -> Rows<'_> {
        Rows {
            weights: &self.ds[first * STRIDE..],
            visible: &self.visible[first * MAX_KEYS..],
            careful,
        }
    }
}

impl Rows<'_> {
    /// sum ← sum + weights · the rows of `keys`.
    #[inline(always)]
    pub fn grow<I: Isa>(
        &self,
        isa: I,
        sum: Sum<'_>,
        keys: &Packed,
        cols: &Range<usize>,
        strip: &Strip,
    ) {
        let start = strip.cols.start;
        let depth = strip.cols.end.min(cols.len()) - start;
        let keys = Along { packed: keys, start: cols.start + start, depth };
        if self.careful {
            sum.add_visible(
                isa,
                I::Tile::ROWS,
                keys,
                #[inline(always)]
                |r, j| {
                    self.visible[r * MAX_KEYS + start + j]
                        .then(|| self.weights[r * STRIDE + start + j])
                },
            );
        } else {
            sum.add_rows(isa, &self.weights[start..], keys);
        }
    }
}

/// What one tile of queries adds to dk / σ and dv of a tile of keys, in [`Scratch::wide`] and
/// [`Scratch::values`]; ds is left in a share of the scratch, for [`ShareTile`] and for dbias.
pub struct KeyTile<'a, 'p> {
    /// The head.
    pub pair: Pair<'p>,
    /// The queries, within the sequence.
    pub rows: Range<usize>,
    /// The keys, within the sequence.
    pub cols: Range<usize>,
    /// Whether dk is wanted.
    pub dk: bool,
    /// Whether dv is wanted.
    pub dv: bool,
    /// Whether ds is wanted beyond dk.
    pub ds: bool,
    /// The share of the scratch that ds goes to.
    pub share: usize,
    /// The thread's memory.
    pub scratch: &'a mut Scratch,
}

compiled_here!(KeyTile<'_, '_>);

impl Kernel for KeyTile<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let KeyTile { pair, rows, cols, dk, dv, ds, share, scratch } = self;
        let careful = pair.careful(&rows, &cols);
        let step = Step { careful, gradients: dk || ds, capped: true, share };
        let stride = pair.dim.next_multiple_of(I::Tile::COLS);
        // The rows and columns of the tile that hold a visible pair.
        let mut seen: Option<(Range<usize>, Range<usize>)> = None;
        for first in (0..rows.len()).step_by(I::Tile::ROWS) {
            let strip = pair.block(isa, &rows, first, cols.clone(), step, scratch);
            if let Some(strip) = &strip {
                let end = rows.len().min(first + I::Tile::ROWS);
                seen = Some(joined(seen, first..end, &strip.cols));
            }
            scratch.shares[share].strips[first / I::Tile::ROWS] = strip;
        }
        let Some((seen_rows, seen_cols)) = seen else { return };
        let Scratch { p, shares, wide, values, .. } = scratch;
        let Share { ds, visible, .. } = &shares[share];
        let sweep =
            Columns { rows: seen_rows, cols: seen_cols, tile: rows.start, careful, visible };
        if dk {
            sweep.grow(isa, wide, stride, ds, &pair.queries.q.along); // (B6)
        }
        if dv {
            let stride = pair.value_dim.next_multiple_of(I::Tile::COLS);
            sweep.grow(isa, values, stride, p, &pair.queries.dout.along); // (B7)
        }
    }
}

/// What the keys of a [`KeyTile`] add to dq / σ of its queries.
pub struct ShareTile<'a, 'p> {
    /// The head.
    pub pair: Pair<'p>,
    /// The queries, within the sequence.
    pub rows: Range<usize>,
    /// The keys, within the sequence.
    pub cols: Range<usize>,
    /// The sum of dq.
    pub dq: &'a mut [f32],
    /// The share of the scratch that holds its ds.
    pub share: usize,
    /// The thread's memory.
    pub scratch: &'a Scratch,
}

compiled_here!(ShareTile<'_, '_>);

impl Kernel for ShareTile<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let ShareTile { pair, rows, cols, dq, share, scratch } = self;
        let share = &scratch.shares[share];
        let careful = pair.careful(&rows, &cols);
        let stride = pair.dim.next_multiple_of(I::Tile::COLS);
        for first in (0..rows.len()).step_by(I::Tile::ROWS) {
            let Some(strip) = &share.strips[first / I::Tile::ROWS] else { continue };
            let sum = Sum { acc: &mut dq[first * stride..], stride };
            let rows = share.rows(first, careful);
            rows.grow(isa, sum, &pair.keys.k.along, &cols, strip); // (B5)
        }
    }
}

/// The rows and columns of a tile that hold a visible pair, after one more register block.
pub(super) fn joined(
    seen: Option<(Range<usize>, Range<usize>)>,
    rows: Range<usize>,
    cols: &Range<usize>,
) -> (Range<usize>, Range<usize>) {
    match seen {
        None => (rows, cols.clone()),
        Some((above, before)) => {
            (above.start..rows.end, before.start.min(cols.start)..before.end.max(cols.end))
        }
    }
}

/// The part of a tile of weights that holds visible pairs, seen from the keys.
pub(super) struct Columns<'a> {
    /// The rows that hold a visible pair, from the tile's first.
    pub rows: Range<usize>,
    /// The columns that do.
    pub cols: Range<usize>,
    /// The first query of the tile.
    pub tile: usize,
    /// Whether an operand is not finite, so that only visible pairs may be touched.
    pub careful: bool,
    /// Which pairs are visible, rows [`MAX_KEYS`] apart.
    pub visible: &'a [bool],
}

impl Columns<'_> {
    /// acc ← acc + weightsᵀ · rows, one register block of keys after the other, if the pass has such
    /// rows.
    #[inline(always)]
    pub fn grow<I: Isa>(
        &self,
        isa: I,
        acc: &mut [f32],
        stride: usize,
        weights: &[f32],
        rows: &Packed,
    ) {
        if rows.panels.is_empty() {
            return;
        }
        let rows_here =
            Along { packed: rows, start: self.tile + self.rows.start, depth: self.rows.len() };
        let top = self.rows.start;
        let first = self.cols.start / I::Tile::ROWS * I::Tile::ROWS;
        for key in (first..self.cols.end).step_by(I::Tile::ROWS) {
            if key * stride >= acc.len() {
                break; // columns that only fill the last register block of the scores
            }
            let sum = Sum { acc: &mut acc[key * stride..], stride };
            if self.careful {
                let keys = I::Tile::ROWS.min(self.cols.end - key);
                sum.add_visible(
                    isa,
                    keys,
                    rows_here,
                    #[inline(always)]
                    |r, i| {
                        self.visible[(top + i) * MAX_KEYS + key + r]
                            .then(|| weights[(top + i) * STRIDE + key + r])
                    },
                );
            } else {
                sum.add_columns(isa, &weights[top * STRIDE + key..], rows_here);
            }
        }
    }
}

/// dbias of one tile of queries and keys, the sum over every head and sequence that shares the bias,
/// left in [`Scratch::bias`].
pub struct BiasTile<'a, 'p> {
    /// The heads and sequences, in the order of the sum.
    pub pairs: &'a [Pair<'p>],
    /// The queries, within the sequences.
    pub rows: Range<usize>,
    /// The keys, within the sequences.
    pub cols: Range<usize>,
    /// The thread's memory.
    pub scratch: &'a mut Scratch,
}

compiled_here!(BiasTile<'_, '_>);

impl Kernel for BiasTile<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let BiasTile { pairs, rows, cols, scratch } = self;
        scratch.bias.fill(0.0);
        for pair in pairs {
            let sequence = pair.rule.sequence;
            let rows = rows.start..rows.end.min(sequence.queries);
            let cols = cols.start..cols.end.min(sequence.keys);
            if pair.rule.cover(rows.clone(), cols.clone()) == Cover::None {
                continue;
            }
            let careful = pair.careful(&rows, &cols);
            let step = Step { careful, gradients: true, capped: false, share: 0 };
            for first in (0..rows.len()).step_by(I::Tile::ROWS) {
                if pair.block(isa, &rows, first, cols.clone(), step, scratch).is_none() {
                    continue;
                }
                for r in first..rows.len().min(first + I::Tile::ROWS) {
                    let ds = &scratch.shares[0].ds[r * STRIDE..][..cols.len()];
                    let sum = &mut scratch.bias[r * STRIDE..][..cols.len()];
                    sum.iter_mut().zip(ds).for_each(|(sum, ds)| *sum += ds); // (B9)
                }
            }
        }
    }
}
