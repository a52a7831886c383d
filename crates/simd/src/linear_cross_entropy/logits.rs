//! Logits of a tile of classes, and what they add to the rows of some tokens:
//!
//! ```text
//! (C1)  a_iv = h_i·w_v + bias_v
//! (C2)  z_iv = (c/θ) tanh(σ a_iv / c)                  without a cap σ a_iv / θ
//! (C11) r_iv = dz_iv/da_iv = (σ/θ) (1 − tanh²(σ a_iv / c))
//! (C33) m = max z,  l = Σ e^{z−m},  u = Σ e^{z−m} (z − m),  s = Σ cw (z − m)
//! ```
//!
//! Tokens lie along the lanes: a band of [`BAND`] tokens holds a row for every class. So no sum runs across
//! lanes, a bias is one number for a row, and the rows of w are read as they are, not transposed.

use super::partial::{Partial, Partials};
use super::tokens::Token;
use crate::exp::{exp_difference, tanh};
use crate::lanes::prefetch::Lines;
use crate::lanes::product::asks;
use crate::lanes::{Isa, Kernel, Lanes};
use crate::tile::{BAND, STRIDE, Tile};
use etalon_problem::LinearCrossEntropy;
use std::ops::Range;

/// Elements of h and w that a product reads at a time: their panels stay in the L1 cache.
pub const SLICE: usize = 256;

/// The map from a to z.
#[derive(Debug, Clone, Copy)]
pub struct Link {
    /// Of a, before the hyperbolic tangent or, without a cap, altogether.
    factor: f32,
    /// c/θ
    ratio: Option<f32>,
    /// σ/θ
    slope: f32,
}

impl Link {
    pub fn new(problem: &LinearCrossEntropy) -> Self {
        let LinearCrossEntropy { logit_scale, temperature, softcap, .. } = *problem;
        let factor = softcap.map_or(logit_scale / temperature, |cap| logit_scale / cap);
        Link {
            factor: factor as f32,
            ratio: softcap.map(|cap| (cap / temperature) as f32),
            slope: (logit_scale / temperature) as f32,
        }
    }

    /// (C2)
    #[inline(always)]
    fn logit<I: Isa>(&self, isa: I, a: I::F32) -> I::F32 {
        let scaled = a * I::F32::splat(isa, self.factor);
        match self.ratio {
            None => scaled,
            Some(ratio) => tanh(isa, scaled) * I::F32::splat(isa, ratio),
        }
    }

    /// (C11), of the logit: at the end of the cap exactly 0.
    #[inline(always)]
    pub fn slope<I: Isa>(&self, isa: I, z: I::F32) -> I::F32 {
        let slope = I::F32::splat(isa, self.slope);
        match self.ratio {
            None => slope,
            Some(ratio) => {
                let t = z / I::F32::splat(isa, ratio);
                let minus = I::F32::splat(isa, 0.0) - t;
                minus.mul_add(t, I::F32::splat(isa, 1.0)) * slope
            }
        }
    }

    /// The same of one.
    pub fn slope_of(&self, z: f32) -> f32 {
        self.ratio.map_or(self.slope, |ratio| (1.0 - (z / ratio) * (z / ratio)) * self.slope)
    }

    /// ṙ of (C25) for a motion of 1 of the logit; none without a cap.
    #[inline(always)]
    pub fn bend<I: Isa>(&self, isa: I, z: I::F32) -> Option<I::F32> {
        Some(z * I::F32::splat(isa, self.bend_factor()?))
    }

    /// The same of one; 0 without a cap.
    pub fn bend_of(&self, z: f32) -> f32 {
        self.bend_factor().map_or(0.0, |factor| z * factor)
    }

    /// −2 (σ/c) θ/c
    #[inline(always)]
    fn bend_factor(&self) -> Option<f32> {
        self.ratio.map(|ratio| -2.0 * self.slope / ratio / ratio)
    }
}

