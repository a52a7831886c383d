//! The weights of the second order: for a register block of queries against a tile of keys
//!
//! ```text
//! S = σ·Q Kᵀ, softcap, bias, mask                                (F1) (F2)
//! U = S′ ⊙ σ·(ddQ Kᵀ + Q ddKᵀ) + ddbias                           (D1) (D2)
//! ```
//!
//! [`Tangent`] sums P = e^(S − lse) and P ⊙ U to u and gdout (D4), (D5); [`Second`] goes on with
//!
//! ```text
//! dP = dO Vᵀ,  T = dO ddVᵀ + cot_o Vᵀ                             (B2) (D3)
//! dS = P ⊙ (dP − δ),  ds = S′ ⊙ dS                                (B3) (B4)
//! Ṗ  = P ⊙ (U − u),  X = Ṗ ⊙ (dP − δ) + P ⊙ (T − z)               (D7) (D8)
//! x  = S′ ⊙ (X − (2/c)·tanh ⊙ u⁰ ⊙ dS)                            (D9)
//! ```
//!
//! and sums x and ds to gq (D10), x, ds, Ṗ and P to gk and gv (D11), (D12), and X to gbias (D15).

use super::block::{Body, OfKeys, OfQueries, Term};
use super::engine::{Engine, Register};
use super::packs::{Keys, Queries};
use super::pair::{Pair, RegisterBlock};
use super::scores::{Strip, slope};
use super::scratch::{Share, Sums, Target, TileMemory, Weight};
use super::weights::{clear, hide};
use crate::exp::exp_difference;
use crate::lanes::Lanes;
use crate::tile::{MAX_KEYS, STRIDE};

/// P and P ⊙ U.
#[derive(Debug, Clone, Copy)]
pub struct Tangent;

impl Body for Tangent {
    /// Without memory for o, which is computed anew only where it is stored in less than f32, the
    /// last is left out.
    const ROWS: &'static [Term<OfKeys>] = &[
        Term { to: Target::Values, weights: Weight::PDot, rows: |keys| &keys.v.along }, // (D5)
        Term { to: Target::Values, weights: Weight::P, rows: |keys| &keys.ddv.along },
        Term { to: Target::O, weights: Weight::P, rows: |keys| &keys.v.along }, // (F5)
    ];
    const COLUMNS: &'static [Term<OfQueries>] = &[];
    const BIAS: Weight = Weight::PDot;
    /// δ and z are products with these sums, less which dP and T of a row with few keys cancel: the roundings of 8
    /// digits would be larger than what is left.
    const PIECES: usize = 2;

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
        let here = at.weights(E::ROWS);
        let (p, u) = (&mut memory.p[here.clone()], &mut memory.p_dot[here]);
        for r in 0..E::ROWS {
            let lse = Register::<E>::splat(isa, pair.queries.lse[at.rows.start + r]);
            let here = r * STRIDE + strip.cols.start..r * STRIDE + strip.cols.end;
            let u = u[here.clone()].chunks_exact_mut(Register::<E>::N);
            for (p, u) in p[here].chunks_exact_mut(Register::<E>::N).zip(u) {
                let weight = exp_difference(isa, Register::<E>::load(isa, p), lse); // (F4)
                weight.store(p);
                (weight * Register::<E>::load(isa, u)).store(u);
            }
        }
        let visible = &mut memory.shares[at.share].visible[at.first * MAX_KEYS..];
        hide([p, u], visible, &strip, pair.lse(at, E::ROWS));
        Some(strip)
    }

    /// (D4)
    #[inline(always)]
    fn add_numbers<E: Engine>(
        self,
        by: E,
        first: usize,
        strip: &Strip,
        memory: &TileMemory<'_>,
        sums: &mut Sums<'_>,
    ) {
        let isa = by.isa();
        for (r, u) in sums.numbers[first..].iter_mut().take(E::ROWS).enumerate() {
            let mut sum = Register::<E>::splat(isa, 0.0);
            for pu in memory.p_dot[r * STRIDE..][strip.cols.clone()].chunks_exact(Register::<E>::N)
            {
                sum = sum + Register::<E>::load(isa, pu);
            }
            *u += sum.reduce_add();
        }
    }
}

/// P, Ṗ, ds and x.
#[derive(Debug, Clone, Copy)]
pub struct Second {
    /// True if S′ is applied; otherwise dS and X stand in place of ds and x.
    pub capped: bool,
}

