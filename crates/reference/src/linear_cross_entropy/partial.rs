//! Partials of a row over a range of classes: the elements of a monoid.

use super::{expected, weighted};
use crate::scalar::Real;
use etalon_problem::Error;

/// A row of logits over a set of classes, as far as the outputs need it (C33). Disjoint sets are
/// put together by [`Partial::combine`], in any grouping; floating-point results then agree up to
/// rounding, and to the last bit along the tree of `docs/linear_cross_entropy.md`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Partial<T> {
    /// The largest logit: −∞ where there is none, NaN where one is.
    pub m: T,
    /// Σ e^{z_v − m}
    pub l: T,
    /// Σ e^{z_v − m} (z_v − m)
    pub u: T,
    /// Σ cw_v (z_v − m); Σ cw_v z_v while m = −∞.
    pub s: T,
    /// Σ cw_v
    pub weight: T,
    /// The number of classes.
    pub classes: usize,
    /// z_y, if the target is one of the classes.
    pub target: Option<T>,
    /// The class whose logit is m, the first of equals; none without classes.
    pub argmax: Option<usize>,
}

/// x > y, where NaN counts as the largest.
fn exceeds<T: Real>(x: T, y: T) -> bool {
    x > y || (x.is_nan() && !y.is_nan())
}

impl<T: Real> Partial<T> {
    /// No classes: the identity of [`Partial::combine`].
    pub fn identity() -> Self {
        Partial {
            m: T::from_f64(f64::NEG_INFINITY),
            l: T::ZERO,
            u: T::ZERO,
            s: T::ZERO,
            weight: T::ZERO,
            classes: 0,
            target: None,
            argmax: None,
        }
    }

    /// The classes `first..first + z.len()` with the logits `z`. `class_weights` are those of
    /// these classes, or ones.
    pub(super) fn new(
        first: usize,
        z: &[T],
        class_weights: Option<&[T]>,
        target: Option<usize>,
    ) -> Self {
        let mut all = Partial { classes: z.len(), ..Partial::identity() };
        for (v, &z) in z.iter().enumerate() {
            if all.argmax.is_none() || exceeds(z, all.m) {
                (all.m, all.argmax) = (z, Some(first + v));
            }
        }
        all.target = target.and_then(|y| z.get(y.checked_sub(first)?)).copied();
        let empty = all.m == T::from_f64(f64::NEG_INFINITY);
        for (v, &z) in z.iter().enumerate() {
            let weight = class_weights.map_or(T::ONE, |weights| weights[v]);
            all.weight += weight;
            if empty {
                all.s += weighted(weight, z);
                continue;
            }
            let shift = z - all.m;
            let e = shift.exp();
            all.l += e;
            all.u += expected(e, shift);
            all.s += weighted(weight, shift);
        }
        all
    }

    /// Both sets of classes as one (C34). Fails if both hold the target.
    pub fn combine(self, other: Self) -> Result<Self, Error> {
        if self.target.is_some() && other.target.is_some() {
            return Err(Error::value("shards", "owners of each target once", "two owners"));
        }
        let ahead = match (self.argmax, other.argmax) {
            (_, None) => true,
            (None, _) => false,
            (Some(v), Some(w)) => exceeds(self.m, other.m) || (!exceeds(other.m, self.m) && v < w),
        };
        let best = if ahead { self } else { other };
        let ([l1, u1, s1], [l2, u2, s2]) = (self.relative_to(best.m), other.relative_to(best.m));
        Ok(Partial {
            m: best.m,
            l: l1 + l2,
            u: u1 + u2,
            s: s1 + s2,
            weight: self.weight + other.weight,
            classes: self.classes + other.classes,
            target: self.target.or(other.target),
            argmax: best.argmax,
        })
    }

    /// l, u and s with `m` in place of its own maximum.
    fn relative_to(&self, m: T) -> [T; 3] {
        if self.m == m && !m.is_finite() {
            return [self.l, self.u, self.s]; // ∞ − ∞ is no shift
        }
        if self.m == T::from_f64(f64::NEG_INFINITY) {
            return [T::ZERO, T::ZERO, self.s - weighted(self.weight, m)]; // (−∞)·0 is no entropy
        }
        let shift = self.m - m;
        let (k, s) = (shift.exp(), self.s + weighted(self.weight, shift));
        [k * self.l, k * (self.u + shift * self.l), s]
    }

    /// ln l; NaN where every logit is −∞: no probabilities exist.
    pub(super) fn ln_l(&self) -> T {
        if self.l == T::ZERO { T::from_f64(f64::NAN) } else { self.l.ln() }
    }

    /// The log-sum-exp of the logits (C3).
    pub fn lse(&self) -> T {
        self.m + self.l.ln()
    }

    /// The logarithm of the target's probability (C5); none unless the target is among the classes.
    pub fn logprob(&self) -> Option<T> {
        self.target.map(|z| (z - self.m) - self.ln_l())
    }

    /// The entropy of the probabilities (C6).
    pub fn entropy(&self) -> T {
        self.ln_l() - self.mean_shift()
    }

    /// Σ p (z − m)
    pub(super) fn mean_shift(&self) -> T {
        self.u / self.l
    }

    /// Σ cw_v (lse − z_v): what smoothing adds (C7).
    pub(super) fn spread(&self) -> T {
        self.weight * self.ln_l() - self.s
    }
}
