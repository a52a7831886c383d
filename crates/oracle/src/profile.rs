//! Numerics profiles: a declared class of arithmetic, from which every bound follows.

use etalon_problem::{Dtype, Error};
use std::fmt;

/// The arithmetic with which a kernel claims to compute. There is no free tolerance: the bounds of
/// `docs/numerics.md` are functions of these numbers and of the inputs. "Roundoff" is that of the
/// accumulator.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Profile {
    /// Its name on the command line.
    pub name: &'static str,
    /// The type of every sum.
    pub accumulator: Dtype,
    /// The relative error of a factor of a matrix product: of tensor cores that read ten bits of its
    /// significand 2⁻¹⁰, of those that read all 0.
    pub factor: f64,
    /// The type in which the weights P are stored before they multiply v, if not the accumulator's.
    pub p_store: Dtype,
    /// The type in which dS is stored before it multiplies q and k, if not the accumulator's.
    pub ds_store: Dtype,
    /// Numbers of these types as whose sum P and dS are multiplied.
    pub pieces: usize,
    /// The type in which dk and dv of each query head are stored before those of a group are added up.
    pub group_store: Dtype,
    /// The type in which every step on the way to a score or logit is stored (the product, scaled, capped, with
    /// its bias), and every step of the gradient on the way back, if not the accumulator's.
    pub score_store: Dtype,
    /// The type in which dP is stored, if not the accumulator's.
    pub dp_store: Dtype,
    /// The type in which normalised weights are stored before anything is done with them, if not the
    /// accumulator's.
    pub weight_store: Dtype,
    /// The type in which p − \[y\] of linear cross-entropy is stored before it is scaled, if not the
    /// accumulator's.
    pub residual_store: Dtype,
    /// The type in which dw and dbias of a chunk of tokens, and their sum so far, are stored, if not the
    /// accumulator's.
    pub chunk_store: Dtype,
    /// Tokens of such a chunk; 0: as many as Liger takes, a power of two.
    pub chunk_tokens: usize,
    /// a: the relative error of exp in roundoffs, at 0.
    pub exp_constant: f64,
    /// b: how that error grows with the size of the argument. It includes the roundings of the
    /// argument itself: of the subtraction, of log₂e and of the product of the two.
    pub exp_slope: f64,
    /// b₀: the same of an argument that is exact, and so is its difference from a maximum.
    pub exp_slope_exact: f64,
    /// The absolute error of tanh, in roundoffs.
    pub tanh: f64,
    /// The error of ln x, in units of max(1, |ln x|) roundoffs.
    pub log: f64,
    /// The error of lse = m + ln l beside that of ln l, in units of |m| + |ln l| roundoffs.
    pub lse: f64,
    /// The fewest keys between two rescales of a streaming softmax.
    pub rescale_keys: usize,
    /// The largest lag, in natural logarithms, of the running maximum of a streaming softmax behind
    /// the true one.
    pub rescale_lag: f64,
}

/// Sums in f32 and nothing stored lower than that: what the f32 kernels of the cuda tier promise. Only
/// the operands and results themselves have the storage type.
const F32_STRICT: Profile = Profile {
    name: "f32-strict",
    accumulator: Dtype::F32,
    factor: 0.0,
    p_store: Dtype::F32,
    ds_store: Dtype::F32,
    pieces: 1,
    group_store: Dtype::F32,
    score_store: Dtype::F32,
    dp_store: Dtype::F32,
    weight_store: Dtype::F32,
    residual_store: Dtype::F32,
    chunk_store: Dtype::F32,
    chunk_tokens: 0,
    exp_constant: 4.0,    // 2 ulp: a polynomial of degree 5 or 6, or ex2.approx
    exp_slope: 4.0,       // three roundings of the argument, and one to spare for folded scales
    exp_slope_exact: 4.0, // kernels that fold a scale into log₂e round all the same
    tanh: 8.0,            // 1 − 2/(e^{2x} + 1) with such an exp loses up to 7
    log: 4.0,
    lse: 3.0, // the sum, and to base 2 a product with ln 2 and its rounding
    rescale_keys: 8,
    rescale_lag: 8.0 * std::f64::consts::LN_2, // a rescale only when the maximum grows 2⁸-fold
};

/// As [`F32_STRICT`], with the functions of the simd tier, whose errors at every float a test of that tier
/// finds, for every instruction set.
const F32_SIMD: Profile = Profile {
    name: "f32-simd",
    exp_constant: 2.0,     // 1.81 at the most, on lanes that do not fuse
    exp_slope: 2.25,       // z − m rounds, and that less ln l; log₂e errs by 0.22
    exp_slope_exact: 0.25, // log₂e alone
    tanh: 3.0,             // 1.93 at the most; that of C libraries 2.2
    log: 1.0,              // of f64, and where it is kept for another pass rounded once
    lse: 0.0,              // m + ln l is one sum, in f64
    ..F32_STRICT
};

