//! The weights of lazy attention's second order: for a register block of queries against a tile of keys
//!
//! ```text
//! S = σ·Q Kᵀ + bias, mask                             (E1) (E2)
//! U = σ·(ddQ Kᵀ + Q ddKᵀ) + ddbias                    (E19)
//! P = e^(S − lse),  e = max(P + c, 0)                 (E4) (E5)
//! g = dO Vᵀ,  T = dO ddVᵀ + cot_o Vᵀ                  in panels of keys with an active pair (E7) (E20)
//! ```
//!
//! [`Moments`] sums over a tile of queries P U to u (E21), a P g to Δ (E8), and a P (U g + T), from which
//! Δ̇ follows (E24). With them [`LazySecond`] has
//!
//! ```text
//! Ṗ  = P ⊙ (U − u)                                    (E22)
//! dS = P ⊙ (a g − δ),  δ = Δ − dlse                   (E9)
//! X  = Ṗ ⊙ (a g − δ) + P ⊙ (a T − z),  z = Δ̇ − cot_lse  (E25)
//! ė  = a (Ṗ + ddτ/n)
//! ```
//!
//! and sums X and dS to gq and gk (E26), (E27), ė and e to gdout and gv (E23), (E28), X to gbias (E29), and
//! a T to gτ (E30).
//!
//! Activity is decided once: all have the same S, lse and c, and so the same bits of P + c.

use super::block::{Body, OfKeys, OfQueries, Pair, RegisterBlock, Term};
use super::lazy_gradient::{active, weigh};
use super::scores::{ACTIVE, Strip, VISIBLE};
use super::scratch::{Share, Sums, Target, TileMemory, Weight};
use super::second::scores;
use super::weights::{clear, hide, joined, mark_active, multiply};
use crate::lanes::{Isa, Lanes, Tile};
use crate::tile::{MAX_KEYS, MAX_ROWS, STRIDE};
use std::ops::Range;

/// Nothing but sums over each row.
#[derive(Debug, Clone, Copy)]
pub struct Moments;

impl Body for Moments {
    const ROWS: &'static [Term<OfKeys>] = &[];
    const COLUMNS: &'static [Term<OfQueries>] = &[];
    const BIAS: Weight = Weight::P;

    #[inline(always)]
    fn weights<I: Isa>(
        self,
        isa: I,
        pair: &Pair<'_>,
        at: &RegisterBlock,
        memory: &mut TileMemory<'_>,
    ) -> Option<Strip> {
        let strip = scores(isa, pair, at, memory)?;
        let zero = I::F32::splat(isa, 0.0);
        let mut sums = [[zero; MAX_ROWS]; 3];
        let mut panel = Panel::new(pair, at, memory);
        for column in strip.cols.clone().step_by(I::Tile::COLS) {
            let here = strip.within(&(column..column + I::Tile::COLS));
            let any = panel.begin(isa, &here);
            let [of_u, of_delta, of_change] = &mut sums;
            panel.each(
                isa,
                column,
                #[inline(always)]
                |r, Weights { p, u, g, t }, row| {
                    of_u[r] = p.mul_add(u, of_u[r]);
                    if any {
                        let raised = p + row.offset;
                        of_delta[r] = p.mul_add(active(isa, raised, g), of_delta[r]);
                        let change = active(isa, raised, u.mul_add(g, t));
                        of_change[r] = p.mul_add(change, of_change[r]);
                    }
                    Weights { p, u, g, t }
                },
            );
        }
        for (to, of) in memory.row_sums.iter_mut().zip(&sums) {
            for (to, sum) in to.iter_mut().zip(&of[..I::Tile::ROWS]) {
                *to = sum.reduce_add();
            }
        }
        Some(strip)
    }

    /// (E21), (E8), and what (E24) is made of.
    #[inline(always)]
    fn add_numbers<I: Isa>(
        self,
        _isa: I,
        first: usize,
        _strip: &Strip,
        memory: &TileMemory<'_>,
        sums: &mut Sums<'_>,
    ) {
        let size = sums.numbers.len() / memory.row_sums.len();
        for (sums, of_block) in sums.numbers.chunks_exact_mut(size).zip(&memory.row_sums) {
            let sums = sums[first..].iter_mut().take(I::Tile::ROWS);
            sums.zip(of_block).for_each(|(sum, of_block)| *sum += of_block);
        }
    }
}

