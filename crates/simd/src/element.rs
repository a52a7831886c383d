//! Element types of storage.

use half::{bf16, f16};

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
}

/// A type in which tensors are stored: f32, bf16 or f16. Every sum is f32 whatever it is.
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// The type's name.
    const DTYPE: etalon_problem::Dtype;
    /// Zero.
    const ZERO: Self;
    /// Exactly.
    fn to_f32(self) -> f32;
    /// To the nearest, ties to even.
    fn from_f32(x: f32) -> Self;
}

impl Element for f32 {
    const DTYPE: etalon_problem::Dtype = etalon_problem::Dtype::F32;
    const ZERO: Self = 0.0;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Element for bf16 {
    const DTYPE: etalon_problem::Dtype = etalon_problem::Dtype::Bf16;
    const ZERO: Self = bf16::ZERO;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }
}

impl Element for f16 {
    const DTYPE: etalon_problem::Dtype = etalon_problem::Dtype::F16;
    const ZERO: Self = f16::ZERO;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }
}
