//! Uses of the weights of a tile: hidden where a pair is not visible, and multiplied by rows; and the
//! products that they are made of.

use super::packs::Both;
use super::pair::RegisterBlock;
use super::scores::{ACTIVE, Strip};
use crate::lanes::{Isa, Lanes, Tile};
use crate::pack::Packed;
use crate::products::{Along, Sum};
use crate::tile::{MAX_KEYS, STRIDE};
use std::ops::Range;

/// [`Engine::multiply`](super::engine::Engine::multiply) in registers.
#[inline(always)]
pub fn multiply<I: Isa, const T: usize>(
    isa: I,
    at: &RegisterBlock,
    strip: &Strip,
    dim: usize,
    terms: [(&Both<'_>, &Both<'_>); T],
    factor: Option<f32>,
    to: &mut [f32],
) {
    for column in strip.cols.clone().step_by(I::Tile::COLS) {
        let mut tile = I::Tile::zero(isa);
        for (a, b) in terms {
            let (a, b) = (&a.across.panels, &b.across.panels);
            if !a.is_empty() && !b.is_empty() {
                let (a, b) = (&a[at.rows.start * dim..], &b[(at.cols.start + column) * dim..]);
                tile.add_panel(isa, a, b, dim);
            }
        }
        if let Some(factor) = factor {
            let factor = I::F32::splat(isa, factor);
            tile = tile.map(
                #[inline(always)]
                |x| x * factor,
            );
        }
        tile.store(&mut to[column..], STRIDE);
    }
}

/// Clears the weights of a block beside its strip, up to column `end`: nothing is visible there.
pub fn clear<const W: usize>(
    mut weights: [&mut [f32]; W],
    visible: &mut [u8],
    strip: Option<&Strip>,
    (rows, end): (usize, usize),
) {
    let strip = strip.map_or(end..end, |strip| strip.cols.clone());
    for cols in [0..strip.start, strip.end..end] {
        if cols.is_empty() {
            continue;
        }
        for r in 0..rows {
            for weights in &mut weights {
                weights[r * STRIDE..][cols.clone()].fill(0.0);
            }
            let seen = cols.start..cols.end.min(MAX_KEYS);
            visible[r * MAX_KEYS..][seen].fill(0);
        }
    }
}

/// Hides invisible pairs at the edges of a strip: their weights are 0, even where 0 times their operands
/// is NaN. So are those of the rows that see no key at all, which are packed as zeros: their scores with
/// keys that are not finite would be NaN.
pub fn hide<const W: usize>(
    weights: [&mut [f32]; W],
    visible: &mut [u8],
    strip: &Strip,
    lse: &[f32],
) {
    for cols in strip.edges() {
        for (r, _) in lse.iter().enumerate().filter(|(_, lse)| **lse == f32::INFINITY) {
            visible[r * MAX_KEYS..][cols.clone()].fill(0);
        }
    }
    conceal(weights, visible, strip, lse.len());
}

/// As [`hide`], for `rows` rows of which none is packed as zeros.
pub fn conceal<const W: usize>(
    mut weights: [&mut [f32]; W],
    visible: &[u8],
    strip: &Strip,
    rows: usize,
) {
    for cols in strip.edges() {
        if cols.is_empty() {
            continue;
        }
        for r in 0..rows {
            let visible = &visible[r * MAX_KEYS..][cols.clone()];
            for weights in &mut weights {
                let weights = &mut weights[r * STRIDE..][cols.clone()];
                for (weight, &visible) in weights.iter_mut().zip(visible) {
                    *weight = if visible != 0 { *weight } else { 0.0 };
                }
            }
        }
    }
}

/// Notes which visible pairs are active: those whose weight e in the columns `cols` is not 0.
pub fn mark_active(e: &[f32], visible: &mut [u8], cols: &Range<usize>, rows: usize) {
    for r in 0..rows {
        let e = &e[r * STRIDE..][cols.clone()];
        let visible = &mut visible[r * MAX_KEYS..][cols.start..cols.end.min(MAX_KEYS)];
        for (visible, e) in visible.iter_mut().zip(e) {
            if *visible != 0 && *e != 0.0 {
                *visible |= ACTIVE;
            }
        }
    }
}

/// The smallest number above 0: where P + c is not below it, be it NaN, a pair is active.
#[inline(always)]
pub fn smallest<I: Isa>(isa: I) -> I::F32 {
    I::F32::splat(isa, f32::from_bits(1))
}

