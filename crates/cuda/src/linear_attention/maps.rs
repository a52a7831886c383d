//! Tensors of four axes as the copy engine of compute capability 9.0 reads and writes them.

use crate::gpu::Device;
use crate::moves::Place;
use crate::old_map::{EncodedBox, EncodedMap};
use etalon_problem::{Dtype, Error};

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
) -> Result<EncodedMap, Error> {
    let [batch, heads, rows, columns] = place.extents.map(|x| x as u64);
    // The stride of an axis of extent 1 is not walked, but must be one.
    let stride = |axis: usize, dense: u64| match place.extents[axis] {
        1 => 2 * dense,
        _ => 2 * place.strides[axis] as u64,
    };
    let boxed = EncodedBox {
        address: place.address,
        extents: [columns, rows, heads, batch],
        strides: [
            stride(2, columns),
            stride(1, columns * rows),
            stride(0, columns * rows * heads),
            0,
        ],
        extents_of_box: [64, height, 1, 1],
    };
    boxed.map(device, storage)
}
