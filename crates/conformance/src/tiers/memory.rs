//! Tensors in memory of every layout that a caller may have.

use crate::tensor::{Data, Stored, Tensor};
use crate::tier::Layout;
use etalon_problem::{Error, View, ViewMut};
use ndarray::{
    Array1, ArrayD, ArrayViewD, ArrayViewMutD, Axis, AxisDescription, IxDyn, ShapeBuilder, Slice,
};

/// A tensor in memory of some layout.
pub(super) struct Placed {
    memory: Memory,
    shape: Vec<usize>,
    layout: Layout,
}

/// The memory, of any element type.
enum Memory {
    F64(Storage<f64>),
    F32(Storage<f32>),
    Bf16(Storage<half::bf16>),
    F16(Storage<half::f16>),
    I64(Storage<i64>),
}

/// Applies an expression to the memory, whatever its element type.
macro_rules! each {
    ($memory:expr, $x:ident => $body:expr) => {
        match $memory {
            Memory::F64($x) => $body,
            Memory::F32($x) => $body,
            Memory::Bf16($x) => $body,
            Memory::F16($x) => $body,
            Memory::I64($x) => $body,
        }
    };
}

impl Placed {
    /// An operand; an error that names it for flags.
    pub fn input(name: &str, tensor: &Tensor, layout: Layout) -> Result<Self, Error> {
        tensor.view(name)?;
        let shape = &tensor.shape;
        let memory = match &tensor.data {
            Data::F64(x) => Memory::F64(Storage::holding(shape, x, layout)),
            Data::F32(x) => Memory::F32(Storage::holding(shape, x, layout)),
            Data::Bf16(x) => Memory::Bf16(Storage::holding(shape, x, layout)),
            Data::F16(x) => Memory::F16(Storage::holding(shape, x, layout)),
            Data::I64(x) => Memory::I64(Storage::holding(shape, x, layout)),
            Data::Bool(_) => Memory::I64(Storage::holding(&[0], &[], layout)), // refused above
        };
        Ok(Placed { memory, shape: shape.clone(), layout })
    }

    /// A place for a result, filled with a number; with `None` as [`Tensor::unwritten`].
    pub fn output(shape: &[usize], stored: Stored, layout: Layout, filled: Option<f64>) -> Self {
        let one = match filled {
            Some(x) => Tensor::store(&ArrayD::from_elem(vec![1], x), stored),
            None => Tensor::unwritten(&[1], stored),
        };
        let memory = match &one.data {
            Data::F64(x) => Memory::F64(Storage::filled(shape, x[0], layout)),
            Data::F32(x) => Memory::F32(Storage::filled(shape, x[0], layout)),
            Data::Bf16(x) => Memory::Bf16(Storage::filled(shape, x[0], layout)),
            Data::F16(x) => Memory::F16(Storage::filled(shape, x[0], layout)),
            Data::I64(x) => Memory::I64(Storage::filled(shape, x[0], layout)),
            Data::Bool(_) => Memory::I64(Storage::filled(&[0], 0, layout)), // nothing is stored so
        };
        Placed { memory, shape: shape.to_vec(), layout }
    }

