//! Tensors of four axes as kernels take them.

use crate::args::{Declaration, Untyped, declarations};
use crate::strided::StridedTensor;

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
