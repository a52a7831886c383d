//! AVX-512 BF16: the registers of AVX-512 F, multiplied as 16 pairs of bf16 by `vdpbf16ps`.

use super::avx512::{Avx512, F32x16};
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
