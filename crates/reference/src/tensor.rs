//! Tensors as rows: contiguous operands, outputs that can be had, and the arithmetic of rows.

use crate::scalar::{Dual, Real};
use etalon_problem::Error;
use ndarray::{Array, ArrayView, ArrayView3, ArrayView4, Axis, Dimension, IxDyn};
use std::borrow::Cow;

/// An operand `[batch, heads, rows, width]` in row-major order, or one that is zero everywhere.
pub(crate) struct Rows<'a, T: Clone> {
    data: Cow<'a, [T]>,
    heads: usize,
    rows: usize,
    width: usize,
    /// From one row to the next: `width`, or 0 where a single row stands for all.
    stride: usize,
}

impl<'a, T: Real> Rows<'a, T> {
    /// The operand itself where it lies in row-major order, else a copy of it.
    pub fn new(name: &str, view: ArrayView4<'a, T>) -> Result<Self, Error> {
        let (_, heads, rows, width) = view.dim();
        let data = match view.to_slice() {
            Some(slice) => Cow::Borrowed(slice),
            None => {
                let mut copy = reserve(&format!("a contiguous copy of `{name}`"), view.len())?;
                copy.extend(view.iter().copied());
                Cow::Owned(copy)
            }
        };
        Ok(Rows { data, heads, rows, width, stride: width })
    }

    /// An operand that counts as zero where it is absent.
    pub fn or_zero(
        name: &str,
        view: &'a Option<ArrayView4<'_, T>>,
        width: usize,
    ) -> Result<Self, Error> {
        match view {
            Some(view) => Rows::new(name, view.view()),
            None => Rows::zero(width),
        }
    }

    fn zero(width: usize) -> Result<Self, Error> {
        let data = Cow::Owned(filled("a row of zeros", width, T::ZERO)?);
        Ok(Rows { data, heads: 0, rows: 0, width, stride: 0 })
    }

    /// As [`Rows::or_zero`], for an operand with one number per query.
    pub fn scalars(name: &str, view: &'a Option<ArrayView3<'_, T>>) -> Result<Self, Error> {
        match view {
            Some(view) => Rows::new(name, view.view().insert_axis(Axis(3))),
            None => Rows::zero(1),
        }
    }

    /// The rows of one head from `start` on.
    pub fn matrix(&self, batch: usize, head: usize, start: usize) -> Matrix<'_, T> {
        let first = ((batch * self.heads + head) * self.rows + start) * self.stride;
        Matrix { data: &self.data[first..], width: self.width, stride: self.stride }
    }
}

/// The rows of one head in one sequence.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, T> {
    data: &'a [T],
    width: usize,
    stride: usize,
}

impl<'a, T: Real> Matrix<'a, T> {
    /// Row `i`.
    pub fn row(&self, i: usize) -> &'a [T] {
        &self.data[i * self.stride..][..self.width]
    }

    /// Row `i` of an operand with one number per row.
    pub fn scalar(&self, i: usize) -> T {
        self.data[i * self.stride]
    }
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

/// A result while it is being written.
pub(crate) struct Output<T> {
    name: &'static str,
    shape: Vec<usize>,
    data: Vec<T>,
}

impl<T: Real> Output<T> {
    /// As [`Output::new`], with zeros.
    pub fn zeros(name: &'static str, shape: &[usize]) -> Result<Self, Error> {
        Output::new(name, shape, T::ZERO)
    }
}

impl<T: Clone> Output<T> {
    /// A result that holds `fill` until it is written.
    pub fn new(name: &'static str, shape: &[usize], fill: T) -> Result<Self, Error> {
        let elements = shape.iter().product();
        let data = filled(&format!("the result `{name}`"), elements, fill)?;
        Ok(Output { name, shape: shape.to_vec(), data })
    }
}

impl<T> Output<T> {
    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// Every element, in row-major order.
    pub fn elements(&mut self) -> &mut [T] {
        &mut self.data
    }

    /// The rows of every head in every stretch of rows, disjoint, ordered by stretch, then head.
    /// A stretch is (batch element, first row, number of rows); they ascend.
    pub fn split(
        &mut self,
        stretches: &[(usize, usize, usize)],
    ) -> impl Iterator<Item = MatrixMut<'_, T>> + use<'_, T> {
        let (heads, rows) = (self.shape[1], self.shape[2]);
        let width = self.shape.get(3).copied().unwrap_or(1);
        let mut split: Vec<Vec<MatrixMut<'_, T>>> = Vec::new();
        split.resize_with(stretches.len(), Vec::new);
        let mut rest = self.data.as_mut_slice();
        let (mut position, mut done) = (0, 0);
        for batch in stretches.chunk_by(|a, b| a.0 == b.0) {
            for head in 0..heads {
                for (offset, &(element, start, length)) in batch.iter().enumerate() {
                    let begin = (element * heads + head) * rows + start;
                    let (_, tail) = rest.split_at_mut((begin - position) * width);
                    let (data, tail) = tail.split_at_mut(length * width);
                    split[done + offset].push(MatrixMut { data, width });
                    (rest, position) = (tail, begin + length);
                }
            }
            done += batch.len();
        }
        split.into_iter().flatten()
    }

    /// The finished result.
    pub fn finish<D: Dimension>(self) -> Result<Array<T, D>, Error> {
        let Output { name, shape, data } = self;
        let found = vec![data.len()];
        Array::from_shape_vec(IxDyn(&shape), data)
            .and_then(Array::into_dimensionality)
            .map_err(|_| Error::Shape { operand: name.to_string(), expected: shape, found })
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

fn shaped<T, D: Dimension>(name: &str, shape: D, data: Vec<T>) -> Result<Array<T, D>, Error> {
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

/// y += a x
pub(crate) fn add_scaled<T: Real>(y: &mut [T], a: T, x: &[T]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}
