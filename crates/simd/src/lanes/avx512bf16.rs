//! AVX-512 BF16: the registers of AVX-512 F, multiplied as 16 pairs of bf16 by `vdpbf16ps`, and rounded to bf16. The
//! words of AVX-512 BW, which every CPU with it has, come into their order by `vpermw`.

use super::amx::Tiled;
use super::avx512::{Avx512, F32x16};
use super::matrix::{Matrix, MatrixKernel, Product, multiply_pairs};
use super::pairs::Pairs;
use std::arch::x86_64::*;
use std::mem::transmute;

/// The token of avx512f, avx512bw and avx512bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx512Bf16(Avx512);

impl Avx512Bf16 {
    /// The token, if this CPU has the features.
    pub fn detect() -> Option<Self> {
        let isa = Avx512::detect()?;
        let words = is_x86_feature_detected!("avx512bw");
        (words && is_x86_feature_detected!("avx512bf16")).then_some(Avx512Bf16(isa))
    }

    /// True if this CPU multiplies pairs faster than f32. A Zen 4 takes half of the time, as was measured; a
    /// Xeon of 2023 as long for a pair as for two f32 twice.
    pub fn is_fast() -> bool {
        let vendor = raw_cpuid::CpuId::new().get_vendor_info();
        vendor.is_some_and(|vendor| vendor.as_str() == "AuthenticAMD")
    }

    /// Runs a kernel of tiles with the features enabled: products by tiles that are configured, or by pairs.
    #[inline]
    pub fn enter<T>(self, tiles: Option<Tiled>, kernel: impl MatrixKernel<T>) -> T {
        #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
        fn gate<T>(by: Multiplier, kernel: impl MatrixKernel<T>) -> T {
            kernel.run(by)
        }
        // SAFETY: a token exists only where `detect` saw the features.
        unsafe { gate(Multiplier { pairs: self, tiles }, kernel) }
    }
}

/// The registers of AVX-512 beside either instruction that multiplies tiles: one token, so that a kernel is compiled
/// once for both.
#[derive(Clone, Copy)]
pub struct Multiplier {
    pairs: Avx512Bf16,
    tiles: Option<Tiled>,
}

impl Pairs for Avx512Bf16 {
    type Isa = Avx512;

    #[inline(always)]
    fn isa(self) -> Avx512 {
        self.0
    }

    #[inline(always)]
    fn add(self, a: F32x16, b: F32x16, sum: F32x16) -> F32x16 {
        #[target_feature(enable = "avx512f,avx512bf16")]
        #[inline]
        fn op(a: __m512, b: __m512, sum: __m512) -> __m512 {
            // SAFETY: both are 64 bytes, of which any are pairs.
            let [a, b] = unsafe { transmute::<[__m512; 2], [__m512bh; 2]>([a, b]) };
            _mm512_dpbf16_ps(sum, a, b)
        }
        // SAFETY: a token is in hand, so the features are present.
        F32x16(unsafe { op(a.0, b.0, sum.0) })
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

impl Matrix for Multiplier {
    type Isa = Avx512;

    #[inline(always)]
    fn isa(self) -> Avx512 {
        self.pairs.0
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
}
