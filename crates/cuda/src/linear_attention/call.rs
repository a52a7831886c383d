//! What the kernels are told: `Linear` of `linear.cuh`.

use super::Job;
use crate::moves::Place;
use cudarc::driver::DeviceRepr;

/// A tensor of four axes whose rows lie side by side: `Tensor` of `pairs.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Tensor {
    data: u64,
    batch: i64,
    head: i64,
    row: i64,
}

impl Tensor {
    pub fn is_there(&self) -> bool {
        self.data != 0
    }

    /// States of so many key heads, side by side.
    pub fn states(data: u64, key_heads: usize, dim: usize, value_dim: usize) -> Tensor {
        let (row, head) = (value_dim as i64, (dim * value_dim) as i64);
        Tensor { data, batch: key_heads as i64 * head, head, row }
    }
}

/// `Linear` of `linear.cuh`, field by field.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Call {
    pub y: Tensor,
    pub y1: Tensor,
    pub b: Tensor,
    pub b1: Tensor,
    pub x: Tensor,
    pub x1: Tensor,
    pub out: Tensor,
    pub q: Tensor,
    pub q1: Tensor,
    pub k: Tensor,
    pub k1: Tensor,
    pub v: Tensor,
    pub v1: Tensor,
    pub dout: Tensor,
    pub dout1: Tensor,
    pub dot: Tensor,
    pub begin: Tensor,
    pub begin1: Tensor,
    pub end: Tensor,
    pub end1: Tensor,
    pub state_dots: u64,
    pub dots: u64,
    pub states: u64,
    pub states1: u64,
    pub other: u64,
    pub other1: u64,
    pub x_dots: u64,
    pub y_dots: u64,
    pub narrow: u64,
    pub other_narrow: u64,
    pub found: u64,
    pub logs: u64,
    pub log_tangents: u64,
    pub gates: u64,
    pub slopes: u64,
    pub dg: u64,
    pub total: u64,
    pub numbers: u64,
    pub ddscale: u64,
    pub chunks: u64,
    pub strips: u64,
    pub lines: u64,
    pub batch: i32,
    pub heads: i32,
    pub key_heads: i32,
    pub tokens: i32,
    pub dim: i32,
    pub value_dim: i32,
    pub inner: i32,
    pub outer: i32,
    pub first: i32,
    pub back: i32,
    pub turned: i32,
    pub blank: i32,
    pub add: i32,
    pub by_head: i32,
    pub mode: i32,
    pub blocks: i32,
    pub scale: f32,
    pub state_scale: f32,
    pub store_scale: f32,
    pub dot_scale: f32,
}

// SAFETY: the fields, their types and their order are those of `Linear` in `linear.cuh`, and it holds no
// reference of the host.
unsafe impl DeviceRepr for Call {}

/// An operand of four axes; none where it is not there. An axis of extent 1 has the stride 0.
pub(super) fn tensor(job: &Job<'_>, name: &str) -> Tensor {
    let Place { address, extents, strides } = job.place(name);
    let stride = |axis: usize| if extents[axis] == 1 { 0 } else { strides[axis] };
    Tensor { data: address, batch: stride(0), head: stride(1), row: strides[2] }
}

impl Call {
    /// What all kernels of a pass are told.
    pub fn new(job: &Job<'_>) -> Call {
        let prepared = job.prepared;
        let (e, rooms) = (&prepared.problem.extents, &prepared.rooms);
        let [chunks, strips, lines] = prepared.tables.addresses(job.tables);
        let first = |names: [&str; 2]| {
            let found = names.map(|name| job.address(name));
            if found[0] != 0 { found[0] } else { found[1] }
        };
        let at = |room| job.room(room);
        let scale = prepared.problem.scale as f32;
        Call {
            q: tensor(job, "q"),
            q1: tensor(job, "ddq"),
            k: tensor(job, "k"),
            k1: tensor(job, "ddk"),
            v: tensor(job, "v"),
            v1: tensor(job, "ddv"),
            dout: tensor(job, "dout"),
            dout1: tensor(job, "cot_o"),
            logs: first(["g", "g_gamma"]),
            log_tangents: first(["ddg", "ddg_gamma"]),
            by_head: i32::from(prepared.has("g_gamma")),
            gates: at(rooms.gates),
            slopes: at(rooms.slopes),
            ddscale: job.address("ddscale"),
            found: at(rooms.found),
            chunks,
            strips,
            lines,
            batch: e.batch as i32,
            heads: e.query_heads as i32,
            key_heads: e.key_heads as i32,
            tokens: e.tokens as i32,
            dim: e.dim as i32,
            value_dim: prepared.problem.value_dim as i32,
            scale,
            state_scale: 1.0,
            store_scale: 1.0,
            dot_scale: 1.0,
            ..Call::default()
        }
    }

    /// The launch whose accumulators begin at a column.
    pub fn at(self, first: usize) -> Call {
        Call { first: first as i32, ..self }
    }
}
