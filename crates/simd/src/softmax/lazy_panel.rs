//! The weights of lazy attention in a register block of queries, panel by panel of keys: for the backward pass and the
//! second order alike.
//!
//! Activity is decided here, once: all bodies have the same S, lse and c, and so the same bits of P + c.

use super::block::{Pair, RegisterBlock};
use super::packs::Both;
use super::scores::Strip;
use super::scratch::{Share, TileMemory};
use super::weights::{clear, hide, joined, mark_active, multiply, smallest};
use crate::exp::exp_difference;
use crate::lanes::{Isa, Lanes, Tile};
use crate::tile::{MAX_KEYS, MAX_ROWS, STRIDE};
use std::ops::Range;

/// A number of a pair, such as g, or 0 where the pair is not active: where P + c is below the smallest
/// number above 0; not where it is NaN.
#[inline(always)]
pub fn active<I: Isa>(isa: I, raised: I::F32, g: I::F32) -> I::F32 {
    raised.select_less(smallest(isa), I::F32::splat(isa, 0.0), g)
}

/// The weights of a register block, `W` of each pair; the first of them is S, then P.
pub struct Panel<'a, 'p, const W: usize> {
    pair: &'a Pair<'p>,
    at: &'a RegisterBlock,
    /// Of the first row of the block on, rows [`STRIDE`] apart.
    weights: [&'a mut [f32]; W],
    /// Rows [`MAX_KEYS`] apart.
    visible: &'a mut [u8],
    /// [`TileMemory::active`].
    active: &'a mut [Range<usize>],
}

impl<'a, 'p> Panel<'a, 'p, 2> {
    /// S and g, which become e and dS.
    #[inline(always)]
    pub fn of_gradient(
        pair: &'a Pair<'p>,
        at: &'a RegisterBlock,
        memory: &'a mut TileMemory<'_>,
    ) -> Self {
        let TileMemory { p, shares, active, .. } = memory;
        let Share { ds, visible, .. } = &mut shares[at.share];
        let row = at.first * STRIDE;
        let weights = [&mut p[row..], &mut ds[row..]];
        Panel { pair, at, weights, visible: &mut visible[at.first * MAX_KEYS..], active }
    }
}

impl<'a, 'p> Panel<'a, 'p, 4> {
    /// S, U, g and T, which become e, ė, dS and X.
    #[inline(always)]
    pub fn of_second(
        pair: &'a Pair<'p>,
        at: &'a RegisterBlock,
        memory: &'a mut TileMemory<'_>,
    ) -> Self {
        let TileMemory { p, p_dot, x, shares, active, .. } = memory;
        let Share { ds, visible, .. } = &mut shares[at.share];
        let row = at.first * STRIDE;
        let weights = [&mut p[row..], &mut p_dot[row..], &mut ds[row..], &mut x[row..]];
        Panel { pair, at, weights, visible: &mut visible[at.first * MAX_KEYS..], active }
    }
}

impl<const W: usize> Panel<'_, '_, W> {
    /// All weights, and the visible pairs.
    #[inline(always)]
    fn parts(&mut self) -> ([&mut [f32]; W], &mut [u8]) {
        (self.weights.each_mut().map(|weights| &mut **weights), &mut *self.visible)
    }

    /// Clears the weights beside the strip, all of them if there is none.
    #[inline(always)]
    pub fn clear<I: Isa>(&mut self, strip: Option<&Strip>) {
        let end = self.at.cols.len().next_multiple_of(I::Tile::COLS);
        let (weights, visible) = self.parts();
        clear(weights, visible, strip, (I::Tile::ROWS, end));
    }

    /// Makes the weights of pairs that are not visible 0.
    #[inline(always)]
    pub fn hide<I: Isa>(&mut self, here: &Strip) {
        let lse = self.pair.lse::<I>(self.at);
        let (weights, visible) = self.parts();
        hide(weights, visible, here, lse);
    }

    /// (E4) P of a panel, from S; whether a pair of it is active, unless it is hidden.
    #[inline(always)]
    pub fn softmax_weights<I: Isa>(&mut self, isa: I, column: usize) -> bool {
        let (pair, at) = (self.pair, self.at);
        let zero = I::F32::splat(isa, 0.0);
        let mut any = zero;
        for r in 0..I::Tile::ROWS {
            let i = at.rows.start + r;
            let lse = I::F32::splat(isa, pair.queries.lse[i]);
            let c = I::F32::splat(isa, pair.stats.offset[i - pair.stats.first]);
            let s = &mut self.weights[0][r * STRIDE + column..][..I::Tile::COLS];
            for s in s.chunks_exact_mut(I::F32::N) {
                let p = exp_difference(isa, I::F32::load(isa, s), lse);
                any = any + zero.max(p + c);
                p.store(s);
            }
        }
        any.reduce_add() != 0.0
    }

    /// Writes Σ A Bᵀ of a panel, over rows of E elements, in place of the weights of a number: see [`multiply`].
    #[inline(always)]
    pub fn pull<I: Isa, const T: usize>(
        &mut self,
        isa: I,
        here: &Strip,
        terms: [(&Both<'_>, &Both<'_>); T],
        number: usize,
    ) {
        multiply(isa, self.at, here, self.pair.value_dim, terms, None, self.weights[number]);
    }

    /// Notes that a panel has an active pair in rows of the block.
    #[inline(always)]
    pub fn note_active<I: Isa>(&mut self, column: usize) {
        let rows = self.at.first..self.at.first + self.at.rows.len();
        let noted = &mut self.active[column / I::Tile::COLS];
        *noted = joined(noted, &rows);
    }

    /// Notes which pairs of the strip are active, by e, where an operand is not finite.
    #[inline(always)]
    pub fn mark_active<I: Isa>(&mut self, strip: &Strip) {
        if self.at.has_nonfinite {
            mark_active(self.weights[0], self.visible, &strip.cols, I::Tile::ROWS);
        }
    }

    /// Replaces the weights of a panel by what `f` makes of them and of the numbers that `row` has for a row of the
    /// statistics; `f` gets the row of the block, too.
    #[inline(always)]
    pub fn each<I: Isa, R>(
        &mut self,
        isa: I,
        column: usize,
        row: impl Fn(usize) -> R,
        mut f: impl FnMut(usize, [I::F32; W], &R) -> [I::F32; W],
    ) {
        for r in 0..I::Tile::ROWS {
            let row = row(self.at.rows.start + r - self.pair.stats.first);
            for at in (column..column + I::Tile::COLS).step_by(I::F32::N) {
                let here = r * STRIDE + at;
                let mut x = [I::F32::splat(isa, 0.0); W];
                for (x, weights) in x.iter_mut().zip(&self.weights) {
                    *x = I::F32::load(isa, &weights[here..]);
                }
                let x = f(r, x, &row);
                for (x, weights) in x.iter().zip(&mut self.weights) {
                    x.store(&mut weights[here..]);
                }
            }
        }
    }
}

/// Adds (1/n) Σ of a block to [`TileMemory::tau`], of sums over its rows: (E14), (E30).
#[inline(always)]
pub fn add_tau<I: Isa>(
    pair: &Pair<'_>,
    at: &RegisterBlock,
    sums: &[I::F32; MAX_ROWS],
    tau: &mut f64,
) {
    let share = &pair.stats.share[at.rows.start - pair.stats.first..][..I::Tile::ROWS];
    for (sum, share) in sums.iter().zip(share) {
        *tau += f64::from(sum.reduce_add()) * f64::from(*share);
    }
}
