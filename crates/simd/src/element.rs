//! Element types of storage.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use ndarray::{ArrayView2, s};
use std::ops::Range;

/// A matrix of any element type: kernels read a bias through it, so that they need not be compiled
/// for every type of storage.
#[derive(Clone, Copy)]
pub enum Matrix<'a> {
    F32(ArrayView2<'a, f32>),
    Bf16(ArrayView2<'a, bf16>),
    F16(ArrayView2<'a, f16>),
}

impl Matrix<'_> {
    /// Adds the elements `cols` of row `i` to `sum`.
    pub fn add_row(&self, i: usize, cols: Range<usize>, sum: &mut [f32]) {
        fn add<T: Element>(
            rows: &ArrayView2<'_, T>,
            i: usize,
            cols: Range<usize>,
            sum: &mut [f32],
        ) {
            let row = rows.slice(s![i, cols]);
            let Some(row) = row.as_slice() else {
                sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x.to_f32());
                return;
            };
            let mut part = [0.0; 64];
            for (sum, row) in sum.chunks_mut(64).zip(row.chunks(64)) {
                let part = &mut part[..row.len()];
                T::read(row, part);
                sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += *x);
            }
        }
        match self {
            Matrix::F32(rows) => add(rows, i, cols, sum),
            Matrix::Bf16(rows) => add(rows, i, cols, sum),
            Matrix::F16(rows) => add(rows, i, cols, sum),
        }
    }
}

mod sealed {
    use super::{ArrayView2, Matrix, bf16, f16};

    pub trait Sealed: Sized + bytemuck::Zeroable {
        fn matrix(rows: ArrayView2<'_, Self>) -> Matrix<'_>;
    }
    impl Sealed for f32 {
        fn matrix(rows: ArrayView2<'_, f32>) -> Matrix<'_> {
            Matrix::F32(rows)
        }
    }
    impl Sealed for bf16 {
        fn matrix(rows: ArrayView2<'_, bf16>) -> Matrix<'_> {
            Matrix::Bf16(rows)
        }
    }
    impl Sealed for f16 {
        fn matrix(rows: ArrayView2<'_, f16>) -> Matrix<'_> {
            Matrix::F16(rows)
        }
    }
}

/// A type in which tensors are stored: f32, bf16 or f16. Every sum is f32 whatever it is.
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + 'static {
    /// The type's name.
    const DTYPE: etalon_problem::Dtype;
    /// Zero.
    const ZERO: Self;
    /// Exactly.
    fn to_f32(self) -> f32;
    /// To the nearest, ties to even.
    fn from_f32(x: f32) -> Self;
    /// `row` = `source`, of the same length.
    fn read(source: &[Self], row: &mut [f32]);
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
    fn read(source: &[Self], row: &mut [f32]) {
        row.copy_from_slice(source);
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
    fn read(source: &[Self], row: &mut [f32]) {
        source.convert_to_f32_slice(row);
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
    fn read(source: &[Self], row: &mut [f32]) {
        source.convert_to_f32_slice(row);
    }
}
