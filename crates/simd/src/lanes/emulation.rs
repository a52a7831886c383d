//! Sums of products of pairs of bf16, to the bit as instructions of x86-64 make them.
//!
//! Recordings of CPUs prove it on every machine, and the instructions themselves where there are some. Neither
//! reads or changes MXCSR: sums are rounded to the nearest even, subnormal operands and results are zeros
//! of their sign. Of several NaN the manuals do not say which a result has, and of the order of sums in
//! `tdpbf16ps` they say two things.

use super::Lanes;
use super::matrix::{CUT, Matrix, Product, SIDE, WORDS, element, multiply_pairs, spin_pairs};
use super::pairs::{Pairs, word};
use super::portable::{F32s, Portable};

/// One lane of `vdpbf16ps`, on the bits of an f32 and of two pairs, whose even elements are in the low halves:
/// first the product of the odd elements is added, then that of the even ones, each rounded once.
fn vdpbf16ps(sum: u32, a: u32, b: u32) -> u32 {
    let odd = fused(a & ODD, b & ODD, sum);
    fused(a << 16, b << 16, odd)
}

/// One element of `tdpbf16ps`, from a row of pairs of A and a column of pairs of B: the products of even
/// elements and those of odd ones have a sum each, from zero on; at last both are added to each other, and that to
/// the element.
fn tdpbf16ps(sum: u32, a: &[u32], b: &[u32]) -> u32 {
    let (mut even, mut odd) = (0, 0);
    for (&a, &b) in a.iter().zip(b) {
        even = fused(a << 16, b << 16, even);
        odd = fused(a & ODD, b & ODD, odd);
    }
    added(sum, added(even, odd))
}

/// The odd element of a pair, as an f32.
const ODD: u32 = 0xffff_0000;

/// The result of an invalid operation.
const DEFAULT_NAN: u32 = 0xffc0_0000;

/// The bit that makes a NaN quiet.
const QUIET: u32 = 0x0040_0000;

/// a + b: the first if it is NaN.
fn added(a: u32, b: u32) -> u32 {
    fused(a, 1.0f32.to_bits(), b)
}

/// a·b + c, rounded once; of several NaN the first.
fn fused(a: u32, b: u32, c: u32) -> u32 {
    if let Some(nan) = [a, b, c].into_iter().find(|&x| f32::from_bits(x).is_nan()) {
        return nan | QUIET;
    }
    let [a, b, c] = [a, b, c].map(flushed);
    // Beside a product or sum that is larger nothing subnormal is left.
    let small = f32::from_bits((127 - 64) << 23);
    let sum = match (a * b).abs() < small && c.abs() < small {
        true => fused_small(a, b, c),
        false => a.mul_add(b, c),
    };
    if sum.is_nan() { DEFAULT_NAN } else { sum.to_bits() }
}

/// The same of a sum that may be subnormal. One is not that is so only before it is rounded to as many digits as
/// a normal number has: 64 binades up it shows.
fn fused_small(a: f32, b: f32, c: f32) -> f32 {
    let up = f32::from_bits((127 + 64) << 23);
    let (less, more) = if a.abs() < b.abs() { (a, b) } else { (b, a) };
    let sum = (less * up).mul_add(more, c * up);
    match sum.abs() < f32::MIN_POSITIVE * up {
        true => 0.0f32.copysign(sum),
        false => sum / up,
    }
}

/// Zero of its sign for a subnormal number.
fn flushed(x: u32) -> f32 {
    let x = f32::from_bits(x);
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

/// The token of either instruction on every machine: one type, so that a kernel is compiled once for both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Emulated {
    /// `vdpbf16ps`, of registers of pairs and of tiles.
    Pairs,
    /// `tdpbf16ps`, of tiles.
    Tiles,
}

impl Pairs for Emulated {
    type Isa = Portable;

    #[inline(always)]
    fn isa(self) -> Portable {
        Portable
    }

    #[inline(always)]
    fn add(self, a: F32s, b: F32s, sum: F32s) -> F32s {
        let [mut x, mut y, mut sums] = [[0.0; F32s::N]; 3];
        a.store(&mut x);
        b.store(&mut y);
        sum.store(&mut sums);
        for ((sum, x), y) in sums.iter_mut().zip(x).zip(y) {
            *sum = f32::from_bits(vdpbf16ps(sum.to_bits(), x.to_bits(), y.to_bits()));
        }
        F32s::load(Portable, &sums)
    }
}

impl Matrix for Emulated {
    type Isa = Portable;

    #[inline(always)]
    fn isa(self) -> Portable {
        Portable
    }