/// The weights of one register block of queries.
pub struct Rows<'a> {
    /// The weights, rows [`STRIDE`] apart.
    pub weights: &'a [f32],
    /// Marks of the pairs, [`VISIBLE`] or also [`ACTIVE`], rows [`MAX_KEYS`] apart.
    pub visible: &'a [u8],
    /// [`VISIBLE`], or [`ACTIVE`]: the pairs that may be touched.
    pub pairs: u8,
    /// True if an operand is not finite, so that only such pairs may be touched.
    pub has_nonfinite: bool,
}

impl Rows<'_> {
    /// sum ← sum + weights · the rows of `keys`, in the columns of a strip.
    #[inline(always)]
    pub fn grow<I: Isa>(
        &self,
        isa: I,
        sum: Sum<'_>,
        keys: &Packed<'_>,
        cols: &Range<usize>,
        strip: &Range<usize>,
    ) {
        let start = strip.start;
        let depth = strip.end.min(cols.len()) - start;
        let keys = Along { packed: keys, start: cols.start + start, depth };
        if self.has_nonfinite {
            sum.add_visible::<I, I::Tile>(
                isa,
                I::Tile::ROWS,
                keys,
                #[inline(always)]
                |r, j| {
                    let touched = self.visible[r * MAX_KEYS + start + j] & self.pairs != 0;
                    if touched { Some(self.weights[r * STRIDE + start + j]) } else { None }
                },
            );
        } else {
            sum.add_rows::<I, I::Tile>(isa, &self.weights[start..], keys);
        }
    }
}

/// The shortest range that holds two, of which the first may be empty.
pub fn joined(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    if a.is_empty() { b.clone() } else { a.start.min(b.start)..a.end.max(b.end) }
}

/// The part of a tile of weights that holds visible pairs, seen from the keys.
pub struct Columns<'a> {
    /// The rows that hold a visible pair, from the tile's first.
    pub rows: Range<usize>,
    /// The columns that do.
    pub cols: Range<usize>,
    /// The first query of the tile.
    pub tile: usize,
    /// True if an operand is not finite, so that only visible pairs may be touched.
    pub has_nonfinite: bool,
    /// Marks of the pairs, [`VISIBLE`] or also [`ACTIVE`], rows [`MAX_KEYS`] apart.
    pub visible: &'a [u8],
}

impl<'a> Columns<'a> {
    /// The blocks of `height` keys, each with the rows that hold an active pair: `active` has those of
    /// each panel of `width`. The weights of the others are 0.
    #[inline(always)]
    pub fn active<'s>(
        &'s self,
        [height, width]: [usize; 2],
        active: &'s [Range<usize>],
    ) -> impl Iterator<Item = Columns<'a>> + use<'a, 's> {
        let first = self.cols.start / height * height;
        (first..self.cols.end).step_by(height).map(
            #[inline(always)]
            move |key| {
                let cols = key..self.cols.end.min(key + height);
                let panels = cols.start / width..cols.end.div_ceil(width);
                let mut rows = 0..0;
                for active in active[panels].iter().filter(|rows| !rows.is_empty()) {
                    rows = joined(&rows, active);
                }
                Columns { rows, cols, ..*self }
            },
        )
    }

    /// acc ← acc + weightsᵀ · rows, one register block of keys after the other, if the pass has such
    /// rows. `pairs` are those that may be touched, as in [`Rows`].
    #[inline(always)]
    pub fn grow<I: Isa>(
        &self,
        isa: I,
        acc: &mut [f32],
        stride: usize,
        (weights, pairs): (&[f32], u8),
        rows: &Packed<'_>,
    ) {
        if rows.panels.is_empty() || self.rows.is_empty() {
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
            if self.has_nonfinite {
                let keys = I::Tile::ROWS.min(self.cols.end - key);
                sum.add_visible::<I, I::Tile>(
                    isa,
                    keys,
                    rows_here,
                    #[inline(always)]
                    |r, i| {
                        let touched = self.visible[(top + i) * MAX_KEYS + key + r] & pairs != 0;
                        if touched { Some(weights[(top + i) * STRIDE + key + r]) } else { None }
                    },
                );
            } else {
                sum.add_columns::<I, I::Tile>(isa, &weights[top * STRIDE + key..], rows_here);
            }
        }
    }
}
