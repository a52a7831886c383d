//! Matrices as the copy engine of compute capability 9.0 reads and writes them.

use crate::gpu::Device;
use cudarc::driver::sys;
use etalon_problem::{Dtype, Error};

/// `CUtensorMap`.
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TensorMap([u64; 16]);

/// The map of a matrix of 16-bit elements with so many rows and columns, and elements from row to row, in
/// boxes of 64 columns and `height` rows. What lies beyond is read as 0.
pub(crate) fn map(
    device: &Device,
    storage: Dtype,
    address: u64,
    [rows, columns, stride]: [u64; 3],
    height: u32,
) -> Result<TensorMap, Error> {
    let (dims, strides, boxes) = ([columns, rows], [2 * stride], [64, height]);
    let element = match storage {
        Dtype::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        _ => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    };
    let mut map = TensorMap::default();
    // SAFETY: the map has the alignment and the size that the driver asks for; the arrays hold two numbers,
    // the strides one, and live until the call returns.
    let encoded = unsafe {
        sys::cuTensorMapEncodeTiled(
            (&raw mut map).cast(),
            element,
            2,
            address as *mut _,
            dims.as_ptr(),
            strides.as_ptr(),
            boxes.as_ptr(),
            [1u32; 2].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    encoded.result().map_err(|error| device.failed("describing a matrix", error))?;
    Ok(map)
}
