//! AVX-512 F: 32 registers of 16 f32.

use super::{Isa, Kernel, Lanes};
use crate::tile::Registers;
use std::arch::x86_64::*;
use std::ops::{Add, Div, Mul, Sub};

/// The token of AVX-512 F.
#[derive(Clone, Copy, Debug)]
pub struct Avx512(());

/// One register. A value exists only where AVX-512 F does.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct F32x16(__m512);

impl Isa for Avx512 {
    type F32 = F32x16;
    // 24 sums, a row of 2 registers and a factor: 27 of 32.
    type Tile = Registers<F32x16, 12, 2>;
}

impl Avx512 {
    /// The token, if this CPU has AVX-512 F.
    pub fn detect() -> Option<Self> {
        is_x86_feature_detected!("avx512f").then_some(Avx512(()))
    }

    /// Runs a kernel with AVX-512 F enabled: the one gate into this instruction set.
    #[inline]
    pub fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx512f")]
        fn gate<K: Kernel>(isa: Avx512, kernel: K) -> K::Output {
            kernel.run(isa)
        }
        // SAFETY: an `Avx512` exists only where `detect` saw this feature.
        unsafe { gate(self, kernel) }
    }
}

/// The body becomes a function with the feature enabled, in which the intrinsics are safe.
macro_rules! op {
    (($($arg:ident: $ty:ty),*) -> $ret:ty $body:block) => {{
        #[target_feature(enable = "avx512f")]
        #[inline]
        fn op($($arg: $ty),*) -> $ret $body
        // SAFETY: a token or a register of this set is in hand, so its feature is present.
        unsafe { op($($arg),*) }
    }};
}

macro_rules! operator {
    ($($trait:ident $method:ident $intrinsic:ident),*) => { $(
        impl $trait for F32x16 {
            type Output = Self;
            #[inline(always)]
            fn $method(self, b: Self) -> Self {
                let a = self;
                op!((a: F32x16, b: F32x16) -> F32x16 { F32x16($intrinsic(a.0, b.0)) })
            }
        }
    )* };
}
operator!(Add add _mm512_add_ps, Sub sub _mm512_sub_ps, Mul mul _mm512_mul_ps, Div div _mm512_div_ps);

impl Lanes for F32x16 {
    type Isa = Avx512;
    const N: usize = 16;

    #[inline(always)]
    fn splat(_: Avx512, x: f32) -> Self {
        op!((x: f32) -> F32x16 { F32x16(_mm512_set1_ps(x)) })
    }

    #[inline(always)]
    fn load(isa: Avx512, x: &[f32]) -> Self {
        let x = &x[..16];
        // SAFETY: 16 elements, by the slicing above.
        unsafe { Self::load_at(isa, x.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, x: &mut [f32]) {
        let x = &mut x[..16];
        let (a, x) = (self, x.as_mut_ptr());
        op!((a: F32x16, x: *mut f32) -> () {
            // SAFETY: 16 elements, by the slicing above.
            unsafe { _mm512_storeu_ps(x, a.0) }
        })
    }

    #[inline(always)]
    unsafe fn load_at(_: Avx512, x: *const f32) -> Self {
        op!((x: *const f32) -> F32x16 {
            // SAFETY: the caller vouches for 16 readable elements.
            F32x16(unsafe { _mm512_loadu_ps(x) })
        })
    }

    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        let a = self;
        op!((a: F32x16, b: F32x16, c: F32x16) -> F32x16 {
            F32x16(_mm512_fmadd_ps(a.0, b.0, c.0))
        })
    }

    #[inline(always)]
    fn max(self, b: Self) -> Self {
        let a = self;
        op!((a: F32x16, b: F32x16) -> F32x16 { F32x16(_mm512_max_ps(a.0, b.0)) })
    }

    #[inline(always)]
    fn round(self) -> Self {
        let a = self;
        op!((a: F32x16) -> F32x16 {
            F32x16(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a.0))
        })
    }

    #[inline(always)]
    fn mul_pow2(self, n: Self) -> Self {
        let a = self;
        op!((a: F32x16, n: F32x16) -> F32x16 {
            // Not-or-equal lets a NaN pass; at −127 the mask writes the zero.
            let normal = _mm512_cmp_ps_mask::<_CMP_NLE_UQ>(n.0, _mm512_set1_ps(-127.0));
            F32x16(_mm512_maskz_scalef_ps(normal, a.0, n.0))
        })
    }

    #[inline(always)]
    fn select_less(self, limit: Self, yes: Self, no: Self) -> Self {
        let a = self;
        op!((a: F32x16, limit: F32x16, yes: F32x16, no: F32x16) -> F32x16 {
            let less = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a.0, limit.0);
            F32x16(_mm512_mask_blend_ps(less, no.0, yes.0))
        })
    }

    #[inline(always)]
    fn reduce_max(self) -> f32 {
        let a = self;
        op!((a: F32x16) -> f32 { _mm512_reduce_max_ps(a.0) })
    }

    #[inline(always)]
    fn reduce_add(self) -> f32 {
        let a = self;
        op!((a: F32x16) -> f32 { _mm512_reduce_add_ps(a.0) })
    }
}
