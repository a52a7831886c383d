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

use super::block::{Body, OfKeys, OfQueries, Term};
use super::engine::{Engine, Register};
use super::lazy_panel::{Panel, active, add_tau};
use super::pair::{Pair, RegisterBlock};
use super::scores::{ACTIVE, Strip, VISIBLE};
use super::scratch::{Sums, Target, TileMemory, Weight};
use super::second::scores;
use crate::lanes::matrix::BLOCK;
use crate::lanes::{Isa, Lanes};

/// Nothing but sums over each row.
#[derive(Debug, Clone, Copy)]
pub struct Moments;

impl Body for Moments {
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
        let strip = scores(by, pair, at, memory)?;
        let zero = Register::<E>::splat(isa, 0.0);
        let mut sums = [[zero; BLOCK]; 3];
        let mut panel = Panel::of_second(pair, at, memory);
        for column in strip.cols.clone().step_by(E::COLS) {
            let here = strip.within(&(column..column + E::COLS));
            let any = begin(by, pair, &mut panel, &here);
            let [of_u, of_delta, of_change] = &mut sums;
            panel.each(
                by,
                column,
                #[inline(always)]
                |i| numbers(isa, pair, i),
                #[inline(always)]
                |r, [p, u, g, t], row| {
                    of_u[r] = p.mul_add(u, of_u[r]);
                    if any {
                        let raised = p + row.offset;
                        of_delta[r] = p.mul_add(active(isa, raised, g), of_delta[r]);
                        let change = active(isa, raised, u.mul_add(g, t));
                        of_change[r] = p.mul_add(change, of_change[r]);
                    }
                    [p, u, g, t]
                },
            );
        }
        for (to, of) in memory.row_sums.iter_mut().zip(&sums) {
            for (to, sum) in to.iter_mut().zip(&of[..E::ROWS]) {
                *to = sum.reduce_add();
            }
        }
        Some(strip)
    }

    /// (E21), (E8), and what (E24) is made of.
    #[inline(always)]
    fn add_numbers<E: Engine>(
        self,
        _by: E,
        first: usize,
        _strip: &Strip,
        memory: &TileMemory<'_>,
        sums: &mut Sums<'_>,
    ) {
        let size = sums.numbers.len() / memory.row_sums.len();
        for (sums, of_block) in sums.numbers.chunks_exact_mut(size).zip(&memory.row_sums) {
            let sums = sums[first..].iter_mut().take(E::ROWS);
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
    fn weights<E: Engine>(
        self,
        by: E,
        pair: &Pair<'_>,
        at: &RegisterBlock,
        memory: &mut TileMemory<'_>,
    ) -> Option<Strip> {
        let isa = by.isa();
        let strip = scores(by, pair, at, memory);
        let mut panel = Panel::of_second(pair, at, memory);
        panel.clear::<E>(strip.as_ref());
        let strip = strip?;
        let zero = Register::<E>::splat(isa, 0.0);
        let mut sums = [zero; BLOCK];
        for column in strip.cols.clone().step_by(E::COLS) {
            let here = strip.within(&(column..column + E::COLS));
            if begin(by, pair, &mut panel, &here) {
                panel.note_active::<E>(column);
                panel.each(
                    by,
                    column,
                    #[inline(always)]
                    |i| numbers(isa, pair, i),
                    #[inline(always)]
                    |r, [p, u, g, t], row| {
                        let raised = p + row.offset;
                        let (g, t) = (active(isa, raised, g), active(isa, raised, t));
                        sums[r] = sums[r] + t;
                        let moved = p * (u - row.u);
                        [
                            // `max` returns its second operand where either is NaN: so a NaN shows.
                            zero.max(raised),
                            active(isa, raised, moved + row.raise),
                            p * (g - row.delta),
                            moved.mul_add(g - row.delta, p * (t - row.z)),
                        ]
                    },
                );
            } else {
                panel.each(
                    by,
                    column,
                    #[inline(always)]
                    |i| numbers(isa, pair, i),
                    #[inline(always)]
                    |_, [p, u, _, _], row| {
                        let (moved, delta) = (p * (u - row.u), zero - row.delta);
                        let x = moved.mul_add(delta, p * (zero - row.z));
                        [zero, zero, p * delta, x]
                    },
                );
            }
            panel.hide::<E>(&here);
        }
        panel.mark_active::<E>(&strip);
        add_tau::<E>(pair, at, &sums, &mut memory.tau); // (E30)
        Some(strip)
    }
}

/// Numbers of a row of the statistics.
struct Row<V> {
    /// c.
    offset: V,
    delta: V,
    u: V,
    z: V,
    /// ddτ/n.
    raise: V,
}

#[inline(always)]
fn numbers<I: Isa>(isa: I, Pair { stats, ddtau, .. }: &Pair<'_>, i: usize) -> Row<I::F32> {
    Row {
        offset: I::F32::splat(isa, stats.offset[i]),
        delta: I::F32::splat(isa, stats.delta[i]),
        u: I::F32::splat(isa, stats.u[i]),
        z: I::F32::splat(isa, stats.z[i]),
        raise: I::F32::splat(isa, stats.share[i] * ddtau),
    }
}

/// P of a panel and, where a pair of it is active unless it is hidden, g and T; whether that is so.
/// Weights of pairs that are not visible become 0.
#[inline(always)]
fn begin<E: Engine>(by: E, pair: &Pair<'_>, panel: &mut Panel<'_, '_, 4>, here: &Strip) -> bool {
    let any = panel.softmax_weights(by, here.cols.start);
    if any {
        let (queries, keys) = (pair.queries, pair.keys);
        let of_change = [(&queries.dout, &keys.ddv), (&queries.cot_o, &keys.v)];
        panel.pull(by, here, [(&queries.dout, &keys.v)], 2); // (E7)
        panel.pull(by, here, of_change, 3); // (E20)
    }
    panel.hide::<E>(here);
    any
}