/// e, ė, dS and X, and (1/n) Σ a T, which is added to [`TileMemory::tau`].
#[derive(Debug, Clone, Copy)]
pub struct LazySecond;

impl Body for LazySecond {
    const ROWS: &'static [Term<OfKeys>] = &[
        Term { to: Target::Wide, weights: Weight::X, rows: |keys| &keys.k.along }, // (E26)
        Term { to: Target::Wide, weights: Weight::Ds, rows: |keys| &keys.ddk.along },
        Term { to: Target::Values, weights: Weight::PDot, rows: |keys| &keys.v.along }, // (E23)
        Term { to: Target::Values, weights: Weight::P, rows: |keys| &keys.ddv.along },
    ];
    const COLUMNS: &'static [Term<OfQueries>] = &[
        Term { to: Target::Wide, weights: Weight::X, rows: |queries| &queries.q.along }, // (E27)
        Term { to: Target::Wide, weights: Weight::Ds, rows: |queries| &queries.ddq.along },
        Term { to: Target::Values, weights: Weight::PDot, rows: |queries| &queries.dout.along }, // (E28)
        Term { to: Target::Values, weights: Weight::P, rows: |queries| &queries.cot_o.along },
    ];
    const BIAS: Weight = Weight::X;

    fn pairs(weight: Weight) -> u8 {
        if matches!(weight, Weight::P | Weight::PDot) { ACTIVE } else { VISIBLE }
    }

    #[inline(always)]
    fn weights<I: Isa>(
        self,
        isa: I,
        pair: &Pair<'_>,
        at: &RegisterBlock,
        memory: &mut TileMemory<'_>,
    ) -> Option<Strip> {
        let strip = scores(isa, pair, at, memory);
        let mut panel = Panel::new(pair, at, memory);
        let rows = at.first..at.first + at.rows.len();
        let end = at.cols.len().next_multiple_of(I::Tile::COLS);
        let (weights, visible) = panel.weights();
        clear(weights, visible, strip.as_ref(), (I::Tile::ROWS, end));
        let strip = strip?;
        let zero = I::F32::splat(isa, 0.0);
        let mut sums = [zero; MAX_ROWS];
        for column in strip.cols.clone().step_by(I::Tile::COLS) {
            let here = strip.within(&(column..column + I::Tile::COLS));
            if panel.begin(isa, &here) {
                let with_active = &mut panel.active[column / I::Tile::COLS];
                *with_active = joined(with_active, &rows);
                panel.each(
                    isa,
                    column,
                    #[inline(always)]
                    |r, Weights { p, u, g, t }, row| {
                        let raised = p + row.offset;
                        let (g, t) = (active(isa, raised, g), active(isa, raised, t));
                        sums[r] = sums[r] + t;
                        let moved = p * (u - row.u);
                        Weights {
                            // `max` returns its second operand where either is NaN: so a NaN shows.
                            p: zero.max(raised),
                            u: active(isa, raised, moved + row.raise),
                            g: p * (g - row.delta),
                            t: moved.mul_add(g - row.delta, p * (t - row.z)),
                        }
                    },
                );
            } else {
                panel.each(
                    isa,
                    column,
                    #[inline(always)]
                    |_, Weights { p, u, .. }, row| {
                        let (moved, delta) = (p * (u - row.u), zero - row.delta);
                        let x = moved.mul_add(delta, p * (zero - row.z));
                        Weights { p: zero, u: zero, g: p * delta, t: x }
                    },
                );
            }
            let (weights, visible) = panel.weights();
            hide(weights, visible, &here, pair.lse::<I>(at));
        }
        if at.has_nonfinite {
            mark_active(panel.p, panel.visible, &strip.cols, I::Tile::ROWS);
        }
        let share = &pair.stats.share[at.rows.start - pair.stats.first..][..I::Tile::ROWS];
        for (sum, share) in sums.iter().zip(share) {
            memory.tau += f64::from(sum.reduce_add()) * f64::from(*share); // (E30)
        }
        Some(strip)
    }
}

