//! What the backward pass of `sm90a_backward.cu` does where a number is not finite: its structures.

use crate::moves::Place;
use crate::softmax::hopper_call::{Elements, Packed, Pieces, Shape};
use cudarc::driver::DeviceRepr;

/// An operand, and a dense copy of it in which NaN is 0.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cleansed {
    from: Pieces,
    to: u64,
    heads: i32,
    rows: i32,
    by_keys: i32,
    pieces: u64,
}

impl Cleansed {
    /// `by_keys`: its rows are those of k.
    pub fn new(from: Place, to: Place, by_keys: bool) -> Self {
        let [_, heads, rows, _] = to.extents;
        let pieces = (to.elements() / 8) as u64;
        Cleansed {
            from: from.into(),
            to: to.address,
            heads: heads as i32,
            rows: rows as i32,
            by_keys: by_keys.into(),
            pieces,
        }
    }
}

/// A result of whole columns that was computed of finite numbers, and where that of the portable kernels lies.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Merged {
    from: u64,
    to: Elements,
    heads: i32,
    rows: i32,
    columns: i32,
    by_keys: i32,
    elements: u64,
}

impl Merged {
    /// `by_keys`: its rows are those of k.
    pub fn new(from: Place, to: Place, by_keys: bool) -> Self {
        let [_, heads, rows, columns] = to.extents;
        Merged {
            from: from.address,
            to: to.into(),
            heads: heads as i32,
            rows: rows as i32,
            columns: columns as i32,
            by_keys: by_keys.into(),
            elements: to.elements() as u64,
        }
    }
}

/// `Mend` of `sm90a_backward.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mend {
    /// What the tensor cores read.
    pub operands: [Cleansed; 4],
    /// What they write.
    pub results: [Merged; 3],
    pub lse2: u64,
    pub delta: u64,
    pub stats: i64,
    pub found: u64,
    pub shape: Shape,
    pub packed: Packed,
    pub sequences: i32,
}

// SAFETY: the fields, their types and their order are those of `Mend` in `sm90a_backward.cu`, and it holds no
// reference of the host.
unsafe impl DeviceRepr for Mend {}
