//! Tensors of four axes as the copy engine of compute capability 9.0 reads and writes them.

use crate::moves::StridedTensor;
use crate::parts::Parts;
use crate::tensor_map::TensorMap;
use etalon_problem::Dtype;

/// True if the copy engine takes every operand where kernels find it.
pub(super) fn takes_all(parts: &Parts) -> bool {
    let names = ["q", "k", "v", "o", "dout", "dq", "dk", "dv"];
    parts.have_whole_rows(&names) && names.iter().filter_map(|name| parts.part(name)).all(|part| takes(&part.place(0)))
}

/// True if it takes a tensor of 16-bit elements that begins at a multiple of 16 bytes.
fn takes(place: &StridedTensor) -> bool {
    place.extents[3].is_multiple_of(8) && place.elements() > 0 && place.has_boxes()
}

/// A tensor in boxes of 64 columns and `height` rows; none where it is not there.
pub(super) fn map(storage: Dtype, place: StridedTensor, height: u32) -> TensorMap {
    if place.address == 0 {
        return TensorMap::default();
    }
    let [batch, heads, rows, columns] = place.extents.map(|x| x as u64);
    let [of_rows, of_heads, of_batch] = place.box_strides();
    let extents = [columns, rows, heads, batch];
    let strides = [of_rows, of_heads, of_batch, 0];
    TensorMap::new(storage, place.address, extents, strides, [64, height, 1, 1])
}
