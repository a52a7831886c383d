//! The sums of a row of logits over some classes, as shards send them to each other.

use crate::{Error, LinearCrossEntropy};

/// A row of logits over a set of classes (C33): plain numbers, which [`Partial::to_bytes`] writes down. The simd tier
/// computes all of them; the cuda tier those that outputs of the problem need: `u` is 0 unless it asks for the
/// entropy, `s` and `weight` are 0 without label smoothing, and unless it asks for that `argmax` is none and
/// `largest` −∞.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Partial {
    /// The number that logits are relative to: −∞ where there is none, NaN where one is. It is the largest of them,
    /// or, of the level sm90a of the cuda tier, one that lags behind it by ln 2⁸ at most.
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
    /// The class of the largest logit, the first of equals; none without classes.
    pub argmax: Option<u32>,
    /// The largest logit, by which sets of classes are compared for `argmax`.
    pub largest: f32,
}

/// No class: [`Partial::argmax`] as a word.
const NO_CLASS: u32 = u32::MAX;

impl Partial {
    /// The numbers of 32 bits that a partial is written as: a tensor of partials is one of f32 with a last axis of
    /// ten.
    pub const WORDS: usize = 10;

    /// The length of [`Partial::to_bytes`].
    pub const BYTES: usize = 4 * Self::WORDS;

    /// No classes, the identity of (C34): what shards return for ignored tokens.
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

    /// Ten numbers of 32 bits: m, l, u, s, weight (f32), classes (u32), z_y (f32, 0 where another set owns the
    /// target), whether it is owned (u32, 1 or 0), argmax (u32; 2³² − 1: none), the largest logit (f32).
    pub fn words(self) -> [u32; Self::WORDS] {
        let Partial { m, l, u, s, weight, classes, target, argmax, largest } = self;
        let [m, l, u, s, weight, largest] = [m, l, u, s, weight, largest].map(f32::to_bits);
        let (owned, argmax) = (u32::from(target.is_some()), argmax.unwrap_or(NO_CLASS));
        let target = target.unwrap_or(0.0).to_bits();
        [m, l, u, s, weight, classes, target, owned, argmax, largest]
    }

    /// The partial of [`Partial::words`]. Fails where the word that says whether the target is owned is neither 0 nor
    /// 1: these are other words, or those of totals with two owners.
    pub fn from_words(words: [u32; Self::WORDS]) -> Result<Self, Error> {
        let [m, l, u, s, weight, classes, target, owned, argmax, largest] = words;
        if owned > 1 {
            return Err(Error::value("bytes of a partial", "with 0 or 1 as eighth word", owned));
        }
        let [m, l, u, s, weight, target, largest] =
            [m, l, u, s, weight, target, largest].map(f32::from_bits);
        let target = (owned == 1).then_some(target);
        let argmax = (argmax != NO_CLASS).then_some(argmax);
        Ok(Partial { m, l, u, s, weight, classes, target, argmax, largest })
    }

    /// [`Partial::words`], of each the least significant byte first.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (bytes, word) in bytes.chunks_exact_mut(4).zip(self.words()) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The partial of [`Partial::to_bytes`]; fails as [`Partial::from_words`] does.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Result<Self, Error> {
        let mut words = [0; Self::WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        Self::from_words(words)
    }

    /// Fails unless it is the total of a token that counts, and has this target: unless it has all classes of the
    /// problem, and one of them is the target.
    pub fn check_total(
        &self,
        problem: &LinearCrossEntropy,
        token: usize,
        target: i64,
    ) -> Result<(), Error> {
        if self.classes as usize != problem.vocab {
            let expected = format!("of all {} classes", problem.vocab);
            return Err(Error::value(format!("totals[{token}]"), expected, self.classes));
        }
        if self.target.is_none() {
            let expected = "a class of one of the shards";
            return Err(Error::value(format!("targets[{token}]"), expected, target));
        }
        Ok(())
    }
}
