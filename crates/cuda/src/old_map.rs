//! The descriptors of passes that are not lists of steps yet.

use crate::gpu::Device;
use cudarc::driver::sys;
use etalon_problem::{Dtype, Error};

/// `CUtensorMap`.
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct EncodedMap([u64; 16]);

/// A tensor of N axes, the fastest first.
pub(crate) struct EncodedBox<const N: usize> {
    pub address: u64,
    /// Elements along each axis.
    pub extents: [u64; N],
    /// Bytes from one element to the next, of each axis but the first; the last number is not read.
    pub strides: [u64; N],
    /// Elements along each axis of the box that is copied at once.
    pub extents_of_box: [u32; N],
}

impl<const N: usize> EncodedBox<N> {
    /// Its map, in boxes whose rows of 128 bytes are swizzled. What lies beyond the tensor is read as 0 and not written.
    pub fn map(&self, device: &Device, storage: Dtype) -> Result<EncodedMap, Error> {
        let element = match storage {
            Dtype::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            _ => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        };
        let mut map = EncodedMap::default();
        // SAFETY: the map has the alignment and the size that the driver asks for; each array holds N numbers, of
        // which the driver reads N, or N − 1 of the strides, and lives until the call returns.
        let encoded = unsafe {
            sys::cuTensorMapEncodeTiled(
                (&raw mut map).cast(),
                element,
                N as u32,
                self.address as *mut _,
                self.extents.as_ptr(),
                self.strides.as_ptr(),
                self.extents_of_box.as_ptr(),
                [1u32; N].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        encoded.result().map_err(|error| device.failed("describing a tensor", error))?;
        Ok(map)
    }
}