    /// To be read.
    pub fn view(&self, name: &str) -> Result<View<'_>, Error> {
        each!(&self.memory, x => x.view(&self.shape, self.layout).map(View::from))
            .ok_or_else(|| self.misshapen(name))
    }

    /// To be written.
    pub fn view_mut(&mut self, name: &str) -> Result<ViewMut<'_>, Error> {
        let misshapen = self.misshapen(name);
        each!(&mut self.memory, x => x.view_mut(&self.shape, self.layout).map(ViewMut::from))
            .ok_or(misshapen)
    }

    fn misshapen(&self, name: &str) -> Error {
        Error::value(name, "an addressable array", format!("{:?}", self.shape))
    }

    /// The contents of a result. An error where a gap has been written.
    pub fn into_tensor(self, name: &str) -> Result<Tensor, Error> {
        let gaps = each!(&self.memory, x => x.gaps_are_whole(&self.shape, self.layout));
        if gaps != Some(true) {
            return Err(Error::value(name, "memory beside its elements as it was", "written"));
        }
        let misshapen = self.misshapen(name);
        let Placed { memory, shape, layout } = self;
        let data = match &memory {
            Memory::F64(x) => x.elements(&shape, layout).map(Data::F64),
            Memory::F32(x) => x.elements(&shape, layout).map(Data::F32),
            Memory::Bf16(x) => x.elements(&shape, layout).map(Data::Bf16),
            Memory::F16(x) => x.elements(&shape, layout).map(Data::F16),
            Memory::I64(x) => x.elements(&shape, layout).map(Data::I64),
        };
        Ok(Tensor { data: data.ok_or(misshapen)?, shape })
    }
}

/// An element, of which the bits count.
trait Element: Copy {
    /// The contents of gaps: no result is likely to be equal to it.
    const GAP: Self;

    fn bits(self) -> u64;
}

macro_rules! element {
    ($type:ty, $gap:expr, $x:ident => $bits:expr) => {
        impl Element for $type {
            const GAP: Self = $gap;

            fn bits(self) -> u64 {
                let $x = self;
                $bits
            }
        }
    };
}
element!(f64, f64::NAN, x => x.to_bits());
element!(f32, f32::NAN, x => u64::from(x.to_bits()));
element!(half::bf16, half::bf16::NAN, x => u64::from(x.to_bits()));
element!(half::f16, half::f16::NAN, x => u64::from(x.to_bits()));
element!(i64, i64::MIN + 1, x => x as u64);

/// Elements and gaps. Of what overlaps, one list of elements with the strides of the axes.
enum Storage<T> {
    Array(ArrayD<T>),
    Shared(Array1<T>, Vec<usize>),
}

impl<T: Element> Storage<T> {
    fn filled(shape: &[usize], with: T, layout: Layout) -> Self {
        let mut storage = Storage::Array(ArrayD::from_elem(extents(shape, layout), T::GAP));
        if let Some(mut view) = storage.view_mut(shape, layout) {
            view.fill(with);
        }
        storage
    }

    fn holding(shape: &[usize], data: &[T], layout: Layout) -> Self {
        if layout == Layout::Overlapping {
            return Storage::shared(shape, data);
        }
        if layout == Layout::RowMajor
            && let Ok(array) = ArrayD::from_shape_vec(shape, data.to_vec())
        {
            return Storage::Array(array);
        }
        let mut storage = Storage::filled(shape, T::GAP, layout);
        if let Some(mut view) = storage.view_mut(shape, layout) {
            view.iter_mut().zip(data).for_each(|(to, &x)| *to = x);
        }
        storage
    }

    /// Every axis of equal entries has stride 0; rows that are windows of one list overlap.
    fn shared(shape: &[usize], data: &[T]) -> Self {
        let mut array = ArrayD::from_elem(shape, T::GAP);
        array.iter_mut().zip(data).for_each(|(to, &x)| *to = x);
        let mut is_one = vec![false; shape.len()];
        for axis in (0..shape.len()).filter(|&axis| shape[axis] > 1) {
            let first = array.index_axis(Axis(axis), 0).to_owned();
            let same =
                |x: ArrayViewD<'_, T>| first.iter().zip(x).all(|(a, b)| a.bits() == b.bits());
            if array.axis_iter(Axis(axis)).all(same) {
                array.slice_axis_inplace(Axis(axis), Slice::from(0..1));
                is_one[axis] = true;
            }
        }
        let (list, mut strides) = windows(&array);
        for (stride, one) in strides.iter_mut().zip(is_one) {
            *stride = if one { 0 } else { *stride };
        }
        Storage::Shared(list, strides)
    }