/// Sums in f32 of products whose factors are each the sum of two numbers in bf16, without the products of
/// the two smaller ones.
const F32_BF16X3: Profile = Profile {
    name: "f32-bf16x3",
    factor: 1.0 / 65536.0, // 2⁻¹⁶: 2⁻¹⁷ that both numbers miss, and half of the product left out
    ..F32_STRICT
};

/// Sums in f32 of products whose factors lose all but ten bits, rounded or cut off.
const F32_TF32: Profile = Profile {
    name: "f32-tf32",
    factor: 1.0 / 1024.0, // 2⁻¹⁰: cut off; rounded it is half of that
    ..F32_STRICT
};

/// Sums in f32; P, dS, and the gradients of each head of a group stored in a narrower type.
const fn flash(name: &'static str, store: Dtype) -> Profile {
    Profile { name, p_store: store, ds_store: store, group_store: store, ..F32_STRICT }
}

/// Sums in f32; P and dS multiplied as sums of two numbers in bf16, the other factors as they are.
const BF16_SPLIT2: Profile = Profile {
    name: "bf16-split2",
    p_store: Dtype::Bf16,
    ds_store: Dtype::Bf16,
    pieces: 2,
    ..F32_STRICT
};

/// Attention in bf16 that is written as `softmax(q kᵀ σ) v`, with the gradient that autograd makes of it:
/// sums in f32, every tensor in between stored in bf16.
const BF16_EAGER: Profile = Profile {
    name: "bf16-eager",
    score_store: Dtype::Bf16,
    dp_store: Dtype::Bf16,
    weight_store: Dtype::Bf16,
    ds_store: Dtype::Bf16,
    group_store: Dtype::Bf16,
    ..F32_STRICT
};

/// Linear cross-entropy in chunks of tokens, as Liger stores it: logits and their gradients in bf16, and dw as
/// it is summed over chunks.
const BF16_CHUNKED: Profile = Profile {
    name: "bf16-chunked",
    score_store: Dtype::Bf16,
    ds_store: Dtype::Bf16,
    chunk_store: Dtype::Bf16,
    ..F32_STRICT
};

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name)
    }
}

impl Profile {
    /// Every profile that kernels of many authors have, strictest first.
    pub const ALL: [Profile; 9] = [
        Profile {
            name: "f64",
            accumulator: Dtype::F64,
            p_store: Dtype::F64,
            ds_store: Dtype::F64,
            group_store: Dtype::F64,
            score_store: Dtype::F64,
            dp_store: Dtype::F64,
            weight_store: Dtype::F64,
            residual_store: Dtype::F64,
            chunk_store: Dtype::F64,
            ..F32_STRICT
        },
        F32_STRICT,
        F32_BF16X3,
        F32_TF32,
        BF16_SPLIT2,
        flash("f16-flash", Dtype::F16),
        flash("bf16-flash", Dtype::Bf16),
        BF16_EAGER,
        BF16_CHUNKED,
    ];

    /// The profile of this name.
    pub fn by_name(name: &str) -> Result<Profile, Error> {
        Profile::named().find(|profile| profile.name == name).ok_or_else(|| {
            let names: Vec<&str> = Profile::named().map(|profile| profile.name).collect();
            Error::value("profile", format!("one of {}", names.join(", ")), name)
        })
    }

    /// Every profile that has a name: [`Profile::ALL`], then those of one tier of etalon each.
    pub fn named() -> impl Iterator<Item = Profile> {
        Profile::ALL.into_iter().chain([F32_SIMD])
    }

    /// The profile that the simd tier promises for operands stored in `dtype`.
    pub fn simd(dtype: Dtype) -> Profile {
        if dtype == Dtype::F64 { Profile::strict(dtype) } else { F32_SIMD }
    }

    /// True where `other` grants a kernel all that this profile grants.
    pub fn is_within(&self, other: &Profile) -> bool {
        let figures = |x: &Profile| {
            let types = [x.accumulator, x.group_store, x.score_store];
            let more = [x.dp_store, x.weight_store, x.residual_store, x.chunk_store];
            let stored = types.into_iter().chain(more).map(Dtype::unit_roundoff);
            let stored = stored.chain([x.p_roundoff(), x.ds_roundoff()]);
            let exp = [x.exp_constant, x.exp_slope, x.exp_slope_exact];
            let functions = [x.tanh, x.log, x.lse, x.rescale_lag, -(x.rescale_keys as f64)];
            exp.into_iter().chain(functions).chain(stored).chain([x.factor])
        };
        figures(self).zip(figures(other)).all(|(own, granted)| own <= granted)
    }

