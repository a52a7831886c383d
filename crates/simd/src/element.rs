//! Element types of storage, and tensors whose element type is known only when the program runs.
//!
//! Kernels compute in f32 whatever the storage type. Their host code reads operands through
//! [`Tensor`] and writes results through [`TensorMut`], which ask for the element type once for each
//! block of rows: so no pass is compiled for every type of storage.

use crate::Level;
use crate::lanes::prefetch::{Lines, prefetch};
use crate::lanes::{Isa, Kernel};
use etalon_problem::{Dtype, Error, Scalar};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use ndarray::{
    ArrayBase, ArrayView, ArrayView1, ArrayViewMut, ArrayViewMut1, Axis, Dimension, Ix0, Ix1, Ix2,
    Ix3, Ix4, RemoveAxis, SliceArg, ViewRepr, s,
};
use std::ops::Range;

/// [`ArrayView`], with its element type spelled out: so that what holds it is covariant.
pub type View<'a, T, D> = ArrayBase<ViewRepr<&'a T>, D, T>;

/// [`ArrayViewMut`], likewise.
type ViewMut<'a, T, D> = ArrayBase<ViewRepr<&'a mut T>, D, T>;

/// A borrowed tensor of any element type and any strides, to be read.
#[derive(Debug, Clone, Copy)]
pub enum Tensor<'a, D: Dimension> {
    /// Of f32.
    F32(View<'a, f32, D>),
    /// Of bf16.
    Bf16(View<'a, bf16, D>),
    /// Of f16.
    F16(View<'a, f16, D>),
}

/// A borrowed tensor of any element type and any strides, to be written.
#[derive(Debug)]
pub enum TensorMut<'a, D: Dimension> {
    /// Of f32.
    F32(ViewMut<'a, f32, D>),
    /// Of bf16.
    Bf16(ViewMut<'a, bf16, D>),
    /// Of f16.
    F16(ViewMut<'a, f16, D>),
}

/// `$body`, with `$x` the view in a tensor, whatever its element type.
macro_rules! typed {
    ($tensor:expr, $x:pat => $body:expr) => {
        match $tensor {
            Self::F32($x) => $body,
            Self::Bf16($x) => $body,
            Self::F16($x) => $body,
        }
    };
}

impl<'a, T: Element, D: Dimension> From<ArrayView<'a, T, D>> for Tensor<'a, D> {
    fn from(view: ArrayView<'a, T, D>) -> Self {
        T::tensor(view)
    }
}

impl<'a, T: Element, D: Dimension> From<ArrayViewMut<'a, T, D>> for TensorMut<'a, D> {
    fn from(view: ArrayViewMut<'a, T, D>) -> Self {
        T::tensor_mut(view)
    }
}

impl<'a, D: Dimension> Tensor<'a, D> {
    /// Its element type.
    pub fn dtype(&self) -> Dtype {
        fn of<T: Element, D>(_: &ArrayView<'_, T, D>) -> Dtype {
            T::DTYPE
        }
        typed!(self, x => of(x))
    }

    /// Its extents.
    pub fn shape(&self) -> &[usize] {
        typed!(self, x => x.shape())
    }

    /// A part of it, as [`ArrayView::slice_move`].
    pub fn slice<I: SliceArg<D>>(self, part: I) -> Tensor<'a, I::OutDim> {
        typed!(self, x => x.slice_move(part).into())
    }
}

impl Tensor<'_, Ix0> {
    /// An operand that is not there yet, `name`: every element is this one.
    pub fn unwritten(
        &self,
        shape: &[usize],
        name: &str,
    ) -> Result<etalon_problem::View<'_>, Error> {
        let view = typed!(self, x => x.broadcast(shape).map(Into::into));
        view.ok_or_else(|| Error::value(name, "an addressable array", format!("{shape:?}")))
    }
}

impl<'a> Tensor<'a, Ix3> {
    /// With an axis of one token before the last.
    pub fn with_tokens(self) -> Tensor<'a, Ix4> {
        typed!(self, x => x.insert_axis(Axis(2)).into())
    }
}

impl<'a> Tensor<'a, Ix4> {
    /// Some rows of one batch element and head.
    pub fn rows(&self, batch: usize, head: usize, rows: Range<usize>) -> Tensor<'a, Ix2> {
        (*self).slice(s![batch, head, rows, ..])
    }

    /// Reads one row, `[batch, head, row]`, in f32.
    pub fn read_row(&self, [batch, head, row]: [usize; 3], into: &mut [f32]) {
        (*self).slice(s![batch, head, row, ..]).read(into);
    }
}