    fn view(&self, shape: &[usize], layout: Layout) -> Option<ArrayViewD<'_, T>> {
        match self {
            Storage::Array(array) => Some(match layout {
                Layout::Transposed => array.view().reversed_axes(),
                _ => array.slice_each_axis(|axis| part(&axis, shape, layout)),
            }),
            Storage::Shared(list, strides) => {
                let shape = IxDyn(shape).strides(IxDyn(strides));
                ArrayViewD::from_shape(shape, list.as_slice()?).ok()
            }
        }
    }

    fn view_mut(&mut self, shape: &[usize], layout: Layout) -> Option<ArrayViewMutD<'_, T>> {
        let Storage::Array(array) = self else { return None };
        Some(match layout {
            Layout::Transposed => array.view_mut().reversed_axes(),
            _ => array.slice_each_axis_mut(|axis| part(&axis, shape, layout)),
        })
    }

    fn elements(&self, shape: &[usize], layout: Layout) -> Option<Vec<T>> {
        let view = self.view(shape, layout)?;
        Some(view.as_slice().map_or_else(|| view.iter().copied().collect(), <[T]>::to_vec))
    }

    /// True if every gap still has its contents; `None` where the layout has no view.
    fn gaps_are_whole(&self, shape: &[usize], layout: Layout) -> Option<bool> {
        let Storage::Array(array) = self else { return Some(true) };
        let gap = |x: &&T| x.bits() == T::GAP.bits();
        let elements = self.view(shape, layout)?;
        if elements.len() == array.len() {
            return Some(true);
        }
        // NaNs of a gap that are elements count on both sides.
        let of_elements = elements.iter().filter(gap).count();
        let all = array.iter().filter(gap).count();
        Some(all - of_elements == array.len() - elements.len())
    }
}

impl Layout {
    /// The layout of the operand or result of a number.
    pub(super) fn of_number(self, number: usize) -> Layout {
        const ALL: [Layout; 5] = [
            Layout::RowMajor,
            Layout::Transposed,
            Layout::Reversed,
            Layout::Strided,
            Layout::Padded,
        ];
        if self == Layout::Mixed { ALL[number % ALL.len()] } else { self }
    }

    /// The layout of results: these share no memory.
    pub(super) fn of_results(self) -> Layout {
        if self == Layout::Overlapping { Layout::RowMajor } else { self }
    }
}

/// The extents of an array whose part is a tensor of this layout.
fn extents(shape: &[usize], layout: Layout) -> Vec<usize> {
    let last = shape.len().saturating_sub(1);
    match layout {
        Layout::Transposed => shape.iter().rev().copied().collect(),
        Layout::Strided => {
            let with_gaps =
                |(axis, &n): (usize, &usize)| if axis == last { 2 * n + 1 } else { n + 2 };
            shape.iter().enumerate().map(with_gaps).collect()
        }
        Layout::Padded => {
            let with_gaps = |(axis, &n): (usize, &usize)| if axis == last { n } else { n + 2 };
            shape.iter().enumerate().map(with_gaps).collect()
        }
        _ => shape.to_vec(),
    }
}

/// The entries of an axis of the array that belong to the tensor.
fn part(axis: &AxisDescription, shape: &[usize], layout: Layout) -> Slice {
    let (at, n) = (axis.axis.index(), shape[axis.axis.index()] as isize);
    match layout {
        Layout::Reversed => Slice::new(0, None, -1),
        Layout::Strided if at + 1 == shape.len() => Slice::new(1, Some(2 * n), 2),
        Layout::Padded if at + 1 == shape.len() => Slice::new(0, None, 1),
        Layout::Strided | Layout::Padded => Slice::new(1, Some(n + 1), 1),
        _ => Slice::new(0, None, 1),
    }
}

