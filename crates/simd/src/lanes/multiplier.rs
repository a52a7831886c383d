//! Tiles of bf16 beside the registers of AVX-512, multiplied by `tdpbf16ps` of AMX or by `vdpbf16ps`. The words of
//! AVX-512 BW, which every CPU with AVX-512 BF16 has, come into their order by `vpermw`.

use super::amx::Tiled;
use super::avx512::{Avx512, F32x16};
use super::avx512bf16::Avx512Bf16;
use super::matrix::{CUT, Matrix, MatrixKernel, Product, multiply_pairs, spin_pairs};
use super::pairs::Pairs;
use std::arch::x86_64::*;
use std::mem::transmute;

/// The token of either instruction: one type, so that a kernel is compiled once for both.
#[derive(Clone, Copy)]
pub struct Multiplier<'a> {
    pairs: Avx512Bf16,
    tiles: Option<Tiled<'a>>,
}

impl<'a> Multiplier<'a> {
    /// The token of tiles that are configured, or of pairs.
    pub fn new(pairs: Avx512Bf16, tiles: Option<Tiled<'a>>) -> Self {
        Multiplier { pairs, tiles }
    }

    /// Runs a kernel with the features enabled.
    #[inline]
    pub fn enter<T>(self, kernel: impl MatrixKernel<T>) -> T {
        #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
        fn gate<T>(by: Multiplier<'_>, kernel: impl MatrixKernel<T>) -> T {
            kernel.run(by)
        }
        // SAFETY: a token of pairs exists only where `detect` saw the features.
        unsafe { gate(self, kernel) }
    }
}

/// Places of words that lie in two halves, those of both in turns.
const TURNS: [u16; 32] = {
    let mut places = [0; 32];
    let mut at = 0;
    while at < 32 {
        places[at] = (at / 2 + at % 2 * 16) as u16;
        at += 1;
    }
    places
};

impl Matrix for Multiplier<'_> {
    type Isa = Avx512;

    #[inline(always)]
    fn isa(self) -> Avx512 {
        Pairs::isa(self.pairs)
    }

    #[inline(always)]
    fn neighbours(self, low: F32x16, high: F32x16) -> F32x16 {
        #[target_feature(enable = "avx512f,avx512bf16")]
        #[inline]
        fn op(low: __m512, high: __m512) -> __m512 {
            // SAFETY: 64 bytes that any f32 may have.
            unsafe { transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(high, low)) }
        }
        // SAFETY: a token is in hand, so the features are present.
        F32x16(unsafe { op(low.0, high.0) })
    }

    #[inline(always)]
    fn stacked(self, even: F32x16, odd: F32x16) -> F32x16 {
        #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
        #[inline]
        fn op(even: __m512, odd: __m512) -> __m512 {
            // SAFETY: both are 64 bytes, of which any are words and any are f32.
            unsafe {
                let places = transmute::<[u16; 32], __m512i>(TURNS);
                let halves = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(odd, even));
                _mm512_castsi512_ps(_mm512_permutexvar_epi16(places, halves))
            }
        }
        // SAFETY: a token is in hand, so the features are present.
        F32x16(unsafe { op(even.0, odd.0) })
    }

    #[inline(always)]
    fn split(self, x: F32x16) -> [F32x16; 2] {
        #[target_feature(enable = "avx512f")]
        #[inline]
        fn op(x: __m512) -> [__m512; 2] {
            let digits = _mm512_set1_epi32(CUT as i32);
            let high = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), digits));
            let infinity = _mm512_set1_ps(f32::INFINITY);
            let finite = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(_mm512_abs_ps(x), infinity);
            [high, _mm512_maskz_sub_ps(finite, x, high)]
        }
        // SAFETY: a token is in hand, so the features are present.
        unsafe { op(x.0) }.map(F32x16)
    }

    #[inline(always)]
    fn multiply(self, product: Product<'_>) {
        #[target_feature(enable = "avx512f,avx512bf16")]
        #[inline(never)]
        fn gate(pairs: Avx512Bf16, product: Product<'_>) {
            multiply_pairs(pairs, product);
        }
        match self.tiles {
            Some(tiles) => tiles.gate(product),
            // SAFETY: a token is in hand, so the features are present.
            None => unsafe { gate(self.pairs, product) },
        }
    }

    #[inline(always)]
    fn spin(self, rounds: usize) -> usize {
        match self.tiles {
            Some(tiles) => tiles.spin(rounds),
            None => spin_pairs(self.pairs, rounds),
        }
    }
}