/// Adds to (C1) of some classes and tokens what [`SLICE`] elements or less of h and w make of it.
pub struct Products<'a> {
    /// Elements of rows of w, `[padded][STRIDE]`.
    pub w: &'a [f32],
    /// Rows of h across, `[⌈tokens/COLS⌉][D][COLS]`.
    pub h: &'a [f32],
    pub dim: usize,
    /// The elements of the rows.
    pub elements: Range<usize>,
    pub classes: usize,
    /// Rows of a band.
    pub padded: usize,
    pub tokens: usize,
    /// `[⌈tokens/BAND⌉][padded][BAND]`; where `fresh`, whatever it holds.
    pub z: &'a mut [f32],
    pub fresh: bool,
    /// Lines of w that are read next, prefetched meanwhile.
    pub then: Lines,
}

impl Kernel for Products<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Products { w, h, dim, elements, classes, padded, tokens, z, fresh, mut then } = self;
        let (rows, cols) = (I::Tile::ROWS, I::Tile::COLS);
        let blocks = tokens.div_ceil(cols) * classes.div_ceil(rows);
        let beyond = then.beyond(blocks, asks(elements.len()));
        for first in (0..tokens).step_by(cols) {
            let h = &h[first * dim + elements.start * cols..][..elements.len() * cols];
            let z = &mut z[first / BAND * padded * BAND + first % BAND..];
            for row in (0..classes).step_by(rows) {
                let sums = &mut z[row * BAND..];
                let mut tile = match fresh {
                    true => I::Tile::zero(isa),
                    false => I::Tile::load(isa, sums, BAND),
                };
                tile.add_rows_then(isa, &w[row * STRIDE..], h, elements.len(), &mut then);
                tile.store(sums, BAND);
                then.ask_more(beyond);
            }
        }
    }
}

/// Turns a into z, and sums it up.
pub struct Rows<'a, 'm> {
    pub link: Link,
    /// The number of the first class.
    pub first: usize,
    /// The bias of every class, and its weight; none where there are none.
    pub bias: &'a [f32],
    pub weights: Option<&'a [f32]>,
    pub classes: usize,
    pub padded: usize,
    /// Bands of tokens.
    pub z: &'a mut [f32],
    pub tokens: &'a [Token],
    pub wanted: Wanted,
    /// The partials that the sums go to, from this number on, where they are wanted.
    pub sums: Option<(&'a mut Partials<'m>, usize)>,
}

/// Sums of a row of logits that are wanted beside m and l.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    /// Σ e^{z−m} (z − m), for the entropy.
    pub u: bool,
    /// Σ cw (z − m), for label smoothing.
    pub s: bool,
    pub argmax: bool,
}

/// No z − m below this has a weight: e^−200 is 0 in f32. So 0·(−∞) does not arise.
pub const LEAST: f32 = -200.0;

/// Registers of tokens that a sweep over classes takes side by side: whole bands at the widest level, so that
/// it reads memory in order.
const SIDE: usize = 6;

impl Kernel for Rows<'_, '_> {
    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) {
        let (lanes, count) = (I::F32::N, self.tokens.len());
        for start in (0..count).step_by(SIDE * lanes) {
            if (count - start).div_ceil(lanes) >= SIDE {
                self.columns::<I, SIDE>(isa, start);
            } else {
                for first in (start..count).step_by(lanes) {
                    self.columns::<I, 1>(isa, first);
                }
            }
        }
    }
}