/// Rows are asked for so many rows before they are read: what is done between two groups of rows hides how
/// long the next ones take.
const AHEAD: usize = 16;

/// [`Tensor::lines`] of a matrix at an address.
fn lines<T>((at, strides): (*const T, &[isize]), rows: Range<usize>, cols: Range<usize>) -> Lines {
    match strides {
        [stride, 1] if *stride > 0 => {
            let at = at.wrapping_add(rows.start * *stride as usize + cols.start);
            Lines::new(at, (rows.len(), cols.len()), *stride as usize)
        }
        _ => Lines::NONE,
    }
}

impl Tensor<'_, Ix2> {
    /// The cache lines of the columns `cols` of some rows; none where the elements of a row do not lie side by
    /// side.
    pub fn lines(&self, rows: Range<usize>, cols: Range<usize>) -> Lines {
        typed!(self, x => lines((x.as_ptr(), x.strides()), rows, cols))
    }

    /// All cache lines.
    pub fn all_lines(&self) -> Lines {
        self.lines(0..self.shape()[0], 0..self.shape()[1])
    }

    /// Reads the columns `cols` of some rows in f32, into rows that begin `stride` apart.
    pub fn read_rows(
        &self,
        rows: Range<usize>,
        cols: Range<usize>,
        into: &mut [f32],
        stride: usize,
    ) {
        let rows = rows.zip(into.chunks_mut(stride.max(1)));
        typed!(self, x => for (i, into) in rows {
            if i + AHEAD < x.nrows() && let Some(row) = x.row(i + AHEAD).to_slice() {
                prefetch(&row[cols.clone()]);
            }
            let (row, into) = (x.row(i), &mut into[..cols.len()]);
            // To slice an array costs more than to read a short row.
            match row.to_slice() {
                Some(row) => Element::read(&row[cols.clone()], into),
                None => read_row(row.slice_move(s![cols.clone()]), into),
            }
        })
    }

    /// The elements, if they are of bf16.
    pub fn bf16(&self) -> Option<View<'_, bf16, Ix2>> {
        match self {
            Tensor::Bf16(x) => Some(x.view()),
            _ => None,
        }
    }

    /// Adds the columns `cols` of row `i` to `sum`.
    pub fn add_row(&self, i: usize, cols: Range<usize>, sum: &mut [f32]) {
        fn add<T: Element>(row: ArrayView1<'_, T>, sum: &mut [f32]) {
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
        typed!(self, x => add(x.slice(s![i, cols]), sum))
    }
}

impl Tensor<'_, Ix1> {
    /// Reads it in f32.
    pub fn read(&self, into: &mut [f32]) {
        typed!(self, x => read_row(x.view(), into))
    }
}

impl<'a, D: Dimension> TensorMut<'a, D> {
    /// Its extents.
    pub fn shape(&self) -> &[usize] {
        typed!(self, x => x.shape())
    }

    /// The same, borrowed for less long.
    pub fn view_mut(&mut self) -> TensorMut<'_, D> {
        typed!(self, x => x.view_mut().into())
    }

    /// A part of it, as [`ArrayViewMut::slice_move`].
    pub fn slice<I: SliceArg<D>>(self, part: I) -> TensorMut<'a, I::OutDim> {
        typed!(self, x => x.slice_move(part).into())
    }

    /// The two parts of an axis cut at `index`: before it, and from it on.
    pub fn split_at(self, axis: usize, index: usize) -> (Self, Self) {
        typed!(self, x => {
            let (head, tail) = x.split_at(Axis(axis), index);
            (head.into(), tail.into())
        })
    }

    /// Every element becomes `x`, rounded to the nearest.
    pub fn fill(&mut self, x: f32) {
        typed!(self, to => to.fill(Element::from_f32(x)))
    }
}

impl<'a, D: RemoveAxis> TensorMut<'a, D> {
    /// The subview at `index` of the first axis.
    pub fn outer(self, index: usize) -> TensorMut<'a, D::Smaller> {
        typed!(self, x => x.index_axis_move(Axis(0), index).into())
    }
}

