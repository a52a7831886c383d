//! The weights of the backward pass: for a register block of queries against a tile of keys
//!
//! ```text
//! S  = σ·Q Kᵀ, softcap, bias, mask          (F1) (F2)
//! P  = e^(S − lse)                          (F4)
//! dP = dO Vᵀ                                (B2)
//! dS = P ⊙ (dP − δ),  ds = S′ ⊙ dS          (B3) (B4)
//! ```
//!
//! Over a tile of queries they are summed to dq = σ Σ ds K (B5), over a tile of keys to
//! dk = σ Σ dsᵀ Q (B6) and dv = Σ Pᵀ dO (B7), and over heads and sequences to dbias = Σ dS (B9).
//!
//! attention_lse is the same with values of no width: dP = 0 and δ = −dlse, so that dS = dlse·P (L2).

use super::block::{Body, OfKeys, OfQueries, Term};
use super::engine::{Engine, Register};
use super::pair::{Pair, RegisterBlock};
use super::scores::{Strip, slope};
use super::scratch::{Share, Target, TileMemory, Weight};
use super::weights::{clear, hide};
use crate::exp::exp_difference;
use crate::lanes::Lanes;
use crate::tile::{MAX_KEYS, STRIDE};

/// The weights of the backward pass.
#[derive(Debug, Clone, Copy)]
pub struct Gradient {
    /// True if ds is wanted at all: dv alone needs no dP.
    pub ds: bool,
    /// True if S′ is applied; otherwise dS stands in place of ds.
    pub capped: bool,
}

impl Body for Gradient {
    const ROWS: &'static [Term<OfKeys>] =
        &[Term { to: Target::Wide, weights: Weight::Ds, rows: |keys| &keys.k.along }]; // (B5)
    const COLUMNS: &'static [Term<OfQueries>] = &[
        Term { to: Target::Wide, weights: Weight::Ds, rows: |queries| &queries.q.along }, // (B6)
        Term { to: Target::Values, weights: Weight::P, rows: |queries| &queries.dout.along }, // (B7)
    ];
    const BIAS: Weight = Weight::Ds;
    const HAS_TILES: bool = true;

    fn has_ds(&self) -> bool {
        self.ds
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
        let TileMemory { p, tanh, shares, .. } = memory;
        let Share { ds, visible, .. } = &mut shares[at.share];
        let start = at.rows.start;
        let (p, ds) = (&mut p[at.weights(E::ROWS)], &mut ds[at.weights(E::ROWS)]);
        let visible = &mut visible[at.first * MAX_KEYS..];
        let end = at.cols.len().next_multiple_of(E::COLS);
        clear([&mut *p, &mut *ds], visible, strip.as_ref(), (E::ROWS, end));
        let strip = strip?;
        if self.ds {
            let values = [(&pair.queries.dout, &pair.keys.v)];
            by.multiply(at, &strip, pair.value_dim, values, None, ds); // (B2)
        }
        let capped = self.capped && pair.rule.softcap.is_some();
        for r in 0..E::ROWS {
            let lse = Register::<E>::splat(isa, pair.queries.lse[start + r]);
            let delta = Register::<E>::splat(isa, pair.stats.delta[start - pair.stats.first + r]);
            let here = r * STRIDE + strip.cols.start..r * STRIDE + strip.cols.end;
            let tanh = tanh[here.clone()].chunks_exact(Register::<E>::N);
            let ds = ds[here.clone()].chunks_exact_mut(Register::<E>::N);
            for ((p, ds), tanh) in p[here].chunks_exact_mut(Register::<E>::N).zip(ds).zip(tanh) {
                let weight = exp_difference(isa, Register::<E>::load(isa, p), lse); // (F4)
                weight.store(p);
                if self.ds {
                    let mut x = weight * (Register::<E>::load(isa, ds) - delta); // (B3)
                    if capped {
                        x = x * slope(isa, Register::<E>::load(isa, tanh)); // (B4)
                    }
                    x.store(ds);
                }
            }
        }
        hide([p, ds], visible, &strip, pair.lse(at, E::ROWS));
        Some(strip)
    }
}
