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
//!
//! Activity is decided once: both have the same S, lse and c, and so the same bits of P + c.

use super::block::{Body, OfKeys, OfQueries, Pair, RegisterBlock, Term};
use super::scores::{ACTIVE, Strip, VISIBLE};
use super::scratch::{Share, Sums, Target, TileMemory, Weight};
use super::weights::{clear, hide, joined, mark_active, multiply, smallest};
use crate::exp::exp_difference;
use crate::lanes::{Isa, Lanes, Tile};
use crate::tile::{MAX_KEYS, MAX_ROWS, STRIDE};
use std::ops::Range;

/// a P g, of which nothing but its sum over a row is kept.
#[derive(Debug, Clone, Copy)]
pub struct Means;

impl Body for Means {
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
        let strip = pair.scores(isa, at, memory)?;
        let mut sums = [I::F32::splat(isa, 0.0); MAX_ROWS];
        let mut panel = Panel::new(pair, at, memory);
        for column in strip.cols.clone().step_by(I::Tile::COLS) {
            if weigh(isa, pair, at, panel.p, column) {
                panel.pull(isa, &strip.within(&(column..column + I::Tile::COLS)));
                panel.each(
                    isa,
                    column,
                    #[inline(always)]
                    |r, p, g, c, _| {
                        let active = active(isa, p + c, g);
                        sums[r] = p.mul_add(active, sums[r]);
                        (p, g)
                    },
                );
            }
        }
        for (to, sum) in memory.row_sums[0].iter_mut().zip(&sums[..I::Tile::ROWS]) {
            *to = sum.reduce_add();
        }
        Some(strip)
    }

    /// (E8)
    #[inline(always)]
    fn add_numbers<I: Isa>(
        self,
        _isa: I,
        first: usize,
        _strip: &Strip,
        memory: &TileMemory<'_>,
        sums: &mut Sums<'_>,
    ) {
        let sums = sums.numbers[first..].iter_mut().take(I::Tile::ROWS);
        sums.zip(&memory.row_sums[0]).for_each(|(sum, of_block)| *sum += of_block);
    }
}

/// e and dS, and (1/n) Σ a g, which is added to [`TileMemory::tau`].
#[derive(Debug, Clone, Copy)]
pub struct LazyGradient {
    /// Whether more than e is wanted: dv alone needs no g.
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
    fn weights<I: Isa>(
        self,
        isa: I,
        pair: &Pair<'_>,
        at: &RegisterBlock,
        memory: &mut TileMemory<'_>,
    ) -> Option<Strip> {
        let strip = pair.scores(isa, at, memory);
        let mut panel = Panel::new(pair, at, memory);
        let rows = at.first..at.first + at.rows.len();
        let end = at.cols.len().next_multiple_of(I::Tile::COLS);
        let weights = [&mut *panel.p, &mut *panel.g];
        clear(weights, panel.visible, strip.as_ref(), (I::Tile::ROWS, end));
        let strip = strip?;
        let zero = I::F32::splat(isa, 0.0);
        let mut sums = [zero; MAX_ROWS];
        for column in strip.cols.clone().step_by(I::Tile::COLS) {
            let here = strip.within(&(column..column + I::Tile::COLS));
            if weigh(isa, pair, at, panel.p, column) {
                let with_active = &mut panel.active[column / I::Tile::COLS];
                *with_active = joined(with_active, &rows);
                if self.g {
                    panel.pull(isa, &here);
                }
                panel.each(
                    isa,
                    column,
                    #[inline(always)]
                    |r, p, g, c, delta| {
                        let raised = p + c;
                        let active = active(isa, raised, g);
                        sums[r] = sums[r] + active;
                        // `max` returns its second operand where either is NaN: so a NaN shows.
                        (zero.max(raised), p * (active - delta)) // (E5), (E9)
                    },
                );
            } else {
                panel.each(
                    isa,
                    column,
                    #[inline(always)]
                    |_, p, _, _, delta| (zero, p * (zero - delta)), // (E9)
                );
            }
            hide([&mut *panel.p, &mut *panel.g], panel.visible, &here, pair.lse::<I>(at));
        }
        if at.has_nonfinite {
            mark_active(panel.p, panel.visible, &strip.cols, I::Tile::ROWS);
        }
        let share = &pair.stats.share[at.rows.start - pair.stats.first..][..I::Tile::ROWS];
        for (sum, share) in sums.iter().zip(share) {
            memory.tau += f64::from(sum.reduce_add()) * f64::from(*share); // (E14)
        }
        Some(strip)
    }
}