impl TensorMut<'_, Ix2> {
    /// All cache lines, as those of [`Tensor::lines`].
    pub fn all_lines(&self) -> Lines {
        typed!(self, x => lines((x.as_ptr(), x.strides()), 0..x.nrows(), 0..x.ncols()))
    }

    /// [`TensorMut::write_rows`] with the registers of a level.
    pub fn write_rows_by(&mut self, level: Level, rows: &[f32], stride: usize, factor: f32) {
        level.run(WriteRows { to: self.view_mut(), rows, stride, factor });
    }

    /// Writes factor · rows that begin `stride` apart, rounded to the nearest.
    #[inline(always)]
    pub fn write_rows(&mut self, rows: &[f32], stride: usize, factor: f32) {
        // Nothing is +0, also times a factor below 0.
        self.write_each(rows, stride, |x| factor * x + 0.0);
    }

    /// Writes a function of the elements of rows that begin `stride` apart, rounded to the nearest.
    #[inline(always)]
    pub fn write_each(&mut self, rows: &[f32], stride: usize, f: impl Fn(f32) -> f32) {
        let rows = rows.chunks(stride.max(1));
        typed!(self, x => for (out, row) in x.outer_iter_mut().zip(rows) {
            write_elements(out, row, &f);
        })
    }
}

/// [`TensorMut::write_rows_by`].
struct WriteRows<'a> {
    to: TensorMut<'a, Ix2>,
    rows: &'a [f32],
    stride: usize,
    factor: f32,
}

impl Kernel for WriteRows<'_> {
    #[inline(always)]
    fn run<I: Isa>(mut self, _: I) {
        self.to.write_rows(self.rows, self.stride, self.factor);
    }
}

impl TensorMut<'_, Ix1> {
    /// Writes factor · the first elements of `row`, rounded to the nearest.
    pub fn write(&mut self, row: &[f32], factor: f32) {
        typed!(self, x => write_elements(x.view_mut(), row, |x| factor * x))
    }

    /// Adds the first elements of `row`, rounded to the nearest.
    pub fn add(&mut self, row: &[f32]) {
        typed!(self, to => to.iter_mut().zip(row).for_each(|(to, &x)| {
            *to = Element::from_f32(to.to_f32() + x);
        }))
    }
}

/// `row` = `source` in f32, of the same length.
fn read_row<T: Element>(source: ArrayView1<'_, T>, row: &mut [f32]) {
    match source.as_slice() {
        Some(source) => T::read(source, row),
        None => row.iter_mut().zip(source).for_each(|(x, &s)| *x = s.to_f32()),
    }
}

/// `out` = a function of the first elements of `row`, rounded to the nearest.
#[inline(always)]
fn write_elements<T: Element>(mut out: ArrayViewMut1<'_, T>, row: &[f32], f: impl Fn(f32) -> f32) {
    let Some(out) = out.as_slice_mut() else {
        out.iter_mut().zip(row).for_each(|(out, &x)| *out = T::from_f32(f(x)));
        return;
    };
    let (lines, rest) = out.as_chunks_mut::<LINE>();
    let (row, behind) = row.split_at(row.len().min(lines.len() * LINE));
    for (line, row) in lines.iter_mut().zip(row.as_chunks().0) {
        // Copies: what may be the same memory is not multiplied in registers.
        let (row, mut rounded): ([f32; LINE], _) = (*row, [T::ZERO; LINE]);
        for (to, x) in rounded.iter_mut().zip(row) {
            *to = T::from_f32(f(x));
        }
        *line = rounded;
    }
    rest.iter_mut().zip(behind).for_each(|(out, &x)| *out = T::from_f32(f(x)));
}

/// Elements that are rounded at a time.
const LINE: usize = 32;

mod sealed {
    pub trait Sealed {}
}

