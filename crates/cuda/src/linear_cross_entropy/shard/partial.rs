//! What some classes add to a row, as shards send it to each other.

use crate::linear_cross_entropy::shard_pass::WORDS;
use etalon_problem::Error;

/// A row of logits over a set of classes (C33), as far as the outputs of the problem need it: `u` is 0 unless it asks
/// for the entropy, `s` and `weight` are 0 without label smoothing, and unless it asks for that `argmax` is none and `largest` −∞.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Partial {
    /// What logits are relative to: −∞ where there is none, NaN where one is. It is the largest, or, of the level
    /// sm90a, one that lags behind it by ln 2⁸ at most, whatever the problem asks for.
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
    /// The class of the largest logit, the first of equals.
    pub argmax: Option<u32>,
    /// The largest logit, by which sets of classes are compared for `argmax`.
    pub largest: f32,
}

/// No class: [`Partial::argmax`] in memory.
const NO_CLASS: u32 = u32::MAX;

impl Partial {
    /// The bytes of a partial on a device, which are those of [`Partial::to_bytes`]: a tensor of partials there is
    /// one of f32 with a last axis of ten.
    pub const BYTES: usize = 4 * WORDS;

    /// No classes: what shards return for ignored tokens.
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

    /// Ten numbers of four bytes each, least significant byte first: m, l, u, s, weight (f32), classes (u32), z_y
    /// (f32, 0 where another set owns the target), whether it is owned (u32, 1 or 0), argmax (u32; 2³² − 1: none), the
    /// largest logit (f32).
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (bytes, word) in bytes.chunks_exact_mut(4).zip(self.words()) {
            bytes.copy_from_slice(&word.to_bits().to_le_bytes());
        }
        bytes
    }

    /// What [`Partial::to_bytes`] wrote. Fails where the word that says whether the target is owned is neither 0 nor
    /// 1: these are other bytes, or those of totals with two owners.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Result<Self, Error> {
        let mut words = [0.0; WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = f32::from_bits(u32::from_le_bytes(*bytes));
        }
        Self::of(words)
    }

    /// As it lies on a device.
    pub(super) fn words(self) -> [f32; WORDS] {
        let Partial { m, l, u, s, weight, classes, target, argmax, largest } = self;
        let whole = f32::from_bits;
        let (owned, argmax) = (u32::from(target.is_some()), argmax.unwrap_or(NO_CLASS));
        let target = target.unwrap_or(0.0);
        [m, l, u, s, weight, whole(classes), target, whole(owned), whole(argmax), largest]
    }

    /// What lies on a device.
    pub(super) fn of(words: [f32; WORDS]) -> Result<Self, Error> {
        let [m, l, u, s, weight, classes, target, owned, argmax, largest] = words;
        let [classes, owned, argmax] = [classes, owned, argmax].map(f32::to_bits);
        if owned > 1 {
            return Err(Error::value("bytes of a partial", "with 0 or 1 as eighth word", owned));
        }
        Ok(Partial {
            m,
            l,
            u,
            s,
            weight,
            classes,
            target: (owned == 1).then_some(target),
            argmax: (argmax != NO_CLASS).then_some(argmax),
            largest,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_read_as_they_were_written() {
        let some = Partial {
            m: -1.5,
            l: 2.0,
            u: -0.25,
            s: 3.0,
            weight: 4.0,
            classes: 300,
            target: Some(-0.0),
            argmax: Some(u32::MAX - 1),
            largest: -1.25,
        };
        for partial in [some, Partial { target: None, ..some }, Partial::identity()] {
            assert_eq!(Partial::from_bytes(&partial.to_bytes()), Ok(partial));
        }
        let bytes = some.to_bytes();
        assert_eq!(bytes[20..24], 300u32.to_le_bytes());
        assert_eq!(bytes[28..32], 1u32.to_le_bytes());
        let mut two = bytes;
        two[28] = 2;
        assert!(Partial::from_bytes(&two).is_err());
    }
}
