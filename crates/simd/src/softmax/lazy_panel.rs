//! The weights of lazy attention in a register block of queries, panel by panel of keys: for the backward pass and the
//! second order alike.
//!
//! Activity is decided here, once: all bodies have the same S, lse and c, and so the same bits of P + c.

use super::engine::{Engine, Register};
use super::packs::Both;
use super::pair::{Pair, RegisterBlock};
use super::scores::Strip;
use super::scratch::{Share, TileMemory};
use super::weights::{clear, hide, joined, mark_active, smallest};
use crate::exp::exp_difference;
use crate::lanes::matrix::BLOCK;
use crate::lanes::{Isa, Lanes};
use crate::tile::{MAX_KEYS, STRIDE};
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
    pub fn clear<E: Engine>(&mut self, strip: Option<&Strip>) {
        let end = self.at.cols.len().next_multiple_of(E::COLS);
        let (weights, visible) = self.parts();
        clear(weights, visible, strip, (E::ROWS, end));
    }

    /// Makes the weights of pairs that are not visible 0.
    #[inline(always)]
    pub fn hide<E: Engine>(&mut self, here: &Strip) {
        let lse = self.pair.lse(self.at, E::ROWS);
        let (weights, visible) = self.parts();
        hide(weights, visible, here, lse);
    }

    /// (E4) P of a panel, from S; whether a pair of it is active, unless it is hidden.
    #[inline(always)]
    pub fn softmax_weights<E: Engine>(&mut self, by: E, column: usize) -> bool {
        let (isa, pair, at) = (by.isa(), self.pair, self.at);
        let zero = Register::<E>::splat(isa, 0.0);
        let mut any = zero;
        for r in 0..E::ROWS {
            let i = at.rows.start + r;
            let lse = Register::<E>::splat(isa, pair.queries.lse[i]);
            let c = Register::<E>::splat(isa, pair.stats.offset[i - pair.stats.first]);
            let s = &mut self.weights[0][r * STRIDE + column..][..E::COLS];
            for s in s.chunks_exact_mut(Register::<E>::N) {
                let p = exp_difference(isa, Register::<E>::load(isa, s), lse);
                any = any + zero.max(p + c);
                p.store(s);
            }
        }
        any.reduce_add() != 0.0
    }

    /// Writes Σ A Bᵀ of a panel, over rows of E elements, in place of the weights of a number: see
    /// [`Engine::multiply`].
    #[inline(always)]
    pub fn pull<E: Engine, const T: usize>(
        &mut self,
        by: E,
        here: &Strip,
        terms: [(&Both<'_>, &Both<'_>); T],
        number: usize,
    ) {
        by.multiply(self.at, here, self.pair.value_dim, terms, None, self.weights[number]);
    }

    /// Notes that a panel has an active pair in rows of the block.
    #[inline(always)]
    pub fn note_active<E: Engine>(&mut self, column: usize) {
        let rows = self.at.first..self.at.first + self.at.rows.len();
        let noted = &mut self.active[column / E::COLS];
        *noted = joined(noted, &rows);
    }

    /// Notes which pairs of the strip are active, by e, where an operand is not finite.
    #[inline(always)]
    pub fn mark_active<E: Engine>(&mut self, strip: &Strip) {
        if self.at.has_nonfinite {
            mark_active(self.weights[0], self.visible, &strip.cols, E::ROWS);
        }
    }

    /// Replaces the weights of a panel by what `f` makes of them and of the numbers that `row` has for a row of the
    /// statistics; `f` gets the row of the block, too.
    #[inline(always)]
    pub fn each<E: Engine, R>(
        &mut self,
        by: E,
        column: usize,
        row: impl Fn(usize) -> R,
        mut f: impl FnMut(usize, [Register<E>; W], &R) -> [Register<E>; W],
    ) {
        let isa = by.isa();
        for r in 0..E::ROWS {
            let row = row(self.at.rows.start + r - self.pair.stats.first);
            for at in (column..column + E::COLS).step_by(Register::<E>::N) {
                let here = r * STRIDE + at;
                let mut x = [Register::<E>::splat(isa, 0.0); W];
                for (x, weights) in x.iter_mut().zip(&self.weights) {
                    *x = Register::<E>::load(isa, &weights[here..]);
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
pub fn add_tau<E: Engine>(
    pair: &Pair<'_>,
    at: &RegisterBlock,
    sums: &[Register<E>; BLOCK],
    tau: &mut f64,
) {
    let share = &pair.stats.share[at.rows.start - pair.stats.first..][..E::ROWS];
    for (sum, share) in sums.iter().zip(share) {
        *tau += f64::from(sum.reduce_add()) * f64::from(*share);
    }
}
