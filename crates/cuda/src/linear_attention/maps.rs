//! Tensors of four axes as the copy engine of compute capability 9.0 reads and writes them.

use crate::moves::Place;
use crate::parts::Parts;
use crate::tensor_map::TensorMap;
use etalon_problem::Dtype;

/// True if the copy engine takes every operand where kernels find it.
pub(super) fn takes_all(parts: &Parts) -> bool {
    let names = ["q", "k", "v", "o", "dout", "dq", "dk", "dv"];
    parts.have_whole_rows(&names)
        && names.iter().filter_map(|name| parts.part(name)).all(|part| takes(&part.place(0)))
}

/// True if it takes a tensor of 16-bit elements that begins at a multiple of 16 bytes.
fn takes(place: &Place) -> bool {
    let whole = |axis: usize| {
        let (extent, stride) = (place.extents[axis], place.strides[axis]);
        extent == 1 || (stride > 0 && stride % 8 == 0 && stride < 1 << 38)
    };
    place.extents[3].is_multiple_of(8) && place.elements() > 0 && (0..3).all(whole)
}

/// A tensor in boxes of 64 columns and `height` rows; none where it is not there.
pub(super) fn map(storage: Dtype, place: Place, height: u32) -> TensorMap {
    if place.address == 0 {
        return TensorMap::default();
    }
    let [batch, heads, rows, columns] = place.extents.map(|x| x as u64);
    // The stride of an axis of extent 1 is not walked, but must be one.
    let stride = |axis: usize, dense: u64| match place.extents[axis] {
        1 => 2 * dense,
        _ => 2 * place.strides[axis] as u64,
    };
    let extents = [columns, rows, heads, batch];
    let of_rows = stride(2, columns);
    let strides = [of_rows, stride(1, columns * rows), stride(0, columns * rows * heads), 0];
    TensorMap::new(storage, place.address, extents, strides, [64, height, 1, 1])
}
