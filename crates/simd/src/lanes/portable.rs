//! The baseline that every CPU of the target has, by the crate `wide`: SSE2 on x86-64, NEON on aarch64,
//! simd128 on wasm. `wide` chooses when it is compiled, not when it runs; that is why the wider sets have
//! files of their own.

use super::{Isa, Lanes};
use crate::tile::Registers;
use std::ops::{Add, Div, Mul, Sub};
use wide::{f32x8, i32x8};

/// The token of the baseline: always present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Portable;

/// Eight f32, in as many registers as they take.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct F32s(f32x8);

impl Isa for Portable {
    type F32 = F32s;
    // 4 × 8 sums take 8 of the 16 registers of SSE2; a row and its factor take 3 more.
    type Tile = Registers<F32s, 4, 1>;
    type Short = Self::Tile;
}

macro_rules! operator {
    ($($trait:ident $method:ident $op:tt),*) => { $(
        impl $trait for F32s {
            type Output = Self;
            #[inline(always)]
            fn $method(self, b: Self) -> Self {
                F32s(self.0 $op b.0)
            }
        }
    )* };
}
operator!(Add add +, Sub sub -, Mul mul *, Div div /);

impl Lanes for F32s {
    type Isa = Portable;
    const N: usize = 8;
    const FLUSHES: bool = false;
    // As `wide` chooses.
    const FUSES: bool = cfg!(any(
        all(target_feature = "avx", target_feature = "fma"),
        all(target_arch = "aarch64", target_feature = "neon")
    ));

    #[inline(always)]
    fn splat(_: Portable, x: f32) -> Self {
        F32s(f32x8::splat(x))
    }

    #[inline(always)]
    fn load(_: Portable, x: &[f32]) -> Self {
        let x: [f32; 8] = x[..8].try_into().expect("a slice of 8 is an array of 8");
        F32s(f32x8::new(x))
    }

    #[inline(always)]
    fn store(self, x: &mut [f32]) {
        x[..8].copy_from_slice(&self.0.to_array());
    }

    #[inline(always)]
    unsafe fn load_at(_: Portable, x: *const f32) -> Self {
        // SAFETY: the caller vouches for 8 readable elements; an array of f32 has f32's alignment.
        F32s(f32x8::new(unsafe { *x.cast::<[f32; 8]>() }))
    }

    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        F32s(self.0.mul_add(b.0, c.0))
    }

    #[inline(always)]
    fn max(self, b: Self) -> Self {
        // Written as a selection: `wide`'s maxima differ between targets where a NaN is involved.
        F32s(b.0.simd_lt(self.0).select(self.0, b.0))
    }

    #[inline(always)]
    fn mul_sub(self, b: Self, c: Self) -> Self {
        F32s(self.0.mul_sub(b.0, c.0))
    }

    #[inline(always)]
    fn mul_pow2(self, n: Self) -> Self {
        let bits: i32x8 = (n.0.fast_round_int() + i32x8::splat(127)) << 23;
        F32s(self.0 * f32x8::new(bits.to_array().map(|bits| f32::from_bits(bits as u32))))
    }

    #[inline(always)]
    fn select_less(self, limit: Self, yes: Self, no: Self) -> Self {
        F32s(self.0.simd_lt(limit.0).select(yes.0, no.0))
    }

    #[inline(always)]
    fn reduce_max(self) -> f32 {
        super::halve(self.0.to_array(), f32::max)
    }

    #[inline(always)]
    fn reduce_add(self) -> f32 {
        super::halve(self.0.to_array(), |a, b| a + b)
    }
}
