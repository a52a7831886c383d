//! The kernels of register blocks, from which the tiles of `tiles.rs` are made.
//!
//! All share one step, [`Pair::scores`], for a register block of queries against a tile of keys:
//!
//! ```text
//! S = σ·Q Kᵀ, softcap, bias, mask                                (F1) (F2)
//! U = S′ ⊙ σ·(ddQ Kᵀ + Q ddKᵀ) + ddbias                           (D1) (D2)
//! ```
//!
//! `RowTile` then sums P = e^(S − lse) and P ⊙ U to u and gdout (D4), (D5); the others go on with
//! [`Pair::weights`]:
//!
//! ```text
//! dP = dO Vᵀ,  T = dO ddVᵀ + cot_o Vᵀ                             (B2) (D3)
//! dS = P ⊙ (dP − δ),  ds = S′ ⊙ dS                                (B3) (B4)
//! Ṗ  = P ⊙ (U − u),  X = Ṗ ⊙ (dP − δ) + P ⊙ (T − z)               (D7) (D8)
//! x  = S′ ⊙ (X − (2/c)·tanh ⊙ u⁰ ⊙ dS)                            (D9)
//! ```
//!
//! and `GradientTile` sums x and ds to gq (D10), `ColumnTile` x, ds, Ṗ and P to gk and gv (D11),
//! (D12), `BiasTile` X to gbias (D15).

use crate::aligned::Aligned;
use crate::attention::gradient::{blind, clear, select};
use crate::element::Tensor;
use crate::exp::exp_difference;
use crate::heads::{Cut, Rule};
use crate::lanes::{Isa, Lanes};
use crate::pack::touches;
use crate::packs::{Both, Keys, Queries};
use crate::scores::{Block, Factors, MAX_ROWS, Strip, score_block, slope};
use crate::tile::{MAX_KEYS, STRIDE, Tile};
use etalon_problem::{Cover, Error};
use ndarray::Ix2;
use std::ops::Range;

/// One query head of a sequence with its key head.
#[derive(Clone, Copy)]
pub struct Pair<'a> {
    /// Which pairs count.
    pub rule: Rule<'a>,
    /// ddbias of this sequence and head, `[n, m]`.
    pub ddbias: Option<Tensor<'a, Ix2>>,
    /// The queries.
    pub queries: &'a Queries,
    /// The keys and values.
    pub keys: &'a Keys,
    /// D.
    pub dim: usize,
    /// E.
    pub value_dim: usize,
}

/// What sweeps before learned of the rows of a head, from row `first` on.
#[derive(Clone, Copy)]
pub struct Known<'a> {
    /// The row of the first numbers.
    pub first: usize,
    /// (B1)
    pub delta: &'a [f32],
    /// (D4)
    pub u: &'a [f32],
    /// (D6)
    pub z: &'a [f32],
}

/// The memory of one thread.
pub struct Scratch {
    pub cut: Cut,
    /// Of a tile, rows [`STRIDE`] apart: S, then P.
    pub p: Aligned,
    /// U, then P ⊙ U or Ṗ.
    pub p_dot: Aligned,
    /// dP, then ds.
    pub ds: Aligned,
    /// T, then x or X.
    pub x: Aligned,
    /// tanh(s/c) and u⁰ of a register block.
    tanh: Aligned,
    u0: Aligned,
    /// Which pairs of a tile are visible, rows [`MAX_KEYS`] apart.
    pub visible: Vec<bool>,
    /// Σ P U of every row of a tile.
    pub u: Aligned,
    /// gq of a tile of queries, or gk of a tile of keys; without σ.
    pub wide: Aligned,
    /// Σ P (U v + ddv) of a tile of queries, or gv of a tile of keys.
    pub values: Aligned,
    /// o of a tile of queries, where it is computed anew.
    pub o: Aligned,
    /// gbias of a tile, rows [`STRIDE`] apart.
    pub bias: Aligned,
}

