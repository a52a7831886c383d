//! Motions of the logits of a tile of classes, and their contribution to the motions of some tokens:
//!
//! ```text
//! (C21) ȧ_iv = ddh_i·w_v + h_i·ddw_v + ddbias_v,  ż_iv = r_iv ȧ_iv
//! ```

use super::super::logits::{LEAST, Link, Wanted};
use super::super::partial::Partials;
use super::super::tokens::Token;
use super::motion::Motions;
use crate::exp::exp_difference;
use crate::lanes::{Isa, Kernel, Lanes};
use crate::tile::BAND;

/// Turns ȧ into ż, and sums it up.
pub struct MotionRows<'a, 'm> {
    pub link: Link,
    /// The number of the first class.
    pub first: usize,
    /// ddbias of every class; none where there is none.
    pub ddbias: &'a [f32],
    pub weights: Option<&'a [f32]>,
    pub classes: usize,
    pub padded: usize,
    /// Bands of tokens: z, and ȧ.
    pub z: &'a [f32],
    pub motion: &'a mut [f32],
    pub tokens: &'a [Token],
    pub wanted: Wanted,
    /// The partials of the tile, and where their motions go, from this number on, if they are wanted.
    pub sums: Option<(&'a Partials<'m>, &'a mut Motions<'m>, usize)>,
}

impl Kernel for MotionRows<'_, '_> {
    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) {
        let (lanes, count) = (I::F32::N, self.tokens.len());
        for first in (0..count).step_by(lanes) {
            let place = first / BAND * self.padded * BAND + first % BAND;
            let best = self.link_rows(isa, place);
            let Some((rows, _, start)) = self.sums.as_ref() else { continue };
            let at = start + first;
            let m = I::F32::load(isa, &rows.m[at..]);
            let (l, u, s) = self.sum_rows(isa, place, m, best);
            let Some((_, motions, _)) = self.sums.as_mut() else { continue };
            // The last lanes may be of no token: there is room for them.
            best.store(&mut motions.m[at..]);
            l.store(&mut motions.l[at..]);
            u.store(&mut motions.u[at..]);
            s.store(&mut motions.s[at..]);
            (first..count.min(first + lanes)).for_each(|token| self.finish(token));
        }
    }
}

impl MotionRows<'_, '_> {
    /// ż in place of ȧ for the tokens of one register; that of the largest logit, of the first of equals.
    #[inline(always)]
    fn link_rows<I: Isa>(&mut self, isa: I, at: usize) -> I::F32 {
        let mut m = I::F32::splat(isa, f32::NEG_INFINITY);
        let mut best = I::F32::splat(isa, 0.0);
        for v in 0..self.classes {
            let z = I::F32::load(isa, &self.z[at + v * BAND..]);
            let place = &mut self.motion[at + v * BAND..];
            let mut a = I::F32::load(isa, place);
            if let Some(&ddbias) = self.ddbias.get(v) {
                a = a + I::F32::splat(isa, ddbias);
            }
            let motion = self.link.slope(isa, z) * a;
            motion.store(place);
            best = m.select_less(z, motion, best);
            m = z.max(m);
        }
        best
    }

    /// l, u and s of the tokens of one register, with their maxima and the motions of these.
    #[inline(always)]
    fn sum_rows<I: Isa>(
        &self,
        isa: I,
        at: usize,
        m: I::F32,
        best: I::F32,
    ) -> (I::F32, I::F32, I::F32) {
        let (zero, least) = (I::F32::splat(isa, 0.0), I::F32::splat(isa, LEAST));
        let (mut l, mut u, mut s) = (zero, zero, zero);
        for v in 0..self.classes {
            let z = I::F32::load(isa, &self.z[at + v * BAND..]);
            let d = I::F32::load(isa, &self.motion[at + v * BAND..]) - best;
            let moved = exp_difference(isa, z, m) * d;
            l = l + moved;
            if self.wanted.u {
                u = moved.mul_add(least.max(z - m), u);
            }
            if self.wanted.s {
                let weight = self.weights.map_or(1.0, |weights| weights[v]);
                s = I::F32::splat(isa, weight).mul_add(d, s);
            }
        }
        (l, u, s)
    }

    /// The target of one token; and its sums where no logit is more than −∞.
    fn finish(&mut self, token: usize) {
        let motion = &self.motion[token / BAND * self.padded * BAND + token % BAND..];
        let own = (self.tokens[token].target as usize).checked_sub(self.first);
        let own = own.filter(|&v| v < self.classes).map_or(0.0, |v| motion[v * BAND]);
        let Some((rows, motions, start)) = self.sums.as_mut() else { return };
        let at = *start + token;
        motions.target[at] = own;
        if rows.m[at] == f32::NEG_INFINITY {
            let weight = |v: usize| self.weights.map_or(1.0, |weights| weights[v]);
            let column = motion.iter().step_by(BAND).take(self.classes).enumerate();
            motions.s[at] = column.map(|(v, &motion)| weight(v) * motion).sum();
            (motions.m[at], motions.l[at], motions.u[at]) = (0.0, 0.0, 0.0);
        }
    }
}