/// A type in which tensors are stored: f32, bf16 or f16. Every sum is f32 whatever it is.
pub trait Element:
    sealed::Sealed + Scalar<Wide = f32> + bytemuck::Zeroable + Default + Send + Sync + 'static
{
    /// The type's name.
    const DTYPE: Dtype;
    /// Zero.
    const ZERO: Self;
    /// Exactly.
    fn to_f32(self) -> f32;
    /// To the nearest, ties to even.
    fn from_f32(x: f32) -> Self;
    /// `row` = `source`, of the same length.
    fn read(source: &[Self], row: &mut [f32]);
    /// The variant of a tensor of this type.
    #[doc(hidden)]
    fn tensor<D: Dimension>(view: ArrayView<'_, Self, D>) -> Tensor<'_, D>;
    /// The variant of a result of this type.
    #[doc(hidden)]
    fn tensor_mut<D: Dimension>(view: ArrayViewMut<'_, Self, D>) -> TensorMut<'_, D>;
}

/// An element type: the variant of its tensors, zero, its rounding, and how a row of it is read.
macro_rules! element {
    ($type:ty, $variant:ident, $zero:expr, $from_f32:expr, $read:expr) => {
        impl sealed::Sealed for $type {}

        impl Element for $type {
            const DTYPE: Dtype = Dtype::$variant;
            const ZERO: Self = $zero;
            #[inline(always)]
            fn to_f32(self) -> f32 {
                self.into()
            }
            #[inline(always)]
            fn from_f32(x: f32) -> Self {
                $from_f32(x)
            }
            fn read(source: &[Self], row: &mut [f32]) {
                $read(source, row);
            }
            fn tensor<D: Dimension>(view: ArrayView<'_, Self, D>) -> Tensor<'_, D> {
                Tensor::$variant(view)
            }
            fn tensor_mut<D: Dimension>(view: ArrayViewMut<'_, Self, D>) -> TensorMut<'_, D> {
                TensorMut::$variant(view)
            }
        }
    };
}
element!(f32, F32, 0.0, |x| x, |source, row: &mut [f32]| row.copy_from_slice(source));
element!(bf16, Bf16, bf16::ZERO, bf16::from_f32, HalfFloatSliceExt::convert_to_f32_slice);
element!(f16, F16, f16::ZERO, f16::from_f32, HalfFloatSliceExt::convert_to_f32_slice);

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array1, Array2, Array4};

    /// Elements that every type holds exactly.
    fn small<T: Element>() -> Array4<T> {
        Array4::from_shape_fn((2, 3, 5, 7), |(b, h, i, d)| {
            T::from_f32((100 * b + 30 * h + 7 * i + d) as f32 / 4.0)
        })
    }

    fn reads_alike<T: Element>() {
        let (array, wanted) = (small::<T>(), small::<f32>());
        for reversed in [false, true] {
            let turn = if reversed { s![.., .., .., ..;-1] } else { s![.., .., .., ..;1] };
            let rows = Tensor::from(array.slice(turn)).rows(1, 2, 1..4);
            let wanted = wanted.slice(turn);
            let wanted = wanted.slice(s![1, 2, 1..4, ..]);
            assert_eq!((rows.dtype(), rows.shape()), (T::DTYPE, &[3, 7][..]));
            let mut read = [-1.0; 12];
            rows.read_rows(1..3, 2..5, &mut read, 6);
            for r in 0..2 {
                assert_eq!(read[6 * r..][..3], wanted.slice(s![1 + r, 2..5]).to_vec());
                assert_eq!(read[6 * r + 3..][..3], [-1.0; 3], "between two rows");
            }
            let mut sum = [1.0; 3];
            rows.add_row(0, 4..7, &mut sum);
            assert_eq!(sum.to_vec(), wanted.slice(s![0, 4..7]).map(|x| x + 1.0).to_vec());
            let mut row = [0.0; 7];
            rows.slice(s![2, ..]).read(&mut row);
            assert_eq!(row.to_vec(), wanted.row(2).to_vec());
        }
    }

    #[test]
    fn rows_read_alike_of_any_type_and_strides() {
        reads_alike::<f32>();
        reads_alike::<bf16>();
        reads_alike::<f16>();
    }

    fn writes_to_the_nearest<T: Element>() {
        let rows = [1.0, 1.0 + 1e-4, 0.0, -3.0, 7e-3, 0.0];
        let rounded = [2.0, 2.0 * (1.0 + 1e-4), -6.0, 2.0 * 7e-3].map(|x| T::from_f32(x).to_f32());
        for transposed in [false, true] {
            let mut array = Array2::from_elem((2, 2), T::ZERO);
            let view = array.view_mut();
            let view = if transposed { view.reversed_axes() } else { view };
            TensorMut::from(view).write_rows(&rows, 3, 2.0);
            let array = if transposed { array.reversed_axes() } else { array };
            assert_eq!(array.map(|x| x.to_f32()).iter().copied().collect::<Vec<_>>(), rounded);
        }
        let mut one = Array1::from_elem(2, T::ZERO);
        TensorMut::from(one.view_mut()).write(&rows, 2.0);
        assert_eq!(one.map(|x| x.to_f32()).to_vec(), rounded[..2]);
        let mut four = small::<T>();
        let (mut head, tail) = TensorMut::from(four.view_mut()).split_at(1, 2);
        head.view_mut().fill(1e-4);
        tail.outer(1).slice(s![0, 3, 1..2]).fill(-1.0);
        let mut wanted = small::<T>();
        wanted.slice_mut(s![.., ..2, .., ..]).fill(T::from_f32(1e-4));
        wanted[[1, 2, 3, 1]] = T::from_f32(-1.0);
        let bits = |x: Array4<T>| x.map(|x| x.to_f32().to_bits());
        assert_eq!(bits(four), bits(wanted));
    }

    #[test]
    fn rows_are_written_to_the_nearest_of_any_type_and_strides() {
        writes_to_the_nearest::<f32>();
        writes_to_the_nearest::<bf16>();
        writes_to_the_nearest::<f16>();
    }
}