impl Rows<'_, '_> {
    /// The tokens of W registers, of one band.
    #[inline(always)]
    fn columns<I: Isa, const W: usize>(&mut self, isa: I, first: usize) {
        let z = &mut self.z[first / BAND * self.padded * BAND + first % BAND..];
        let (link, argmax) = (&self.link, self.wanted.argmax);
        let (m, best) = link_rows::<I, W>(isa, link, self.bias, self.classes, argmax, z);
        let Some((sums, start)) = self.sums.as_mut() else { return };
        let [l, u, s] = sum_rows::<I, W>(isa, self.wanted, self.weights, self.classes, z, m);
        // The last lanes may be of no token: there is room for them.
        for n in 0..W {
            let at = *start + first + n * I::F32::N;
            m[n].store(&mut sums.m[at..]);
            l[n].store(&mut sums.l[at..]);
            u[n].store(&mut sums.u[at..]);
            s[n].store(&mut sums.s[at..]);
            best[n].store(&mut sums.target[at..]);
        }
        let end = self.tokens.len().min(first + W * I::F32::N);
        (first..end).for_each(|token| self.finish(token));
    }

    /// The target and the argmax of one token; and all of its sums where some logit is NaN or +∞, or
    /// none is more than −∞.
    fn finish(&mut self, token: usize) {
        let z = &self.z[token / BAND * self.padded * BAND + token % BAND..];
        let own = (self.tokens[token].target as usize).checked_sub(self.first);
        let own = own.filter(|&v| v < self.classes).map_or(0.0, |v| z[v * BAND]);
        let Some((sums, start)) = self.sums.as_mut() else { return };
        let at = *start + token;
        sums.argmax[at] = self.first as u32 + sums.target[at] as u32;
        sums.target[at] = own;
        if sums.l[at].is_nan() {
            let weight = |v: usize| self.weights.map_or(1.0, |weights| weights[v]);
            let column = z.iter().step_by(BAND).take(self.classes).enumerate();
            let column = column.map(|(v, &z)| (z, weight(v)));
            sums.set(at, Partial::of(self.first, column, own));
        }
    }
}

/// z in place of a for the tokens of W registers, the largest, and the class that has it.
#[inline(always)]
fn link_rows<I: Isa, const W: usize>(
    isa: I,
    link: &Link,
    bias: &[f32],
    classes: usize,
    argmax: bool,
    z: &mut [f32],
) -> ([I::F32; W], [I::F32; W]) {
    let mut m = [I::F32::splat(isa, f32::NEG_INFINITY); W];
    let mut best = [I::F32::splat(isa, 0.0); W];
    for v in 0..classes {
        let row = &mut z[v * BAND..][..W * I::F32::N];
        let number = I::F32::splat(isa, v as f32);
        for (n, place) in row.chunks_exact_mut(I::F32::N).enumerate() {
            let mut a = I::F32::load(isa, place);
            if let Some(&bias) = bias.get(v) {
                a = a + I::F32::splat(isa, bias);
            }
            let z = link.logit(isa, a);
            z.store(place);
            if argmax {
                best[n] = m[n].select_less(z, number, best[n]);
            }
            m[n] = z.max(m[n]);
        }
    }
    (m, best)
}

/// l, u and s of the tokens of W registers. NaN where some logit is NaN or +∞, or all are −∞.
#[inline(always)]
fn sum_rows<I: Isa, const W: usize>(
    isa: I,
    wanted: Wanted,
    weights: Option<&[f32]>,
    classes: usize,
    z: &[f32],
    m: [I::F32; W],
) -> [[I::F32; W]; 3] {
    let least = I::F32::splat(isa, LEAST);
    let [mut l, mut u, mut s] = [[I::F32::splat(isa, 0.0); W]; 3];
    for v in 0..classes {
        let row = &z[v * BAND..][..W * I::F32::N];
        let weight = if wanted.s { weights.map_or(1.0, |weights| weights[v]) } else { 0.0 };
        for (n, z) in row.chunks_exact(I::F32::N).enumerate() {
            let z = I::F32::load(isa, z);
            let e = exp_difference(isa, z, m[n]);
            l[n] = l[n] + e;
            if wanted.u {
                u[n] = e.mul_add(least.max(z - m[n]), u[n]);
            }
            if weight != 0.0 {
                s[n] = I::F32::splat(isa, weight).mul_add(z - m[n], s[n]);
            }
        }
    }
    [l, u, s]
}