impl Scratch {
    /// The scratch for operands of D = `dim` and E = `value_dim`.
    pub fn new(
        cut: &Cut,
        dim: usize,
        value_dim: usize,
        o_anew: bool,
        gbias: bool,
    ) -> Result<Self, Error> {
        let tile = || Aligned::zeros(cut.queries * STRIDE, "the scratch of a thread");
        let block = || Aligned::zeros(cut.rows * STRIDE, "the scratch of a thread");
        let rows = cut.queries.max(cut.keys.next_multiple_of(cut.rows));
        let sum = |rows: usize, dim: usize| {
            Aligned::zeros(
                dim.next_multiple_of(cut.cols).saturating_mul(rows),
                "the scratch of a thread",
            )
        };
        Ok(Scratch {
            cut: *cut,
            p: tile()?,
            p_dot: tile()?,
            ds: tile()?,
            x: tile()?,
            tanh: block()?,
            u0: block()?,
            visible: vec![false; cut.queries * MAX_KEYS],
            u: Aligned::zeros(cut.queries, "the scratch of a thread")?,
            wide: sum(rows, dim)?,
            values: sum(rows, value_dim)?,
            o: sum(if o_anew { cut.queries } else { 0 }, value_dim)?,
            bias: if gbias { tile()? } else { Aligned::default() },
        })
    }

    /// Bytes of its memory.
    pub fn bytes(&self) -> usize {
        let Scratch { p, p_dot, ds, x, tanh, u0, visible, u, wide, values, o, bias, .. } = self;
        let tiles = [p, p_dot, ds, x, tanh, u0, u, wide, values, o, bias].map(Aligned::bytes);
        tiles.iter().sum::<usize>() + visible.len()
    }
}

/// A register block of queries against a tile of keys.
#[derive(Clone)]
pub struct Place {
    /// The queries, within the sequence.
    pub rows: Range<usize>,
    /// The keys, within the sequence.
    pub cols: Range<usize>,
    /// Its first row in the tile's memory.
    pub first: usize,
    /// Whether an operand is not finite, so that only visible pairs may be touched.
    pub careful: bool,
}

