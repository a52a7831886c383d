//! Powers of two and the hyperbolic tangent, on registers.
//!
//! 2ˣ = 2ⁿ · 2ᶠ with n the nearest integer to x and f = x − n in [−½, ½]; 2ᶠ = 1 + f·p(f), with p
//! the polynomial of degree 5 that minimises the largest relative error (2.6·10⁻⁹, found by
//! Remez' exchange). The constant term is exactly 1, so 2⁰ = 1 exactly. Rounding dominates: the
//! result is within 1.5 units of 2⁻²⁴ of 2ˣ, relatively, where lanes fuse (2 where they do not);
//! below 2⁻¹²⁶ it is flushed to 0. The tests try every float of [−150, 0] in steps, and all around
//! the halves where n changes.

use crate::lanes::{Isa, Lanes};
use std::f32::consts::LOG2_E;

#[allow(clippy::excessive_precision)] // as they were found; the compiler rounds them
/// c₁ … c₆ of 2ᶠ ≈ 1 + c₁f + … + c₆f⁶.
const EXP2: [f32; 6] = [
    0.693_147_214_968,
    0.240_226_527_829,
    0.055_503_105_510_1,
    0.009_617_692_972_99,
    0.001_340_664_390_24,
    0.000_155_946_781_613,
];

#[allow(clippy::excessive_precision)]
/// t₁ … t₅ of tanh(x) ≈ x + x·(t₁x² + … + t₅x¹⁰) for |x| ≤ 0.6, relative error 2.7·10⁻⁹.
const TANH: [f32; 5] = [
    -0.333_332_992_721,
    0.133_319_582_439,
    -0.053_786_683_658_3,
    0.020_805_384_847_6,
    -0.005_905_868_685_79,
];

/// Below this, tanh is its polynomial.
const TANH_SMALL: f32 = 0.6;

/// Adding it to a number of at most 2²² leaves no bits for a fraction: the nearest integer, ties to even.
const ROUND: f32 = 12_582_912.0; // 1.5·2²³

/// ln 2 in two parts: the first has nine bits, so that its products with n are exact, and so are x less
/// these.
#[allow(clippy::excessive_precision)]
const LN_2: [f32; 2] = [0.693_359_375, -2.121_944_400_55e-4];

/// 2ˣ for x ≤ 127; 0 for x ≤ −127; NaN for NaN.
#[inline(always)]
pub fn exp2<I: Isa>(isa: I, x: I::F32) -> I::F32 {
    power(isa, x, 1.0)
}

/// eˣ for x ≤ 88; 0 for x ≤ −88.1; NaN for NaN.
#[inline(always)]
pub fn exp<I: Isa>(isa: I, x: I::F32) -> I::F32 {
    power(isa, x, LOG2_E)
}

/// e^(s − m): the subtraction first, so that e^(m − m) = 1 exactly whatever m is.
#[inline(always)]
pub fn exp_difference<I: Isa>(isa: I, s: I::F32, m: I::F32) -> I::F32 {
    exp(isa, s - m)
}

/// 2^(x·factor), where `factor` is 1 or log₂e. Where lanes fuse, x·factor is not rounded; where they do
/// not, x less the nearest multiple n of ln 2 is exact but for a product that is small.
#[inline(always)]
fn power<I: Isa>(isa: I, x: I::F32, factor: f32) -> I::F32 {
    let exact = factor == 1.0;
    // `max` returns its second operand where either is NaN: so a NaN survives.
    let x = if I::F32::FLUSHES { x } else { I::F32::splat(isa, -127.0 / factor).max(x) };
    let (factor, round) = (I::F32::splat(isa, factor), I::F32::splat(isa, ROUND));
    let n = x.mul_add(factor, round) - round;
    let f = if I::F32::FUSES || exact {
        x.mul_sub(factor, n)
    } else {
        let [high, low] = LN_2.map(|part| I::F32::splat(isa, part));
        ((x - n * high) - n * low) * factor
    };
    let mut p = I::F32::splat(isa, EXP2[5]);
    for &c in EXP2[..5].iter().rev() {
        p = p.mul_add(f, I::F32::splat(isa, c));
    }
    p.mul_add(f, I::F32::splat(isa, 1.0)).mul_pow2(n)
}

/// tanh x, within 4 units of 2⁻²⁴, relatively; NaN for NaN.
#[inline(always)]
pub fn tanh<I: Isa>(isa: I, x: I::F32) -> I::F32 {
    let zero = I::F32::splat(isa, 0.0);
    let one = I::F32::splat(isa, 1.0);
    let negative = zero - x;
    let magnitude = negative.max(x);
    // Large: (1 − e^−2|x|) / (1 + e^−2|x|), with the sign of x.
    let e = exp2(isa, magnitude * I::F32::splat(isa, -2.0 * LOG2_E));
    let large = (one - e) / (one + e);
    let large = x.select_less(zero, zero - large, large);
    // Small: the polynomial.
    let square = x * x;
    let mut p = I::F32::splat(isa, TANH[4]);
    for &t in TANH[..4].iter().rev() {
        p = p.mul_add(square, I::F32::splat(isa, t));
    }
    let small = (p * square).mul_add(x, x);
    magnitude.select_less(I::F32::splat(isa, TANH_SMALL), small, large)
}

#[cfg(test)]
mod tests;
