//! Tensors of four axes as the copy engine of compute capability 9.0 reads and writes them.

use crate::gpu::Device;
use crate::moves::Place;
use cudarc::driver::sys;
use etalon_problem::{Dtype, Error};

/// `CUtensorMap`.
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct TensorMap([u64; 16]);

/// Whether the copy engine takes a tensor of 16-bit elements where it lies, given that it begins at a multiple of 16 bytes.
pub(super) fn takes(place: &Place) -> bool {
    let whole = |axis: usize| {
        let (extent, stride) = (place.extents[axis], place.strides[axis]);
        extent == 1 || (stride > 0 && stride % 8 == 0 && stride < 1 << 38)
    };
    place.extents[3].is_multiple_of(8) && place.elements() > 0 && (0..3).all(whole)
}

/// The map of a tensor in boxes of 64 columns and `height` rows. What lies beyond is read as 0 and not written.
pub(super) fn map(
    device: &Device,
    storage: Dtype,
    place: Place,
    height: u32,
) -> Result<TensorMap, Error> {
    let [batch, heads, rows, columns] = place.extents.map(|x| x as u64);
    // The stride of an axis of extent 1 is not walked, but must be one.
    let stride = |axis: usize, dense: u64| match place.extents[axis] {
        1 => 2 * dense,
        _ => 2 * place.strides[axis] as u64,
    };
    let dims = [columns, rows, heads, batch];
    let strides =
        [stride(2, columns), stride(1, columns * rows), stride(0, columns * rows * heads)];
    let element = match storage {
        Dtype::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        _ => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    };
    let mut map = TensorMap::default();
    // SAFETY: the map has the alignment and the size that the driver asks for; the arrays hold four numbers,
    // the strides three, and live until the call returns.
    let encoded = unsafe {
        sys::cuTensorMapEncodeTiled(
            (&raw mut map).cast(),
            element,
            4,
            place.address as *mut _,
            dims.as_ptr(),
            strides.as_ptr(),
            [64, height, 1, 1].as_ptr(),
            [1u32; 4].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    encoded.result().map_err(|error| device.failed("describing a tensor", error))?;
    Ok(map)
}