/// The elements as a list, and the strides of the axes in it: where each row of the last axis is the one
/// before, moved by one element, rows overlap.
fn windows<T: Element>(array: &ArrayD<T>) -> (Array1<T>, Vec<usize>) {
    let shape = array.shape();
    let mut strides: Vec<usize> =
        (0..shape.len()).map(|axis| shape[axis + 1..].iter().product()).collect();
    let elements: Vec<T> = array.iter().copied().collect();
    let plain = |strides| (Array1::from(elements.clone()), strides);
    let &[.., rows, cols] = shape else { return plain(strides) };
    if rows < 2 || cols < 2 || elements.is_empty() {
        return plain(strides);
    }
    let moved = |matrix: &[T]| {
        let at = |i: usize, c: usize| matrix[i * cols + c].bits();
        (1..rows).all(|i| (1..cols).all(|c| at(i, c - 1) == at(i - 1, c)))
    };
    if !elements.chunks(rows * cols).all(moved) {
        return plain(strides);
    }
    let outer = shape.len() - 2;
    for stride in &mut strides[..outer] {
        *stride = *stride / (rows * cols) * (rows + cols - 1);
    }
    (strides[outer], strides[outer + 1]) = (1, 1);
    let list = elements.chunks(rows * cols).flat_map(|matrix| {
        let last = matrix[(rows - 1) * cols..].iter().skip(1);
        matrix.iter().step_by(cols).chain(last).copied()
    });
    (list.collect(), strides)
}

#[cfg(test)]
mod tests {
    use super::*;
    use etalon_problem::Dtype;

    fn strides(x: &Tensor, layout: Layout) -> Vec<isize> {
        let placed = Placed::input("x", x, layout).unwrap();
        let View::F32(view) = placed.view("x").unwrap() else { panic!("not f32") };
        let elements: Vec<f32> = view.iter().copied().collect();
        assert_eq!(Data::F32(elements), x.data, "{layout}");
        view.strides().to_vec()
    }

    #[test]
    fn every_layout_holds_the_same_elements() {
        let x = ArrayD::from_shape_fn(vec![2, 3, 5], |i| (100 * i[0] + 10 * i[1] + i[2]) as f64);
        let x = Tensor::round(&x, Dtype::F32);
        assert_eq!(strides(&x, Layout::RowMajor), [15, 5, 1]);
        assert_eq!(strides(&x, Layout::Transposed), [1, 2, 6]);
        assert_eq!(strides(&x, Layout::Reversed), [-15, -5, -1]);
        assert_eq!(strides(&x, Layout::Strided), [55, 11, 2]);
        assert_eq!(strides(&x, Layout::Padded), [25, 5, 1]);
        assert_eq!(strides(&x, Layout::Overlapping), [15, 5, 1], "nothing is equal");
    }

    #[test]
    fn what_is_equal_shares_memory() {
        let heads = ArrayD::from_shape_fn(vec![2, 3, 4], |i| (i[0] + 7 * i[2] * i[2]) as f64);
        assert_eq!(strides(&Tensor::round(&heads, Dtype::F32), Layout::Overlapping), [4, 0, 1]);
        let windows = ArrayD::from_shape_fn(vec![2, 3, 4], |i| (50 * i[0] + i[1] + i[2]) as f64);
        assert_eq!(strides(&Tensor::round(&windows, Dtype::F32), Layout::Overlapping), [6, 1, 1]);
    }

    #[test]
    fn a_written_gap_is_an_error() {
        for layout in [Layout::Strided, Layout::Padded] {
            let place = || Placed::output(&[2, 3], Stored::Float(Dtype::F32), layout, None);
            let mut sound = place();
            let ViewMut::F32(mut view) = sound.view_mut("x").unwrap() else { panic!("not f32") };
            view.fill(1.0);
            assert_eq!(sound.into_tensor("x").unwrap().data, Data::F32(vec![1.0; 6]));
            let mut beside = place();
            let Memory::F32(Storage::Array(memory)) = &mut beside.memory else {
                panic!("no array")
            };
            memory.fill(1.0);
            assert!(beside.into_tensor("x").is_err());
        }
    }
}
