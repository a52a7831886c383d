//! Tensors as rows: contiguous operands, results that can be had, and the arithmetic of rows.

use crate::scalar::{Dual, Real};
use etalon_problem::Error;
use ndarray::{Array, ArrayView, Dimension, IntoDimension};
use std::borrow::Cow;

/// An operand as rows in the order of its arrays, or one that is zero everywhere.
pub(crate) struct Rows<'a, T: Clone> {
    data: Cow<'a, [T]>,
    width: usize,
    /// From one row to the next: `width`, or 0 where a single row stands for all.
    stride: usize,
}

impl<'a, T: Real> Rows<'a, T> {
    /// An operand whose last axis is a row.
    pub fn new<D: Dimension>(name: &str, view: ArrayView<'a, T, D>) -> Result<Self, Error> {
        let width = view.shape().last().copied().unwrap_or(1);
        Ok(Rows { data: contiguous(name, view)?, width, stride: width })
    }

    /// An operand with rows of `width` elements that counts as zero where it is absent.
    pub fn or_zero<D: Dimension>(
        name: &str,
        view: &'a Option<ArrayView<'_, T, D>>,
        width: usize,
    ) -> Result<Self, Error> {
        let (data, stride) = match view {
            Some(view) => (contiguous(name, view.view())?, width),
            None => (Cow::Owned(filled("a row of zeros", width, T::ZERO)?), 0),
        };
        Ok(Rows { data, width, stride })
    }

    /// The row at a place in the arrays.
    pub fn row(&self, place: usize) -> &[T] {
        &self.data[place * self.stride..][..self.width]
    }

    /// The number at a place of an operand with rows of one number.
    pub fn scalar(&self, place: usize) -> T {
        self.data[place * self.stride]
    }
}

/// The elements of an operand where they lie in row-major order, else a copy of them.
pub(crate) fn contiguous<'a, T: Real, D: Dimension>(
    name: &str,
    view: ArrayView<'a, T, D>,
) -> Result<Cow<'a, [T]>, Error> {
    if let Some(slice) = view.to_slice() {
        return Ok(Cow::Borrowed(slice));
    }
    let mut copy = reserve(&format!("a contiguous copy of `{name}`"), view.len())?;
    copy.extend(view.iter().copied());
    Ok(Cow::Owned(copy))
}

/// The rows of a result in one head of one sequence.
pub(crate) struct MatrixMut<'a, T> {
    data: &'a mut [T],
    width: usize,
}

impl<T> MatrixMut<'_, T> {
    /// Row `i`.
    pub fn row(&mut self, i: usize) -> &mut [T] {
        &mut self.data[i * self.width..][..self.width]
    }
}

/// A result `[B, H, N]` or `[B, H, N, D]` as the rows of its heads.
pub(crate) struct HeadsMut<'a, T> {
    data: &'a mut [T],
    heads: usize,
    rows: usize,
    width: usize,
}

impl<'a, T> HeadsMut<'a, T> {
    pub fn new<D: Dimension>(result: &'a mut Array<T, D>) -> Self {
        let (heads, rows) = (result.shape()[1], result.shape()[2]);
        let width = result.shape().get(3).copied().unwrap_or(1);
        let data = result.as_slice_mut().expect("results lie in row-major order");
        HeadsMut { data, heads, rows, width }
    }

    /// True if it has no elements.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// The rows of every head in every stretch of rows, disjoint, ordered by stretch, then head.
    /// A stretch is (batch element, first row, number of rows); they ascend.
    pub fn split(
        self,
        stretches: &[(usize, usize, usize)],
    ) -> impl Iterator<Item = MatrixMut<'a, T>> + use<'a, T> {
        let HeadsMut { data, heads, rows, width } = self;
        // The rest of every head of every batch element; rows may have no elements.
        let mut rest: Vec<&mut [T]> = data.chunks_mut((rows * width).max(1)).collect();
        rest.resize_with(stretches.last().map_or(0, |last| last.0 + 1) * heads, Default::default);
        let mut split = Vec::new();
        for &(element, start, length) in stretches {
            for rest in &mut rest[element * heads..][..heads] {
                let before = start * width - (rows * width - rest.len());
                let _skipped = rest.split_off_mut(..before);
                let data = rest.split_off_mut(..length * width).unwrap_or_default();
                split.push(MatrixMut { data, width });
            }
        }
        split.into_iter()
    }
}

