//! Tensors of four axes as kernels take them.

use crate::args::{Declaration, Ptr, Untyped, declaration, kernel_args};
use crate::moves::StridedTensor;

kernel_args! {
    /// A tensor of batch elements, heads, rows and columns, of which those of a row lie side by side.
    pub(crate) struct TensorArgs as "Tensor" {
        /// Its first element; 0 where there is none.
        pub data: Ptr<Untyped>,
        /// Elements from one batch element to the next.
        pub batch: i64,
        /// Elements from one head to the next.
        pub head: i64,
        /// Elements from one row to the next.
        pub row: i64,
    }
}

/// Kernel arguments that `pairs/problem.cuh` names.
pub(crate) const ARGUMENTS: &[Declaration] = &[declaration::<TensorArgs>()];

impl TensorArgs {
    pub fn is_there(&self) -> bool {
        self.data.0 != 0
    }
}

impl From<StridedTensor> for TensorArgs {
    /// An axis of extent 1 has the stride 0.
    fn from(StridedTensor { address, extents, strides }: StridedTensor) -> Self {
        let stride = |axis: usize| if extents[axis] == 1 { 0 } else { strides[axis] };
        let (batch, head, row) = (stride(0), stride(1), strides[2]);
        TensorArgs { data: address.into(), batch, head, row }
    }
}
