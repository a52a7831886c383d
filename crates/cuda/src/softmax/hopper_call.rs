//! What the kernels for compute capability 9.0 are told: the structures of `hopper.cuh`, `sm90a_forward.cu` and
//! `sm90a_backward.cuh`.

use crate::gpu::Device;
use crate::moves::Place;
use crate::old_map::{EncodedBox, EncodedMap};
use cudarc::driver::DeviceRepr;
use etalon_problem::{Dtype, Error};

/// The copy engine's map of a tensor of whole columns, 64 or 128 of them, in boxes of so many rows and of 64 columns
/// or all.
pub(crate) fn tensor_map(
    device: &Device,
    storage: Dtype,
    place: Place,
    rows: u32,
    narrow: bool,
) -> Result<EncodedMap, Error> {
    let [batch, heads, length, width] = place.extents.map(|x| x as u64);
    // The stride of an axis of extent 1 is not walked, but must be one.
    let own = |axis: usize, dense: u64| match place.extents[axis] {
        1 => dense,
        _ => 2 * place.strides[axis] as u64,
    };
    let (rows_apart, heads_apart) = (own(2, 2 * width), own(1, 2 * width * length));
    let boxed = EncodedBox {
        address: place.address,
        extents: [64, length, width / 64, heads, batch],
        strides: [rows_apart, 128, heads_apart, own(0, 2 * width * length * heads), 0],
        extents_of_box: [64, rows, if narrow { 1 } else { width as u32 / 64 }, 1, 1],
    };
    boxed.map(device, storage)
}

/// `Call` of `sm90a_forward.cu`.
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Forward {
    pub q: EncodedMap,
    pub k: EncodedMap,
    pub v: EncodedMap,
    pub o: EncodedMap,
    pub lse: u64,
    pub sinks: u64,
    pub counter: u64,
    pub shape: Shape,
    pub packed: Packed,
    pub options: Scored,
    pub o_rows: Elements,
}

/// `Shape` of `hopper.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Shape {
    pub batch: i32,
    pub heads: i32,
    pub key_heads: i32,
    pub queries: i32,
    pub keys: i32,
    pub left: i32,
    pub right: i32,
    pub offset: i32,
    pub scale: f32,
    pub heads_per_group: i32,
    pub padded: i32,
    pub bottom: i32,
    pub lengths: u64,
}

/// `Packed` of `hopper.cuh`: tables of packed sequences.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Packed {
    pub sequences: u64,
    pub by_queries: u64,
    pub by_keys: u64,
    pub tasks: i32,
    pub key_tasks: i32,
}

/// `Elements` of `hopper.cuh`: a tensor by the address and the strides of its elements.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Elements {
    data: u64,
    strides: [i64; 3],
}

impl From<Place> for Elements {
    /// An axis of extent 1 has the stride 0: a shared bias.
    fn from(place: Place) -> Self {
        let stride = |axis: usize| if place.extents[axis] == 1 { 0 } else { place.strides[axis] };
        Elements { data: place.address, strides: [stride(0), stride(1), place.strides[2]] }
    }
}

/// `Options` of `hopper.cuh`: what scores are made of beside products.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Scored {
    bias: Elements,
    /// What products are multiplied by, over the unit; 1/unit; the unit.
    unit: [f32; 3],
    cap: f32,
    inverse_cap: f32,
    scale: f32,
}

impl Scored {
    /// The unit of scores is the scale where that is above 0 and of usual size. A cap of 0: none.
    pub fn new(bias: Place, scale: f32, cap: f32) -> Self {
        let usual = scale > 1e-18 && scale < 1e18;
        let unit = if usual { [1.0, 1.0 / scale, scale] } else { [scale, 1.0, 1.0] };
        Scored { bias: bias.into(), unit, cap: cap * unit[1], inverse_cap: 1.0 / cap, scale }
    }
}

/// `Pieces` of `sm90a_backward.cuh`: rows in pieces of 16 bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Pieces {
    pub data: u64,
    pub strides: [i64; 3],
}

impl From<Place> for Pieces {
    fn from(place: Place) -> Self {
        let [batch, head, row, _] = place.strides.map(|stride| stride / 8);
        Pieces { data: place.address, strides: [batch, head, row] }
    }
}

/// `Call` of `sm90a_backward.cuh`.
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Backward {
    pub q: EncodedMap,
    pub k: EncodedMap,
    pub v: EncodedMap,
    pub dout: EncodedMap,
    pub dq: EncodedMap,
    pub dk: EncodedMap,
    pub dv: EncodedMap,
    pub lse2: u64,
    pub delta: u64,
    pub lse: u64,
    pub dlse: u64,
    pub o: Pieces,
    pub dout_rows: Pieces,
    pub found: u64,
    pub counter: u64,
    pub tiles: i32,
    pub when: u32,
    pub shape: Shape,
    pub packed: Packed,
    pub options: Scored,
    pub dq_rows: Elements,
    pub dk_rows: Elements,
    pub dv_rows: Elements,
}

// SAFETY: the fields, their types and their order are those of `Call` in `sm90a_forward.cu`.
unsafe impl DeviceRepr for Forward {}
// SAFETY: as above, in `sm90a_backward.cuh`.
unsafe impl DeviceRepr for Backward {}