/// Room for so many elements, or an error that says what it was for.
pub(crate) fn reserve<T>(what: &str, elements: usize) -> Result<Vec<T>, Error> {
    let mut data = Vec::new();
    data.try_reserve_exact(elements).map_err(|_| Error::Memory {
        what: what.to_string(),
        bytes: elements.saturating_mul(size_of::<T>()),
    })?;
    Ok(data)
}

/// A vector of one number.
pub(crate) fn filled<T: Clone>(what: &str, elements: usize, fill: T) -> Result<Vec<T>, Error> {
    let mut data = reserve(what, elements)?;
    data.resize(elements, fill);
    Ok(data)
}

/// A result that holds `fill` until it is written.
pub(crate) fn full<T: Clone, S: IntoDimension>(
    name: &str,
    shape: S,
    fill: T,
) -> Result<Array<T, S::Dim>, Error> {
    let shape = shape.into_dimension();
    let data = filled(&format!("the result `{name}`"), shape.size(), fill)?;
    shaped(name, shape, data)
}

/// Every element with its tangent; one that is absent is 0.
pub(crate) fn with_tangent<T: Real, D: Dimension>(
    name: &str,
    value: &ArrayView<'_, T, D>,
    tangent: Option<&ArrayView<'_, T, D>>,
) -> Result<Array<Dual<T>, D>, Error> {
    let mut data = reserve(&format!("`{name}` with its tangent"), value.len())?;
    match tangent {
        Some(tangent) => data.extend(value.iter().zip(tangent).map(|(&x, &t)| Dual::new(x, t))),
        None => data.extend(value.iter().map(|&x| Dual::constant(x))),
    }
    shaped(name, value.raw_dim(), data)
}

/// The tangent of every element.
pub(crate) fn tangent_of<T: Real, D: Dimension>(
    name: &str,
    moved: Array<Dual<T>, D>,
) -> Result<Array<T, D>, Error> {
    let mut data = reserve(&format!("the result `{name}`"), moved.len())?;
    data.extend(moved.iter().map(|x| x.tangent));
    shaped(name, moved.raw_dim(), data)
}

/// The elements as a tensor of this shape.
pub(crate) fn shaped<T, D: Dimension>(
    name: &str,
    shape: D,
    data: Vec<T>,
) -> Result<Array<T, D>, Error> {
    let (expected, found) = (shape.slice().to_vec(), vec![data.len()]);
    Array::from_shape_vec(shape, data).map_err(|_| Error::Shape {
        operand: name.to_string(),
        expected,
        found,
    })
}

/// Σ x y, in eight sums that are added at the end: short chains round less, and the processor can
/// work on several at once.
pub(crate) fn dot<T: Real>(x: &[T], y: &[T]) -> T {
    let mut sums = [T::ZERO; 8];
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<8>(), y.as_chunks::<8>());
    for (x, y) in x.iter().zip(y) {
        for lane in 0..8 {
            sums[lane] += x[lane] * y[lane];
        }
    }
    for (lane, (&x, &y)) in x_rest.iter().zip(y_rest).enumerate() {
        sums[lane] += x * y;
    }
    let [a, b, c, d, e, f, g, h] = sums;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// y += x
pub(crate) fn add<T: Real>(y: &mut [T], x: &[T]) {
    y.iter_mut().zip(x).for_each(|(y, &x)| *y += x);
}

/// y += a x
pub(crate) fn add_scaled<T: Real>(y: &mut [T], a: T, x: &[T]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}
