//! The weights of lazy attention's backward pass: for a register block of queries against a tile of keys
//!
//! ```text
//! S  = σ·Q Kᵀ + bias, mask                       (E1) (E2)
//! P  = e^(S − lse),  e = max(P + c, 0)           (E4) (E5)
//! g  = dO Vᵀ                                     in panels of keys with an active pair (E7)
//! dS = P ⊙ (a g − δ),  δ = Δ − dlse              in every panel (E9)
//! ```
//!
//! Over a tile of queries [`Means`] sums a P g to Δ (E8). [`LazyGradient`] needs Δ; over a tile of keys its
//! weights are summed to dk = σ Σ dSᵀ Q (E11) and dv = Σ eᵀ dO (E12), and over a tile of queries to
//! dq = σ Σ dS K (E10).

use super::block::{Body, OfKeys, OfQueries, Term};
use super::engine::{Engine, Register};
use super::lazy_panel::{Panel, active, add_tau};
use super::pair::{Pair, RegisterBlock};
use super::scores::{ACTIVE, Strip, VISIBLE};
use super::scratch::{Sums, Target, TileMemory, Weight};
use super::stats::Stats;
use crate::lanes::matrix::BLOCK;
use crate::lanes::{Isa, Lanes};

/// a P g, of which nothing but its sum over a row is kept.
#[derive(Debug, Clone, Copy)]
pub struct Means;

impl Body for Means {
    const ROWS: &'static [Term<OfKeys>] = &[];
    const COLUMNS: &'static [Term<OfQueries>] = &[];
    const BIAS: Weight = Weight::P;

    #[inline(always)]
    fn weights<E: Engine>(
        self,
        by: E,
        pair: &Pair<'_>,
        at: &RegisterBlock,
        memory: &mut TileMemory<'_>,
    ) -> Option<Strip> {
        let isa = by.isa();
        let strip = by.scores(pair, at, memory)?;
        let mut sums = [Register::<E>::splat(isa, 0.0); BLOCK];
        let mut panel = Panel::of_gradient(pair, at, memory);
        for column in strip.cols.clone().step_by(E::COLS) {
            let here = strip.within(&(column..column + E::COLS));
            if panel.softmax_weights(by, column) {
                panel.pull(by, &here, [(&pair.queries.dout, &pair.keys.v)], 1); // (E7)
                panel.hide::<E>(&here);
                panel.each(
                    by,
                    column,
                    #[inline(always)]
                    |i| numbers(isa, &pair.stats, i),
                    #[inline(always)]
                    |r, [p, g], &[c, _]| {
                        let active = active(isa, p + c, g);
                        sums[r] = p.mul_add(active, sums[r]);
                        [p, g]
                    },
                );
            }
        }
        for (to, sum) in memory.row_sums[0].iter_mut().zip(&sums[..E::ROWS]) {
            *to = sum.reduce_add();
        }
        Some(strip)
    }

    /// (E8)
    #[inline(always)]
    fn add_numbers<E: Engine>(
        self,
        _by: E,
        first: usize,
        _strip: &Strip,
        memory: &TileMemory<'_>,
        sums: &mut Sums<'_>,
    ) {
        let sums = sums.numbers[first..].iter_mut().take(E::ROWS);
        sums.zip(&memory.row_sums[0]).for_each(|(sum, of_block)| *sum += of_block);
    }
}

/// e and dS, and (1/n) Σ a g, which is added to [`TileMemory::tau`].
#[derive(Debug, Clone, Copy)]
pub struct LazyGradient {
    /// True if more than e is wanted: dv alone needs no g.
    pub g: bool,
}

impl Body for LazyGradient {
    const ROWS: &'static [Term<OfKeys>] =
        &[Term { to: Target::Wide, weights: Weight::Ds, rows: |keys| &keys.k.along }]; // (E10)
    const COLUMNS: &'static [Term<OfQueries>] = &[
        Term { to: Target::Wide, weights: Weight::Ds, rows: |queries| &queries.q.along }, // (E11)
        Term { to: Target::Values, weights: Weight::P, rows: |queries| &queries.dout.along }, // (E12)
    ];
    const BIAS: Weight = Weight::Ds;

    fn pairs(weight: Weight) -> u8 {
        if matches!(weight, Weight::P) { ACTIVE } else { VISIBLE }
    }

    #[inline(always)]
    fn weights<E: Engine>(
        self,
        by: E,
        pair: &Pair<'_>,
        at: &RegisterBlock,
        memory: &mut TileMemory<'_>,
    ) -> Option<Strip> {
        let isa = by.isa();
        let strip = by.scores(pair, at, memory);
        let mut panel = Panel::of_gradient(pair, at, memory);
        panel.clear::<E>(strip.as_ref());
        let strip = strip?;
        let zero = Register::<E>::splat(isa, 0.0);
        let mut sums = [zero; BLOCK];
        for column in strip.cols.clone().step_by(E::COLS) {
            let here = strip.within(&(column..column + E::COLS));
            if panel.softmax_weights(by, column) {
                panel.note_active::<E>(column);
                if self.g {
                    panel.pull(by, &here, [(&pair.queries.dout, &pair.keys.v)], 1); // (E7)
                    panel.hide::<E>(&here);
                }
                panel.each(
                    by,
                    column,
                    #[inline(always)]
                    |i| numbers(isa, &pair.stats, i),
                    #[inline(always)]
                    |r, [p, g], &[c, delta]| {
                        let raised = p + c;
                        let active = active(isa, raised, g);
                        sums[r] = sums[r] + active;
                        // `max` returns its second operand where either is NaN: so a NaN shows.
                        [zero.max(raised), p * (active - delta)] // (E5), (E9)
                    },
                );
            } else {
                panel.each(
                    by,
                    column,
                    #[inline(always)]
                    |i| numbers(isa, &pair.stats, i),
                    #[inline(always)]
                    |_, [p, _], &[_, delta]| [zero, p * (zero - delta)], // (E9)
                );
            }
            panel.hide::<E>(&here);
        }
        panel.mark_active::<E>(&strip);
        add_tau::<E>(pair, at, &sums, &mut memory.tau); // (E14)
        Some(strip)
    }
}

/// c and δ of a row of the statistics.
#[inline(always)]
fn numbers<I: Isa>(isa: I, stats: &Stats<'_>, i: usize) -> [I::F32; 2] {
    [I::F32::splat(isa, stats.offset[i]), I::F32::splat(isa, stats.delta[i])]
}