impl Pair<'_> {
    /// Whether a tile holds operands that are not finite.
    pub fn careful(&self, rows: &Range<usize>, cols: &Range<usize>) -> bool {
        touches(&self.queries.non_finite, rows.clone())
            || touches(&self.keys.non_finite, cols.clone())
    }

    /// The register blocks of a tile in order, if it holds a visible pair; with `kept` each has rows
    /// of its own in memory, otherwise all share the first.
    #[inline(always)]
    pub fn blocks<I: Isa>(
        &self,
        rows: &Range<usize>,
        cols: &Range<usize>,
        kept: bool,
    ) -> impl Iterator<Item = Place> + use<I> {
        let careful = self.careful(rows, cols);
        let seen = self.rule.cover(rows.clone(), cols.clone()) != Cover::None;
        let (rows, cols) = (if seen { rows.clone() } else { rows.start..rows.start }, cols.clone());
        (0..rows.len()).step_by(I::Tile::ROWS).map(
            #[inline(always)]
            move |first| {
                let start = rows.start + first;
                let here = start..rows.end.min(start + I::Tile::ROWS);
                Place {
                    rows: here,
                    cols: cols.clone(),
                    first: if kept { first } else { 0 },
                    careful,
                }
            },
        )
    }

    /// S and U of a block, in the columns of the strip.
    #[inline(always)]
    fn scores<I: Isa>(&self, isa: I, place: &Place, scratch: &mut Scratch) -> Option<Strip> {
        let (start, panel) = (place.rows.start, place.cols.start / I::Tile::COLS);
        let here = place.first * STRIDE..(place.first + I::Tile::ROWS) * STRIDE;
        let (s, u) = (&mut scratch.p[here.clone()], &mut scratch.p_dot[here]);
        let (tanh, u0) = (&mut scratch.tanh, &mut scratch.u0);
        let visible = &mut scratch.visible[place.first * MAX_KEYS..];
        let q = &self.queries.q.across.panels[start * self.dim..];
        let factors =
            Factors { rule: &self.rule, q, k: self.keys.k.across.from(panel), dim: self.dim };
        let mut max = [I::F32::splat(isa, f32::NEG_INFINITY); MAX_ROWS];
        let mut block = Block { s, tanh, visible };
        let (rows, cols) = (place.rows.clone(), place.cols.clone());
        // ddbias may be anything where the bias is −∞.
        let careful = place.careful || self.ddbias.is_some();
        let strip = score_block(isa, factors, rows, cols, careful, &mut block, &mut max)?;
        let scale = I::F32::splat(isa, self.rule.scale);
        for column in strip.cols.clone().step_by(I::Tile::COLS) {
            let mut tile = I::Tile::zero(isa);
            let at = panel * I::Tile::COLS + column;
            let k = Some(&self.keys.k.across.panels[at * self.dim..]);
            let ddq = panels(&self.queries.ddq, start, self.dim);
            add(isa, &mut tile, ddq, k, self.dim);
            add(isa, &mut tile, Some(q), panels(&self.keys.ddk, at, self.dim), self.dim);
            let tile = tile.map(
                #[inline(always)]
                |u| u * scale,
            );
            tile.store(&mut u[column..], STRIDE); // (D1)
        }
        if self.rule.softcap.is_some() {
            for r in 0..I::Tile::ROWS {
                let at = r * STRIDE + strip.cols.start..r * STRIDE + strip.cols.end;
                u0[at.clone()].copy_from_slice(&u[at.clone()]);
                let tanh = tanh[at.clone()].chunks_exact(I::F32::N);
                for (u, tanh) in u[at].chunks_exact_mut(I::F32::N).zip(tanh) {
                    (I::F32::load(isa, u) * slope(isa, I::F32::load(isa, tanh))).store(u);
                }
            }
        }
        if let Some(ddbias) = &self.ddbias {
            let end = place.cols.len().min(strip.cols.end);
            let keys = place.cols.start + strip.cols.start..place.cols.start + end;
            for (r, i) in place.rows.clone().enumerate() {
                let u = &mut u[r * STRIDE + strip.cols.start..][..keys.len()];
                ddbias.add_row(i, keys.clone(), u); // (D2)
            }
        }
        Some(strip)
    }

    /// lse of a block's rows.
    #[inline(always)]
    fn lse<I: Isa>(&self, place: &Place) -> &[f32] {
        &self.queries.lse[place.rows.start..place.rows.start + I::Tile::ROWS]
    }

    /// P and P ⊙ U of a block.
    #[inline(always)]
    pub fn means<I: Isa>(&self, isa: I, place: &Place, scratch: &mut Scratch) -> Option<Strip> {
        let strip = self.scores(isa, place, scratch)?;
        let here = place.first * STRIDE..(place.first + I::Tile::ROWS) * STRIDE;
        let (p, u) = (&mut scratch.p[here.clone()], &mut scratch.p_dot[here]);
        for r in 0..I::Tile::ROWS {
            let lse = I::F32::splat(isa, self.queries.lse[place.rows.start + r]);
            let at = r * STRIDE + strip.cols.start..r * STRIDE + strip.cols.end;
            let u = u[at.clone()].chunks_exact_mut(I::F32::N);
            for (p, u) in p[at].chunks_exact_mut(I::F32::N).zip(u) {
                let weight = exp_difference(isa, I::F32::load(isa, p), lse); // (F4)
                weight.store(p);
                (weight * I::F32::load(isa, u)).store(u);
            }
        }
        let visible = &mut scratch.visible[place.first * MAX_KEYS..];
        for edge in strip.edges() {
            blind(self.lse::<I>(place), visible, &edge);
            select([&mut *p, &mut *u], visible, &edge, I::Tile::ROWS);
        }
        Some(strip)
    }

    /// P, Ṗ, ds and x of a block, or, with `raw`, dS and X; columns outside the returned strip are
    /// zero.
    #[inline(always)]
    pub fn weights<I: Isa>(
        &self,
        isa: I,
        place: &Place,
        known: Known<'_>,
        raw: bool,
        scratch: &mut Scratch,
    ) -> Option<Strip> {
        let strip = self.scores(isa, place, scratch);
        let here = place.first * STRIDE..(place.first + I::Tile::ROWS) * STRIDE;
        let Scratch { p, p_dot, ds, x, tanh, u0, visible, .. } = scratch;
        let (p, p_dot) = (&mut p[here.clone()], &mut p_dot[here.clone()]);
        let (ds, x) = (&mut ds[here.clone()], &mut x[here]);
        let visible = &mut visible[place.first * MAX_KEYS..];
        let end = place.cols.len().next_multiple_of(I::Tile::COLS);
        let Some(strip) = strip else {
            clear([p, p_dot, ds, x], visible, 0..end, I::Tile::ROWS);
            return None;
        };
        for cols in [0..strip.cols.start, strip.cols.end..end] {
            let weights = [&mut *p, &mut *p_dot, &mut *ds, &mut *x];
            clear(weights, visible, cols, I::Tile::ROWS);
        }
        self.value_products(isa, place, &strip, ds, x);
        let capped = self.rule.softcap.filter(|_| !raw);
        let curve = I::F32::splat(isa, capped.map_or(0.0, |cap| 2.0 / cap));
        for r in 0..I::Tile::ROWS {
            let i = place.rows.start + r;
            let delta = I::F32::splat(isa, known.delta[i - known.first]);
            let mean = I::F32::splat(isa, known.u[i - known.first]);
            let z = I::F32::splat(isa, known.z[i - known.first]);
            let lse = I::F32::splat(isa, self.queries.lse[i]);
            for c in strip.cols.clone().step_by(I::F32::N) {
                let at = r * STRIDE + c..r * STRIDE + c + I::F32::N;
                let weight = exp_difference(isa, I::F32::load(isa, &p[at.clone()]), lse); // (F4)
                let pull = I::F32::load(isa, &ds[at.clone()]) - delta;
                let mut first = weight * pull; // (B3)
                let moved = weight * (I::F32::load(isa, &p_dot[at.clone()]) - mean); // (D7)
                let t = I::F32::load(isa, &x[at.clone()]) - z;
                let mut second = moved.mul_add(pull, weight * t); // (D8)
                if capped.is_some() {
                    let tanh = I::F32::load(isa, &tanh[at.clone()]);
                    let slope = slope(isa, tanh);
                    let u0 = I::F32::load(isa, &u0[at.clone()]);
                    second = slope * (second - curve * tanh * u0 * first); // (D9)
                    first = slope * first; // (B4)
                }
                weight.store(&mut p[at.clone()]);
                moved.store(&mut p_dot[at.clone()]);
                first.store(&mut ds[at.clone()]);
                second.store(&mut x[at]);
            }
        }
        for edge in strip.edges() {
            blind(self.lse::<I>(place), visible, &edge);
            let weights = [&mut *p, &mut *p_dot, &mut *ds, &mut *x];
            select(weights, visible, &edge, I::Tile::ROWS);
        }
        Some(strip)
    }

    /// dP and T of a block.
    #[inline(always)]
    fn value_products<I: Isa>(
        &self,
        isa: I,
        place: &Place,
        strip: &Strip,
        dp: &mut [f32],
        t: &mut [f32],
    ) {
        let (start, dim) = (place.rows.start, self.value_dim);
        let dout = panels(&self.queries.dout, start, dim);
        let cot_o = panels(&self.queries.cot_o, start, dim);
        for column in strip.cols.clone().step_by(I::Tile::COLS) {
            let at = place.cols.start + column;
            let (v, ddv) = (panels(&self.keys.v, at, dim), panels(&self.keys.ddv, at, dim));
            let mut tile = I::Tile::zero(isa);
            add(isa, &mut tile, dout, v, dim);
            tile.store(&mut dp[column..], STRIDE); // (B2)
            let mut tile = I::Tile::zero(isa);
            add(isa, &mut tile, dout, ddv, dim);
            add(isa, &mut tile, cot_o, v, dim);
            tile.store(&mut t[column..], STRIDE); // (D3)
        }
    }
}

/// The panels across from row `row` on, if the operand is there.
#[inline(always)]
fn panels(operand: &Both, row: usize, dim: usize) -> Option<&[f32]> {
    let there = !operand.across.panels.is_empty();
    there.then(
        #[inline(always)]
        || &operand.across.panels[row * dim..],
    )
}

/// tile += A Bᵀ, if both are there.
#[inline(always)]
fn add<I: Isa>(isa: I, tile: &mut I::Tile, a: Option<&[f32]>, b: Option<&[f32]>, dim: usize) {
    if let (Some(a), Some(b)) = (a, b) {
        tile.add_panel(isa, a, b, dim);
    }
}