/// Some weights of a row: P, U, g and T, or e, ė, dS and X.
struct Weights<V> {
    p: V,
    u: V,
    g: V,
    t: V,
}

/// Numbers of a row.
struct Row<V> {
    /// c.
    offset: V,
    delta: V,
    u: V,
    z: V,
    /// ddτ/n.
    raise: V,
}

/// The weights of a register block, panel by panel of keys.
struct Panel<'a, 'p> {
    pair: &'a Pair<'p>,
    at: &'a RegisterBlock,
    /// S, then P, then e.
    p: &'a mut [f32],
    /// U, then ė.
    u: &'a mut [f32],
    /// g, then dS.
    g: &'a mut [f32],
    /// T, then X.
    t: &'a mut [f32],
    visible: &'a mut [u8],
    /// [`TileMemory::active`].
    active: &'a mut [Range<usize>],
}

impl<'a, 'p> Panel<'a, 'p> {
    #[inline(always)]
    fn new(pair: &'a Pair<'p>, at: &'a RegisterBlock, memory: &'a mut TileMemory<'_>) -> Self {
        let TileMemory { p, p_dot, x, shares, active, .. } = memory;
        let Share { ds, visible, .. } = &mut shares[at.share];
        let row = at.first * STRIDE;
        Panel {
            pair,
            at,
            p: &mut p[row..],
            u: &mut p_dot[row..],
            g: &mut ds[row..],
            t: &mut x[row..],
            visible: &mut visible[at.first * MAX_KEYS..],
            active,
        }
    }

    /// All weights, and what is visible.
    #[inline(always)]
    fn weights(&mut self) -> ([&mut [f32]; 4], &mut [u8]) {
        ([&mut *self.p, &mut *self.u, &mut *self.g, &mut *self.t], &mut *self.visible)
    }

    /// P of a panel and, where a pair of it is active unless it is hidden, g and T; whether that is so.
    /// What belongs to pairs that are not visible becomes 0.
    #[inline(always)]
    fn begin<I: Isa>(&mut self, isa: I, here: &Strip) -> bool {
        let (pair, at) = (self.pair, self.at);
        let any = weigh(isa, pair, at, self.p, here.cols.start);
        if any {
            let (queries, keys, width) = (pair.queries, pair.keys, pair.value_dim);
            let of_change = [(&queries.dout, &keys.ddv), (&queries.cot_o, &keys.v)];
            multiply(isa, at, here, width, [(&queries.dout, &keys.v)], None, self.g); // (E7)
            multiply(isa, at, here, width, of_change, None, self.t); // (E20)
        }
        let (weights, visible) = self.weights();
        hide(weights, visible, here, pair.lse::<I>(at));
        any
    }

    /// Replaces the weights of a panel by what `f` makes of them and of the numbers of the row.
    #[inline(always)]
    fn each<I: Isa>(
        &mut self,
        isa: I,
        column: usize,
        mut f: impl FnMut(usize, Weights<I::F32>, &Row<I::F32>) -> Weights<I::F32>,
    ) {
        let Pair { stats, ddtau, .. } = self.pair;
        for r in 0..I::Tile::ROWS {
            let i = self.at.rows.start + r - stats.first;
            let row = Row {
                offset: I::F32::splat(isa, stats.offset[i]),
                delta: I::F32::splat(isa, stats.delta[i]),
                u: I::F32::splat(isa, stats.u[i]),
                z: I::F32::splat(isa, stats.z[i]),
                raise: I::F32::splat(isa, stats.share[i] * ddtau),
            };
            for at in (column..column + I::Tile::COLS).step_by(I::F32::N) {
                let here = r * STRIDE + at;
                let weights = Weights {
                    p: I::F32::load(isa, &self.p[here..]),
                    u: I::F32::load(isa, &self.u[here..]),
                    g: I::F32::load(isa, &self.g[here..]),
                    t: I::F32::load(isa, &self.t[here..]),
                };
                let Weights { p, u, g, t } = f(r, weights, &row);
                p.store(&mut self.p[here..]);
                u.store(&mut self.u[here..]);
                g.store(&mut self.g[here..]);
                t.store(&mut self.t[here..]);
            }
        }
    }
}
