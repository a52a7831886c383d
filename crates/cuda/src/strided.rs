//! Tensors of up to four axes with strides, and as kernels take them.

use crate::args::{Declaration, Untyped, declarations};

/// Axes are batch, head, row, column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StridedTensor {
    pub address: u64,
    pub extents: [usize; 4],
    /// In elements.
    pub strides: [i64; 4],
}

pub(crate) fn dense(extents: [usize; 4]) -> [i64; 4] {
    let [_, heads, rows, columns] = extents.map(|x| x as i64);
    [heads * rows * columns, rows * columns, columns, 1]
}

/// Numbers of up to four axes, beside `others` of those that are not there: of fewer than four the last are columns,
/// and those before heads and batch elements.
pub(crate) fn of_four<T: Copy>(own: &[T], others: [T; 4]) -> Option<[T; 4]> {
    let [b, h, n, _] = others;
    Some(match *own {
        [] => others,
        [d] => [b, h, n, d],
        [h, d] => [b, h, n, d],
        [b, h, d] => [b, h, n, d],
        [b, h, n, d] => [b, h, n, d],
        _ => return None,
    })
}

impl StridedTensor {
    pub const NOWHERE: StridedTensor = StridedTensor { address: 0, extents: [0; 4], strides: [0; 4] };

    pub fn dense(address: u64, extents: [usize; 4]) -> StridedTensor {
        StridedTensor { address, extents, strides: dense(extents) }
    }

    /// Strides of batch elements and heads, 0 along an axis of extent 1, and of rows.
    pub fn steps(&self) -> [i64; 3] {
        [0, 1, 2].map(|axis| if axis < 2 && self.extents[axis] == 1 { 0 } else { self.strides[axis] })
    }

    pub fn elements(&self) -> usize {
        self.extents.iter().product()
    }

    /// A tensor of numbers of 8 bytes, of at most three axes, as one of their halves.
    pub fn halves(self) -> StridedTensor {
        let ([batch, heads, _, columns], [b, h, _, c]) = (self.extents, self.strides);
        StridedTensor { extents: [batch, heads, columns, 2], strides: [2 * b, 2 * h, 2 * c, 1], ..self }
    }

    /// True if elements lie one after the other, in the order of the shape.
    pub fn is_dense(&self) -> bool {
        let wanted = dense(self.extents);
        let is_dense = |axis: usize| self.extents[axis] == 1 || self.strides[axis] == wanted[axis];
        self.elements() == 0 || (0..4).all(is_dense)
    }

    /// True if the copy engine walks its rows, heads and batch elements, of 16-bit elements.
    pub fn has_boxes(&self) -> bool {
        (0..3).all(|axis| {
            let stride = self.strides[axis];
            self.extents[axis] == 1 || (stride > 0 && stride % 8 == 0 && stride < 1 << 38)
        })
    }

    /// Bytes from one row, head and batch element to the next, of 16-bit elements. The stride of an axis of extent 1
    /// is not walked, but must be one: that of a dense tensor whose rows begin at multiples of 16 bytes.
    pub fn box_strides(&self) -> [u64; 3] {
        let [batch, heads, rows, columns] = self.extents;
        let dense = dense([batch, heads, rows, columns.next_multiple_of(8)]);
        [2, 1, 0].map(|axis| {
            let stride = if self.extents[axis] == 1 { dense[axis] } else { self.strides[axis] };
            2 * stride as u64
        })
    }

    /// True if the elements of a row lie side by side.
    pub fn has_whole_rows(&self) -> bool {
        self.extents[3] <= 1 || self.strides[3] == 1 || self.elements() == 0
    }
}

/// Declares a tensor of batch elements, heads and rows of columns that lie side by side: its address, 0 where there is
/// none; and the elements from one batch element, head and row to the next, 0 for one batch element or head.
macro_rules! strided_args {
    (
        $(#[$doc:meta])*
        $access:vis struct $args:ident as $name:literal { $of:ty, $batch:ident, $head:ident, $row:ident }
    ) => {
        $crate::args::kernel_args! {
            $(#[$doc])*
            $access struct $args as $name {
                pub data: $crate::args::Ptr<$of>,
                pub $batch: i64,
                pub $head: i64,
                pub $row: i64,
            }
        }

        impl From<$crate::strided::StridedTensor> for $args {
            fn from(place: $crate::strided::StridedTensor) -> Self {
                let [$batch, $head, $row] = place.steps();
                $args { data: place.address.into(), $batch, $head, $row }
            }
        }
    };
}
pub(crate) use strided_args;

strided_args! {
    /// A tensor of any type.
    pub(crate) struct TensorArgs as "Tensor" { Untyped, batch, head, row }
}

pub(crate) const ARGUMENTS: &[Declaration] = declarations![TensorArgs];

impl TensorArgs {
    pub fn dense(address: u64, extents: [usize; 4]) -> TensorArgs {
        StridedTensor::dense(address, extents).into()
    }

    pub fn is_there(&self) -> bool {
        self.data.0 != 0
    }
}