    /// The widest that etalon's own tiers promise for operands stored in `dtype`, where nothing is narrowed.
    pub fn strict(dtype: Dtype) -> Profile {
        if dtype == Dtype::F64 { Profile::ALL[0] } else { F32_STRICT }
    }

    /// The profile of kernels that multiply f32 rounded to tf32.
    pub fn tf32() -> Profile {
        F32_TF32
    }

    /// The profile of kernels that multiply f32 as sums of two numbers in bf16.
    pub fn bf16x3() -> Profile {
        F32_BF16X3
    }

    /// The profile of kernels that multiply P and dS as sums of two numbers in bf16.
    pub fn split2() -> Profile {
        BF16_SPLIT2
    }

    /// The roundoff of a P before it multiplies v: that of its type, to the power of its pieces.
    pub fn p_roundoff(&self) -> f64 {
        self.p_store.unit_roundoff().powi(self.pieces as i32)
    }

    /// The same of a dS before it multiplies q and k.
    pub fn ds_roundoff(&self) -> f64 {
        self.ds_store.unit_roundoff().powi(self.pieces as i32)
    }

    /// The larger of both, of those that are not of the accumulator's type.
    pub fn weight_roundoff(&self) -> f64 {
        let narrow = |store, roundoff| if store == self.accumulator { 0.0 } else { roundoff };
        narrow(self.p_store, self.p_roundoff()).max(narrow(self.ds_store, self.ds_roundoff()))
    }

    /// The profile of kernels that round P and dS to the storage type: the flash profile of 16-bit types,
    /// and the strict one of others.
    pub fn flash(dtype: Dtype) -> Profile {
        let is_flash = |profile: &Profile| profile.p_store == dtype && profile.pieces == 1;
        let flash = Profile::ALL.into_iter().find(is_flash);
        flash.unwrap_or_else(|| Profile::strict(dtype))
    }

    /// Types in which a value between operands and results is stored.
    pub fn stores(&self) -> [Dtype; 8] {
        let &Profile { p_store, ds_store, group_store, score_store, dp_store, .. } = self;
        let &Profile { weight_store, residual_store, chunk_store, .. } = self;
        [
            p_store,
            ds_store,
            group_store,
            score_store,
            dp_store,
            weight_store,
            residual_store,
            chunk_store,
        ]
    }

    /// The tokens of a chunk of linear cross-entropy. Liger lets the logits of one take about as much memory as
    /// h: of T tokens the next power of two from T/⌈V/D⌉ on.
    pub(crate) fn chunk(&self, tokens: usize, dim: usize, vocab: usize) -> usize {
        match self.chunk_tokens {
            0 => tokens.div_ceil(vocab.div_ceil(dim.max(1)).max(1)).max(1).next_power_of_two(),
            chunk => chunk,
        }
    }

    /// The number of rescales that a streaming softmax over `keys` keys may do.
    pub(crate) fn rescales(&self, keys: usize) -> usize {
        keys.div_ceil(self.rescale_keys.max(1)) + 1
    }

    /// The roundings that a term of a streaming sum over `keys` keys may suffer: its product and
    /// the additions after it, then with every later tile a rescale and an addition.
    pub(crate) fn chain(&self, keys: usize) -> usize {
        keys + 2 * self.rescales(keys) + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_that_of_liger() {
        let profile = Profile::by_name("bf16-chunked").unwrap();
        // 4096 tokens of 4096 elements and 128,256 classes: 32 parts of 128 tokens.
        assert_eq!(profile.chunk(4096, 4096, 128_256), 128);
        assert_eq!(profile.chunk(1000, 64, 300), 256); // 5 parts of 200
        assert_eq!(profile.chunk(32, 64, 32), 32);
        assert_eq!(Profile { chunk_tokens: 7, ..profile }.chunk(1000, 64, 300), 7);
    }

    #[test]
    fn names_find_their_profiles() {
        for profile in Profile::named() {
            assert_eq!(Profile::by_name(profile.name), Ok(profile));
        }
        let error = Profile::by_name("f8-flash").unwrap_err().to_string();
        let [strict, simd] = [Profile::strict(Dtype::F32), Profile::simd(Dtype::F32)];
        assert!(simd.is_within(&strict) && !strict.is_within(&simd));
        assert!(!Profile::flash(Dtype::Bf16).is_within(&strict));
        let [split, flash] = [Profile::split2(), Profile::flash(Dtype::Bf16)];
        assert!(strict.is_within(&split) && split.is_within(&flash) && !flash.is_within(&split));
        assert!(error.contains("one of f64, f32-strict") && error.contains("f8-flash"), "{error}");
    }
}
