//! What some classes add to a row, as shards send it to each other.

use super::super::partial::{Partial as Sums, exceeds};
use etalon_problem::Error;

/// A row of logits over a set of classes, as far as the outputs need it (C33): plain numbers, which
/// [`Partial::to_bytes`] writes down. [`Partial::combine`] puts disjoint sets together (C34).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Partial {
    /// What logits are relative to: −∞ where there is none, NaN where one is. In this tier it is the largest; in
    /// partials of other tiers it may lag behind that, by ln 2⁸ at most.
    pub m: f32,
    /// Σ e^{z_v − m}
    pub l: f32,
    /// Σ e^{z_v − m} (z_v − m)
    pub u: f32,
    /// Σ cw_v (z_v − m); Σ cw_v z_v while m = −∞.
    pub s: f32,
    /// Σ cw_v
    pub weight: f32,
    /// The number of classes.
    pub classes: u32,
    /// z_y, if the target is one of the classes: then they own it.
    pub target: Option<f32>,
    /// The class of the largest logit, the first of equals; none without classes, and in a partial of another tier
    /// whose problem does not ask for it.
    pub argmax: Option<u32>,
    /// The largest logit, by which sets of classes are compared for `argmax`.
    pub largest: f32,
}

/// Without classes: [`Partial::argmax`] as bytes.
const NO_CLASS: u32 = u32::MAX;

impl Partial {
    /// The length of [`Partial::to_bytes`].
    pub const BYTES: usize = 40;

    /// No classes: the identity of [`Partial::combine`].
    pub fn identity() -> Self {
        Partial {
            m: f32::NEG_INFINITY,
            l: 0.0,
            u: 0.0,
            s: 0.0,
            weight: 0.0,
            classes: 0,
            target: None,
            argmax: None,
            largest: f32::NEG_INFINITY,
        }
    }

    /// Both sets of classes as one (C34), in either order. Fails if both own the target, or if they have
    /// more than 2³² − 1 classes together. In another grouping the result agrees up to rounding; along the
    /// tree, as [`combine`](super::combine()) goes, it has the bits of the unsharded one.
    pub fn combine(self, other: Self) -> Result<Self, Error> {
        if self.target.is_some() && other.target.is_some() {
            return Err(Error::value("shards", "owners of each target once", "two owners"));
        }
        if self.classes.checked_add(other.classes).is_none() {
            let found = u64::from(self.classes) + u64::from(other.classes);
            return Err(Error::value("classes", format!("at most {}", u32::MAX), found));
        }
        Ok(self.join(other))
    }

    /// As [`Partial::combine`], where neither can be.
    pub(super) fn join(self, other: Self) -> Self {
        let (first, second) = match (self, other) {
            (_, other) if other.classes == 0 => return self,
            (own, _) if own.classes == 0 => return other,
            // Of equal maxima the first class counts.
            (own, other) if other.argmax < own.argmax => (other, own),
            both => both,
        };
        let best = if exceeds(second.largest, first.largest) { second } else { first };
        let weights = [first.weight, second.weight];
        let both = first.sums().combine(second.sums(), weights, second.target.is_some());
        let classes = first.classes.saturating_add(second.classes);
        Partial {
            target: first.target.or(second.target),
            argmax: first.argmax.and(second.argmax).and(best.argmax),
            largest: best.largest,
            ..Partial::of(both, first.weight + second.weight, classes, false)
        }
    }

    /// What the kernels know of it, whose m is the largest logit.
    pub(super) fn of(sums: Sums, weight: f32, classes: u32, owned: bool) -> Self {
        let Sums { m, l, u, s, target, argmax } = sums;
        let target = owned.then_some(target);
        Partial { m, l, u, s, weight, classes, target, argmax: Some(argmax), largest: m }
    }

    /// As the kernels hold it.
    pub(super) fn sums(self) -> Sums {
        let Partial { m, l, u, s, target, argmax, .. } = self;
        Sums { m, l, u, s, target: target.unwrap_or(0.0), argmax: argmax.unwrap_or(0) }
    }

    /// Ten numbers of four bytes each, least significant byte first: m, l, u, s, weight (f32), classes
    /// (u32), z_y (f32, 0 where another set owns the target), whether it is owned (u32, 1 or 0), argmax
    /// (u32; 2³² − 1: none), the largest logit (f32).
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let Partial { m, l, u, s, weight, classes, target, argmax, largest } = self;
        let float = f32::to_bits;
        let words = [
            float(m),
            float(l),
            float(u),
            float(s),
            float(weight),
            classes,
            float(target.unwrap_or(0.0)),
            u32::from(target.is_some()),
            argmax.unwrap_or(NO_CLASS),
            float(largest),
        ];
        let mut bytes = [0; Self::BYTES];
        for (bytes, word) in bytes.chunks_exact_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// What [`Partial::to_bytes`] wrote. Fails where the word that says whether the target is owned is
    /// neither 0 nor 1: these are other bytes.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Result<Self, Error> {
        let mut words = [0; Self::BYTES / 4];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        let [m, l, u, s, weight, classes, target, owned, argmax, largest] = words;
        if owned > 1 {
            return Err(Error::value("bytes of a partial", "with 0 or 1 as eighth word", owned));
        }
        let float = f32::from_bits;
        Ok(Partial {
            m: float(m),
            l: float(l),
            u: float(u),
            s: float(s),
            weight: float(weight),
            classes,
            target: (owned == 1).then(|| float(target)),
            argmax: (argmax != NO_CLASS).then_some(argmax),
            largest: float(largest),
        })
    }
}
