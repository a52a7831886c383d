//! Motions of the partials of tokens with their logits.
//!
//! ```text
//! (C39) ṁ = ż at the argmax,  l′ = Σ e^{z−m} (ż − ṁ),  u′ = Σ e^{z−m} (z − m) (ż − ṁ),  s′ = Σ cw (ż − ṁ)
//! (C40) of two sets of classes as one, with x = m₁ − m and d = ṁ₁ − ṁ:
//!       l′ = Σ k (l′ + d l),  u′ = Σ k (u′ + x l′ + d (u + x l)),  s′ = Σ (s′ + d W)
//! (C41) μ = ṁ + l′/l,  ż_y − μ = (ż_y − ṁ) − l′/l,  Ḣ = (u/l) (l′/l) − u′/l
//! ```
//!
//! Relative to ṁ nothing cancels where one class has nearly all of the probability.

use super::super::logits::LEAST;
use super::super::partial::{Partial, exceeds};
use crate::workspace::Parts;

/// Motion of a [`Partial`] (C39).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Motion {
    /// ż of the class whose logit is m; 0 while m = −∞.
    pub m: f32,
    /// Σ e^{z_v − m} (ż_v − ṁ)
    pub l: f32,
    /// Σ e^{z_v − m} (z_v − m) (ż_v − ṁ)
    pub u: f32,
    /// Σ cw_v (ż_v − ṁ)
    pub s: f32,
    /// ż_y
    pub target: f32,
}

impl Motion {
    /// (C40): that of two sets of classes as one, from their partials and motions. `weights`: Σ cw of either;
    /// `owned`: whether the target is one of the second.
    pub fn combine(
        [x, y]: [Self; 2],
        [row_x, row_y]: [&Partial; 2],
        weights: [f32; 2],
        owned: bool,
    ) -> Self {
        let (m, motion) = if exceeds(row_y.m, row_x.m) { (row_y.m, y.m) } else { (row_x.m, x.m) };
        let [l1, u1, s1] = x.relative_to(row_x, (m, motion), weights[0]);
        let [l2, u2, s2] = y.relative_to(row_y, (m, motion), weights[1]);
        Motion {
            m: motion,
            l: l1 + l2,
            u: u1 + u2,
            s: s1 + s2,
            target: if owned { y.target } else { x.target },
        }
    }

    /// l, u and s with `m` and its motion in place of their own.
    fn relative_to(&self, row: &Partial, (m, motion): (f32, f32), weight: f32) -> [f32; 3] {
        let d = self.m - motion;
        let s = self.s + weight * d;
        if row.m == f32::NEG_INFINITY {
            return [0.0, 0.0, s];
        }
        let x = row.m - m;
        let x = if x < LEAST { LEAST } else { x }; // NaN passes
        let k = x.exp();
        let l = k * (self.l + d * row.l);
        let u = k * ((self.u + x * self.l) + d * (row.u + x * row.l));
        [l, u, s]
    }

    /// Σ p (ż − ṁ)
    pub fn mean(&self, row: &Partial) -> f64 {
        f64::from(self.l) / f64::from(row.l)
    }

    /// μ of (C22), (C41)
    pub fn lse(&self, row: &Partial) -> f64 {
        f64::from(self.m) + self.mean(row)
    }

    /// (C32), (C41), of a row that holds the target.
    pub fn logprob(&self, row: &Partial) -> f64 {
        (f64::from(self.target) - f64::from(self.m)) - self.mean(row)
    }

    /// (C24), (C41)
    pub fn entropy(&self, row: &Partial) -> f64 {
        row.mean_shift() * self.mean(row) - f64::from(self.u) / f64::from(row.l)
    }
}

/// The motions of some tokens, side by side.
#[derive(Debug)]
pub struct Motions<'m> {
    pub m: &'m mut [f32],
    pub l: &'m mut [f32],
    pub u: &'m mut [f32],
    pub s: &'m mut [f32],
    pub target: &'m mut [f32],
}

impl<'m> Motions<'m> {
    /// The motions of `len` tokens, from the next part.
    pub fn cut(parts: &mut Parts<'m>, len: usize) -> Self {
        Motions {
            m: parts.room(len),
            l: parts.room(len),
            u: parts.room(len),
            s: parts.room(len),
            target: parts.room(len),
        }
    }

    pub fn get(&self, i: usize) -> Motion {
        let Motions { m, l, u, s, target } = self;
        Motion { m: m[i], l: l[i], u: u[i], s: s[i], target: target[i] }
    }

    pub fn set(&mut self, i: usize, x: Motion) {
        (self.m[i], self.l[i], self.u[i], self.s[i]) = (x.m, x.l, x.u, x.s);
        self.target[i] = x.target;
    }
}
