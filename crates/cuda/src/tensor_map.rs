//! Tensors of 16-bit elements as the copy engine of compute capability 9.0 reads and writes them.

use crate::gpu::Device;
use cudarc::driver::sys::*;
use etalon_problem::{Dtype, Result};

/// A tensor for the copy engine; none unless it was described.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TensorMap(Option<Boxed>);

const AXES: usize = 5;

/// A tensor of some axes, the fastest first, in boxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Boxed {
    pub address: u64,
    /// bf16 or f16.
    storage: Dtype,
    axes: usize,
    /// Elements along each axis.
    extents: [u64; AXES],
    /// Bytes from one element to the next, of each axis but the first.
    strides: [u64; AXES],
    /// Elements along each axis of the box that is copied at once.
    box_extents: [u32; AXES],
}

/// `CUtensorMap`.
#[repr(C, align(128))]
#[derive(Default)]
pub(crate) struct Descriptor([u64; 16]);

impl Descriptor {
    pub fn bytes(&self) -> &[u8] {
        bytemuck::bytes_of(&self.0)
    }
}

impl TensorMap {
    pub fn new<const N: usize>(
        storage: Dtype,
        address: u64,
        extents: [u64; N],
        strides: [u64; N],
        box_extents: [u32; N],
    ) -> TensorMap {
        TensorMap(Some(Boxed {
            address,
            storage,
            axes: N,
            extents: filled_up(extents, 1),
            strides: filled_up(strides, 0),
            box_extents: filled_up(box_extents, 1),
        }))
    }

    pub fn boxed(&self) -> Option<Boxed> {
        self.0
    }
}

/// Numbers of some axes, and `rest` of the others.
fn filled_up<T: Copy, const N: usize>(own: [T; N], rest: T) -> [T; AXES] {
    std::array::from_fn(|axis| own.get(axis).copied().unwrap_or(rest))
}

impl Boxed {
    pub fn at(self, address: u64) -> Boxed {
        Boxed { address, ..self }
    }

    /// Its descriptor; rows of 128 bytes of boxes are swizzled. Elements beyond the tensor are read as 0, not written.
    pub fn encode(&self, device: &Device) -> Result<Descriptor> {
        let element = match self.storage {
            Dtype::Bf16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            _ => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        };
        let mut descriptor = Descriptor::default();
        // SAFETY: the descriptor has the alignment and the size that the driver asks for; each array holds five
        // numbers, of which the driver reads `axes`, or one less of the strides, and lives until the call returns.
        let encoded = unsafe {
            cuTensorMapEncodeTiled(
                (&raw mut descriptor).cast(),
                element,
                self.axes as u32,
                self.address as *mut _,
                self.extents.as_ptr(),
                self.strides.as_ptr(),
                self.box_extents.as_ptr(),
                [1u32; AXES].as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        device.check("describing a tensor", encoded.result())?;
        Ok(descriptor)
    }
}
