//! Partials of the rows of some tokens over a range of classes: the elements of a monoid (C33), (C34).

use super::tokens::weighted;
use crate::workspace::Parts;

/// A row of logits over a set of classes. Numbers that depend on the classes alone, Σ cw and
/// their count, are kept once for all tokens, and of a row that does not hold the target `target` is any number.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Partial {
    /// The largest logit: −∞ where there is none, NaN where one is.
    pub m: f32,
    /// Σ e^{z_v − m}
    pub l: f32,
    /// Σ e^{z_v − m} (z_v − m)
    pub u: f32,
    /// Σ cw_v (z_v − m); Σ cw_v z_v while m = −∞.
    pub s: f32,
    /// z_y
    pub target: f32,
    /// The class whose logit is m, the first of equals.
    pub argmax: u32,
}

/// x > y, where NaN counts as the largest.
pub fn exceeds(x: f32, y: f32) -> bool {
    x > y || (x.is_nan() && !y.is_nan())
}

/// weight · x, but 0·∞ = 0.
fn weigh_wide(weight: f32, x: f32) -> f32 {
    weighted(f64::from(weight), f64::from(x)) as f32
}

impl Partial {
    /// The classes `first..` with the logits `z` and their weights: as [`super::logits`] does, for rows
    /// that hold a NaN or +∞, or nothing but −∞.
    pub fn of(first: usize, z: impl Iterator<Item = (f32, f32)> + Clone, target: f32) -> Self {
        let (mut m, mut argmax) = (f32::NEG_INFINITY, 0);
        for (v, (z, _)) in z.clone().enumerate() {
            if exceeds(z, m) {
                (m, argmax) = (z, v);
            }
        }
        let mut all =
            Partial { m, l: 0.0, u: 0.0, s: 0.0, target, argmax: (first + argmax) as u32 };
        for (z, weight) in z {
            if m == f32::NEG_INFINITY {
                all.s += weigh_wide(weight, z);
                continue;
            }
            let shift = z - m;
            let e = shift.exp();
            all.l += e;
            all.u += if e == 0.0 { 0.0 } else { e * shift };
            all.s += weigh_wide(weight, shift);
        }
        all
    }

    /// Both sets of classes as one (C34), `other` of classes behind these. `weights`: Σ cw of either;
    /// `owned`: whether the target is one of the other classes.
    pub fn combine(self, other: Self, weights: [f32; 2], owned: bool) -> Self {
        let best = if exceeds(other.m, self.m) { other } else { self };
        let ([l1, u1, s1], [l2, u2, s2]) =
            (self.relative_to(best.m, weights[0]), other.relative_to(best.m, weights[1]));
        Partial {
            m: best.m,
            l: l1 + l2,
            u: u1 + u2,
            s: s1 + s2,
            target: if owned { other.target } else { self.target },
            argmax: best.argmax,
        }
    }

    /// l, u and s with `m` in place of its own maximum.
    fn relative_to(&self, m: f32, weight: f32) -> [f32; 3] {
        if self.m == m {
            return [self.l, self.u, self.s]; // also where ∞ − ∞ is no shift
        }
        if self.m == f32::NEG_INFINITY {
            return [0.0, 0.0, self.s - weigh_wide(weight, m)]; // (−∞)·0 is no entropy
        }
        let shift = self.m - m;
        let (k, s) = (shift.exp(), self.s + weigh_wide(weight, shift));
        // At k = 0, u may be −∞ · 0.
        let u = if k == 0.0 { 0.0 } else { k * (self.u + shift * self.l) };
        [k * self.l, u, s]
    }

    /// ln l; NaN where every logit is −∞: no probabilities exist.
    pub fn ln_l(&self) -> f64 {
        if self.l == 0.0 { f64::NAN } else { f64::from(self.l).ln() }
    }

    /// (C3)
    pub fn lse(&self) -> f64 {
        f64::from(self.m) + f64::from(self.l).ln()
    }

    /// (C5), of a row that holds the target.
    pub fn logprob(&self) -> f64 {
        (f64::from(self.target) - f64::from(self.m)) - self.ln_l()
    }

    /// Σ p (z − m)
    pub fn mean_shift(&self) -> f64 {
        f64::from(self.u) / f64::from(self.l)
    }

    /// (C6)
    pub fn entropy(&self) -> f64 {
        self.ln_l() - self.mean_shift()
    }
}

/// The partials of some tokens, side by side.
#[derive(Debug)]
pub struct Partials<'m> {
    pub m: &'m mut [f32],
    pub l: &'m mut [f32],
    pub u: &'m mut [f32],
    pub s: &'m mut [f32],
    pub target: &'m mut [f32],
    pub argmax: &'m mut [u32],
}

impl<'m> Partials<'m> {
    /// The partials of `len` tokens, from the next part.
    pub fn cut(parts: &mut Parts<'m>, len: usize) -> Self {
        Partials {
            m: parts.room(len),
            l: parts.room(len),
            u: parts.room(len),
            s: parts.room(len),
            target: parts.room(len),
            argmax: bytemuck::cast_slice_mut(parts.room(len)),
        }
    }

    pub fn get(&self, i: usize) -> Partial {
        let Partials { m, l, u, s, target, argmax } = self;
        Partial { m: m[i], l: l[i], u: u[i], s: s[i], target: target[i], argmax: argmax[i] }
    }

    pub fn set(&mut self, i: usize, x: Partial) {
        (self.m[i], self.l[i], self.u[i], self.s[i]) = (x.m, x.l, x.u, x.s);
        (self.target[i], self.argmax[i]) = (x.target, x.argmax);
    }
}