/// A number of a pair, such as g, or 0 where the pair is not active: where P + c is below the smallest
/// number above 0; not where it is NaN.
#[inline(always)]
pub fn active<I: Isa>(isa: I, raised: I::F32, g: I::F32) -> I::F32 {
    raised.select_less(smallest(isa), I::F32::splat(isa, 0.0), g)
}

/// (E4) P of a panel, from S; whether a pair of it is active, unless it is hidden.
#[inline(always)]
pub fn weigh<I: Isa>(
    isa: I,
    pair: &Pair<'_>,
    at: &RegisterBlock,
    s: &mut [f32],
    column: usize,
) -> bool {
    let zero = I::F32::splat(isa, 0.0);
    let mut any = zero;
    for r in 0..I::Tile::ROWS {
        let i = at.rows.start + r;
        let lse = I::F32::splat(isa, pair.queries.lse[i]);
        let c = I::F32::splat(isa, pair.stats.offset[i - pair.stats.first]);
        for s in s[r * STRIDE + column..][..I::Tile::COLS].chunks_exact_mut(I::F32::N) {
            let p = exp_difference(isa, I::F32::load(isa, s), lse);
            any = any + zero.max(p + c);
            p.store(s);
        }
    }
    any.reduce_add() != 0.0
}

/// The weights of a register block, panel by panel of keys.
struct Panel<'a, 'p> {
    pair: &'a Pair<'p>,
    at: &'a RegisterBlock,
    /// S, then P, then what becomes of it.
    p: &'a mut [f32],
    /// g, then what becomes of it; anything if g is not wanted.
    g: &'a mut [f32],
    visible: &'a mut [u8],
    /// [`TileMemory::active`].
    active: &'a mut [Range<usize>],
}

impl<'a, 'p> Panel<'a, 'p> {
    #[inline(always)]
    fn new(pair: &'a Pair<'p>, at: &'a RegisterBlock, memory: &'a mut TileMemory<'_>) -> Self {
        let TileMemory { p, shares, active, .. } = memory;
        let Share { ds, visible, .. } = &mut shares[at.share];
        let row = at.first * STRIDE;
        let (p, g, visible) = (&mut p[row..], &mut ds[row..], &mut visible[at.first * MAX_KEYS..]);
        Panel { pair, at, p, g, visible, active }
    }

    /// (E7) g of a panel. P and g of pairs that are not visible become 0.
    #[inline(always)]
    fn pull<I: Isa>(&mut self, isa: I, here: &Strip) {
        let (pair, at) = (self.pair, self.at);
        let values = [(&pair.queries.dout, &pair.keys.v)];
        multiply(isa, at, here, pair.value_dim, values, None, self.g);
        hide([&mut *self.p, &mut *self.g], self.visible, here, pair.lse::<I>(at));
    }

    /// Replaces P and g of a panel by what `f` makes of them and of the row's number, c and δ.
    #[inline(always)]
    fn each<I: Isa>(
        &mut self,
        isa: I,
        column: usize,
        mut f: impl FnMut(usize, I::F32, I::F32, I::F32, I::F32) -> (I::F32, I::F32),
    ) {
        for r in 0..I::Tile::ROWS {
            let (i, stats) = (self.at.rows.start + r, &self.pair.stats);
            let c = I::F32::splat(isa, stats.offset[i - stats.first]);
            let delta = I::F32::splat(isa, stats.delta[i - stats.first]);
            let here: Range<usize> = r * STRIDE + column..r * STRIDE + column + I::Tile::COLS;
            let g = self.g[here.clone()].chunks_exact_mut(I::F32::N);
            for (p, g) in self.p[here].chunks_exact_mut(I::F32::N).zip(g) {
                let (x, y) = f(r, I::F32::load(isa, p), I::F32::load(isa, g), c, delta);
                x.store(p);
                y.store(g);
            }
        }
    }
}