impl Body for Second {
    const ROWS: &'static [Term<OfKeys>] = &[
        Term { to: Target::Wide, weights: Weight::X, rows: |keys| &keys.k.along }, // (D10)
        Term { to: Target::Wide, weights: Weight::Ds, rows: |keys| &keys.ddk.along },
    ];
    const COLUMNS: &'static [Term<OfQueries>] = &[
        Term { to: Target::Wide, weights: Weight::X, rows: |queries| &queries.q.along }, // (D11)
        Term { to: Target::Wide, weights: Weight::Ds, rows: |queries| &queries.ddq.along },
        Term { to: Target::Values, weights: Weight::PDot, rows: |queries| &queries.dout.along }, // (D12)
        Term { to: Target::Values, weights: Weight::P, rows: |queries| &queries.cot_o.along },
    ];
    const BIAS: Weight = Weight::X;

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
        let here = at.weights(E::ROWS);
        let TileMemory { p, p_dot, x, tanh, u0, shares, .. } = memory;
        let Share { ds, visible, .. } = &mut shares[at.share];
        let (p, p_dot) = (&mut p[here.clone()], &mut p_dot[here.clone()]);
        let (ds, x) = (&mut ds[here.clone()], &mut x[here]);
        let visible = &mut visible[at.first * MAX_KEYS..];
        let end = at.cols.len().next_multiple_of(E::COLS);
        let weights = [&mut *p, &mut *p_dot, &mut *ds, &mut *x];
        clear(weights, visible, strip.as_ref(), (E::ROWS, end));
        let strip = strip?;
        let (Queries { dout, cot_o, .. }, Keys { v, ddv, .. }) = (pair.queries, pair.keys);
        by.multiply(at, &strip, pair.value_dim, [(dout, v)], None, ds); // (B2)
        by.multiply(at, &strip, pair.value_dim, [(dout, ddv), (cot_o, v)], None, x); // (D3)
        let capped = pair.rule.softcap.filter(|_| self.capped);
        let curve = Register::<E>::splat(isa, capped.map_or(0.0, |cap| 2.0 / cap));
        for r in 0..E::ROWS {
            let i = at.rows.start + r;
            let delta = Register::<E>::splat(isa, pair.stats.delta[i - pair.stats.first]);
            let mean = Register::<E>::splat(isa, pair.stats.u[i - pair.stats.first]);
            let z = Register::<E>::splat(isa, pair.stats.z[i - pair.stats.first]);
            let lse = Register::<E>::splat(isa, pair.queries.lse[i]);
            for c in strip.cols.clone().step_by(Register::<E>::N) {
                let here = r * STRIDE + c..r * STRIDE + c + Register::<E>::N;
                let weight = exp_difference(isa, Register::<E>::load(isa, &p[here.clone()]), lse); // (F4)
                let pull = Register::<E>::load(isa, &ds[here.clone()]) - delta;
                let mut first = weight * pull; // (B3)
                let moved = weight * (Register::<E>::load(isa, &p_dot[here.clone()]) - mean); // (D7)
                let t = Register::<E>::load(isa, &x[here.clone()]) - z;
                let mut second = moved.mul_add(pull, weight * t); // (D8)
                if capped.is_some() {
                    let tanh = Register::<E>::load(isa, &tanh[here.clone()]);
                    let slope = slope(isa, tanh);
                    let u0 = Register::<E>::load(isa, &u0[here.clone()]);
                    second = slope * (second - curve * tanh * u0 * first); // (D9)
                    first = slope * first; // (B4)
                }
                weight.store(&mut p[here.clone()]);
                moved.store(&mut p_dot[here.clone()]);
                first.store(&mut ds[here.clone()]);
                second.store(&mut x[here]);
            }
        }
        hide([p, p_dot, ds, x], visible, &strip, pair.lse(at, E::ROWS));
        Some(strip)
    }
}

/// S and U of a block, in the columns of the strip: (D1), (D2), or (E19).
#[inline(always)]
pub fn scores<E: Engine>(
    by: E,
    pair: &Pair<'_>,
    at: &RegisterBlock,
    memory: &mut TileMemory<'_>,
) -> Option<Strip> {
    let isa = by.isa();
    let strip = by.scores(pair, at, memory)?;
    let TileMemory { p_dot, tanh, u0, .. } = memory;
    let u = &mut p_dot[at.weights(E::ROWS)];
    let (Queries { q, ddq, .. }, Keys { k, ddk, .. }) = (pair.queries, pair.keys);
    let scale = Some(pair.rule.scale);
    by.multiply(at, &strip, pair.dim, [(ddq, k), (q, ddk)], scale, u); // (D1)
    if pair.rule.softcap.is_some() {
        for r in 0..E::ROWS {
            let here = r * STRIDE + strip.cols.start..r * STRIDE + strip.cols.end;
            u0[here.clone()].copy_from_slice(&u[here.clone()]);
            let tanh = tanh[here.clone()].chunks_exact(Register::<E>::N);
            for (u, tanh) in u[here].chunks_exact_mut(Register::<E>::N).zip(tanh) {
                (Register::<E>::load(isa, u) * slope(isa, Register::<E>::load(isa, tanh))).store(u);
            }
        }
    }
    if let Some(ddbias) = &pair.ddbias {
        let end = at.cols.len().min(strip.cols.end);
        let keys = at.cols.start + strip.cols.start..at.cols.start + end;
        for (r, i) in at.rows.clone().enumerate() {
            let u = &mut u[r * STRIDE + strip.cols.start..][..keys.len()];
            ddbias.add_row(i, keys.clone(), u); // (D2)
        }
    }
    Some(strip)
}
