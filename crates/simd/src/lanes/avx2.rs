//! AVX2 with FMA: 16 registers of 8 f32.

use super::{Isa, Kernel, Lanes};
use crate::tile::Registers;
use std::arch::x86_64::*;
use std::ops::{Add, Div, Mul, Sub};

/// The token of AVX2 and FMA.
#[derive(Clone, Copy, Debug)]
pub struct Avx2(());

/// One register. A value exists only where AVX2 and FMA do.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct F32x8(__m256);

impl Isa for Avx2 {
    type F32 = F32x8;
    // 12 sums, a row of 2 registers and a factor: 15 of 16.
    type Tile = Registers<F32x8, 6, 2>;
}

impl Avx2 {
    /// The token, if this CPU has AVX2 and FMA.
    pub fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Avx2(()))
    }

    /// Runs a kernel with AVX2 and FMA enabled: the one gate into this instruction set.
    #[inline]
    pub fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma")]
        fn gate<K: Kernel>(isa: Avx2, kernel: K) -> K::Output {
            kernel.run(isa)
        }
        // SAFETY: an `Avx2` exists only where `detect` saw these features.
        unsafe { gate(self, kernel) }
    }
}

/// The body becomes a function with the features enabled, in which the intrinsics are safe.
macro_rules! op {
    (($($arg:ident: $ty:ty),*) -> $ret:ty $body:block) => {{
        #[target_feature(enable = "avx2,fma")]
        #[inline]
        fn op($($arg: $ty),*) -> $ret $body
        // SAFETY: a token or a register of this set is in hand, so its features are present.
        unsafe { op($($arg),*) }
    }};
}

macro_rules! operator {
    ($($trait:ident $method:ident $intrinsic:ident),*) => { $(
        impl $trait for F32x8 {
            type Output = Self;
            #[inline(always)]
            fn $method(self, b: Self) -> Self {
                let a = self;
                op!((a: F32x8, b: F32x8) -> F32x8 { F32x8($intrinsic(a.0, b.0)) })
            }
        }
    )* };
}
operator!(Add add _mm256_add_ps, Sub sub _mm256_sub_ps, Mul mul _mm256_mul_ps, Div div _mm256_div_ps);

impl Lanes for F32x8 {
    type Isa = Avx2;
    const N: usize = 8;

    #[inline(always)]
    fn splat(_: Avx2, x: f32) -> Self {
        op!((x: f32) -> F32x8 { F32x8(_mm256_set1_ps(x)) })
    }

    #[inline(always)]
    fn load(isa: Avx2, x: &[f32]) -> Self {
        let x = &x[..8];
        // SAFETY: 8 elements, by the slicing above.
        unsafe { Self::load_at(isa, x.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, x: &mut [f32]) {
        let x = &mut x[..8];
        let (a, x) = (self, x.as_mut_ptr());
        op!((a: F32x8, x: *mut f32) -> () {
            // SAFETY: 8 elements, by the slicing above.
            unsafe { _mm256_storeu_ps(x, a.0) }
        })
    }

    #[inline(always)]
    unsafe fn load_at(_: Avx2, x: *const f32) -> Self {
        op!((x: *const f32) -> F32x8 {
            // SAFETY: the caller vouches for 8 readable elements.
            F32x8(unsafe { _mm256_loadu_ps(x) })
        })
    }

    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        let a = self;
        op!((a: F32x8, b: F32x8, c: F32x8) -> F32x8 { F32x8(_mm256_fmadd_ps(a.0, b.0, c.0)) })
    }

    #[inline(always)]
    fn max(self, b: Self) -> Self {
        let a = self;
        op!((a: F32x8, b: F32x8) -> F32x8 { F32x8(_mm256_max_ps(a.0, b.0)) })
    }

    #[inline(always)]
    fn round(self) -> Self {
        let a = self;
        op!((a: F32x8) -> F32x8 {
            F32x8(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a.0))
        })
    }

    #[inline(always)]
    fn mul_pow2(self, n: Self) -> Self {
        let a = self;
        op!((a: F32x8, n: F32x8) -> F32x8 {
            let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.0), _mm256_set1_epi32(127));
            F32x8(_mm256_mul_ps(a.0, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))))
        })
    }

    #[inline(always)]
    fn select_less(self, limit: Self, yes: Self, no: Self) -> Self {
        let a = self;
        op!((a: F32x8, limit: F32x8, yes: F32x8, no: F32x8) -> F32x8 {
            F32x8(_mm256_blendv_ps(no.0, yes.0, _mm256_cmp_ps::<_CMP_LT_OQ>(a.0, limit.0)))
        })
    }

    #[inline(always)]
    fn reduce_max(self) -> f32 {
        let a = self;
        op!((a: F32x8) -> f32 {
            let a = _mm_max_ps(_mm256_castps256_ps128(a.0), _mm256_extractf128_ps::<1>(a.0));
            let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)))
        })
    }

    #[inline(always)]
    fn reduce_add(self) -> f32 {
        let a = self;
        op!((a: F32x8) -> f32 {
            let a = _mm_add_ps(_mm256_castps256_ps128(a.0), _mm256_extractf128_ps::<1>(a.0));
            let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
        })
    }
}