    #[inline(always)]
    fn neighbours(self, low: F32s, high: F32s) -> F32s {
        let [low, high] = [low, high].map(bits);
        let all: Vec<u32> = low.into_iter().chain(high).collect();
        let mut words = [0.0; F32s::N];
        words
            .iter_mut()
            .zip(all.as_chunks().0)
            .for_each(|(to, [even, odd])| *to = word(*even, *odd));
        F32s::load(Portable, &words)
    }

    #[inline(always)]
    fn stacked(self, even: F32s, odd: F32s) -> F32s {
        let [even, odd] = [even, odd].map(bits);
        let mut words = [0.0; F32s::N];
        words
            .iter_mut()
            .zip(even.into_iter().zip(odd))
            .for_each(|(to, (even, odd))| *to = word(even, odd));
        F32s::load(Portable, &words)
    }

    #[inline(always)]
    fn split(self, x: F32s) -> [F32s; 2] {
        let mut all = [0.0; F32s::N];
        x.store(&mut all);
        let high = all.map(|x| f32::from_bits(x.to_bits() & CUT));
        let rest: [f32; F32s::N] =
            std::array::from_fn(|n| if all[n].is_finite() { all[n] - high[n] } else { 0.0 });
        [high, rest].map(|x| F32s::load(Portable, &x))
    }

    #[inline(always)]
    fn zipped(self, even: F32s, odd: F32s) -> [F32s; 2] {
        let [mut x, mut y] = [[0.0; F32s::N]; 2];
        even.store(&mut x);
        odd.store(&mut y);
        [0, F32s::N].map(|first| {
            let bits = |words: &[f32], at: usize| element(words[at / 2], at % 2).to_bits() >> 16;
            let words: [f32; F32s::N] =
                std::array::from_fn(|n| word(bits(&x, first + n), bits(&y, first + n)));
            F32s::load(Portable, &words)
        })
    }

    #[inline(always)]
    fn halves(self, words: F32s) -> [F32s; 2] {
        let mut all = [0.0; F32s::N];
        words.store(&mut all);
        [0, 1].map(|odd| F32s::load(Portable, &all.map(|word| element(word, odd))))
    }

    fn turn(self, from: &[f32], to: &mut [f32]) {
        for (at, &word) in from[..WORDS].iter().enumerate() {
            to[at % SIDE * SIDE + at / SIDE] = word;
        }
    }

    fn multiply(self, product: Product<'_>) {
        match self {
            Emulated::Pairs => multiply_pairs(self, product),
            Emulated::Tiles => multiply_tiles(product),
        }
    }

    fn spin(self, rounds: usize) -> usize {
        spin_pairs(self, rounds)
    }
}

/// The elements of a register in bf16.
fn bits(x: F32s) -> [u32; F32s::N] {
    let mut all = [0.0; F32s::N];
    x.store(&mut all);
    all.map(rounded_or_flushed)
}

/// The bits of x in bf16, rounded to the nearest even; a NaN is quiet.
fn rounded(x: f32) -> u32 {
    let bits = x.to_bits();
    let size = (bits & 0x7fff_ffff) + 0x7fff + (bits >> 16 & 1);
    let rounded = size | bits & 0x8000_0000;
    (if x.is_nan() { bits | 0x0040_0000 } else { rounded }) >> 16
}

/// The same, and zero of its sign for a subnormal number.
fn rounded_or_flushed(x: f32) -> u32 {
    rounded(if x.is_subnormal() { 0.0f32.copysign(x) } else { x })
}

/// A product of tiles by `tdpbf16ps`.
fn multiply_tiles(product: Product<'_>) {
    product.check();
    let Product { c, stride, fresh, a, b, rows, cols, depth } = product;
    for (row, col) in (0..rows * SIDE).flat_map(|row| (0..cols * SIDE).map(move |col| (row, col))) {
        let c = &mut c[row * stride + col];
        let mut sum = if fresh { 0 } else { c.to_bits() };
        for k in 0..depth {
            let left = (row / SIDE * a.steps[0] + k * a.steps[1]) * WORDS + row % SIDE * SIDE;
            let right = (col / SIDE * b.steps[0] + k * b.steps[1]) * WORDS + col % SIDE;
            let left: [u32; SIDE] = std::array::from_fn(|pair| a.words[left + pair].to_bits());
            let right: [u32; SIDE] =
                std::array::from_fn(|pair| b.words[right + pair * SIDE].to_bits());
            sum = tdpbf16ps(sum, &left, &right);
        }
        *c = f32::from_bits(sum);
    }
}

#[cfg(test)]
mod cases;
#[cfg(all(test, target_arch = "x86_64"))]
mod hardware;
#[cfg(test)]
mod tests;
