//! The arguments of kernels for sm90a: the structures of `pairs`, `attention/sm90a_forward.cu` and `sm90a_backward*`.

use super::pair_args::{Sequence, Span, Task, Tile};
use crate::args::{ConstPtr, Half, Pointee, Ptr, kernel_args, pointees};
use crate::strided::{StridedTensor, strided_args};
use crate::tensor_map::TensorMap;
use etalon_problem::Dtype;

/// A tensor of 64 to 256 whole columns for the copy engine, in boxes of so many rows and of 64 columns or all.
pub(crate) fn tensor_map(storage: Dtype, place: StridedTensor, rows: u32, narrow: bool) -> TensorMap {
    let [batch, heads, length, width] = place.extents.map(|x| x as u64);
    let [of_rows, of_heads, of_batch] = place.box_strides();
    TensorMap::new(
        storage,
        place.address,
        [64, length, width / 64, heads, batch],
        [of_rows, 128, of_heads, of_batch, 0],
        [64, rows, if narrow { 1 } else { width as u32 / 64 }, 1, 1],
    )
}

/// Numbers of pairs for the copy engine, in boxes of so many queries and of 64 keys.
pub(crate) fn pair_map(storage: Dtype, place: StridedTensor, rows: u32) -> TensorMap {
    let [batch, heads, queries, keys] = place.extents.map(|x| x as u64);
    let [of_rows, of_heads, of_batch] = place.box_strides();
    let (extents, strides) = ([keys, queries, 1, heads, batch], [of_rows, 128, of_heads, of_batch, 0]);
    TensorMap::new(storage, place.address, extents, strides, [64, rows, 1, 1, 1])
}

pointees! {
    Int2 = "int2",
    /// 16 bytes.
    Piece = "uint4",
}

strided_args! {
    /// A tensor of 16-bit elements.
    pub(crate) struct Elements as "Elements" { Half, batch_stride, head_stride, row_stride }
}

kernel_args! {
    /// Extents, the window of the mask, and how work is shared.
    pub(crate) struct Shape as "Shape" {
        pub batch, heads, key_heads, queries, keys: i32,
        /// Query i sees the keys i + offset − left .. i + offset + right.
        pub left, right, offset: i32,
        /// Above 0 in the forward pass without OPTIONS.
        pub scale: f32,
        /// (batch × head)s whose k and v share the L2 at a time; rows of lse2 and delta of a head.
        pub heads_per_group, padded: i32,
        /// True if the last query of a sequence is aligned with its last key.
        pub bottom: i32,
        /// Queries and keys of each batch element; with LENGTHS 1 alone.
        pub lengths: ConstPtr<Int2>,
    }

    /// Sequences in a list: packed ones, and those of batch elements; with LENGTHS 2 alone.
    pub(crate) struct Packed as "Packed" {
        pub sequences: ConstPtr<Sequence>,
        pub by_queries, by_keys: ConstPtr<Task>,
        pub tasks, key_tasks: i32,
    }

    /// A mask that shows each query a range of keys; with WINDOW 2 alone. Ranges are those of positions in sequences.
    pub(crate) struct SpanTables as "SpanTables" {
        /// Of each row, `[batch, queries]`, the keys that it sees.
        pub spans: ConstPtr<Span>,
        /// Of each tile of 64 queries, sequence after sequence, the keys that some row sees, and those that all see.
        pub tiles, common: ConstPtr<Tile>,
        /// Of each tile of 64 keys the tiles of queries that may see some of it.
        pub seen_by: ConstPtr<Tile>,
    }

    /// The unit of scores.
    struct Unit as "Unit" {
        /// A factor of products, 1/unit, and the unit.
        scale, over, natural: f32,
    }

    /// The bias, the unit and the softcap of scores.
    pub(crate) struct ScoreOptions as "ScoreOptions" {
        /// `[batch, head, query, key]`.
        bias: Elements,
        unit: Unit,
        /// The softcap over the unit (0: none), 1/softcap, and the scale.
        cap, inverse_cap, factor: f32,
    }

    /// Rows in pieces of 16 bytes.
    pub(crate) struct Pieces as "Pieces" {
        data: Ptr<Piece>,
        batch, head, row: i64,
    }

    pub(crate) struct ForwardArgs as "ForwardArgs" {
        pub q, k, v, o: TensorMap,
        /// With OPTIONS 2 alone, and so in `BackwardArgs`.
        pub bias: TensorMap,
        pub lse: Ptr<f32>,
        pub sinks: ConstPtr<f32>,
        pub counter: Ptr<u32>,
        /// As those of [`PairArgs`](super::pair_args::PairArgs).
        pub flags: Ptr<u32>,
        pub shape: Shape,
        pub packed: Packed,
        pub options: ScoreOptions,
        /// o as `o` says, for rows that end within a box.
        pub o_rows: Elements,
        pub spans: SpanTables,
    }

    /// The arguments of `delta`, `keys`, `queries` and `values`.
    pub(crate) struct BackwardArgs as "BackwardArgs" {
        pub q, k, v, dout, dq, dk, dv: TensorMap,
        pub bias, dbias_boxes: TensorMap,
        pub lse2, delta: Ptr<f32>,
        /// The same for each row of the arrays, `[batch, heads, queries]`.
        pub delta_rows: Ptr<f32>,
        pub lse: ConstPtr<f32>,
        pub dlse, sinks: ConstPtr<f32>,
        pub o, dout_rows: Pieces,
        /// As those of [`ForwardArgs`].
        pub flags, counter: Ptr<u32>,
        /// Of keys or of queries.
        pub tiles: i32,
        pub shape: Shape,
        pub packed: Packed,
        pub options: ScoreOptions,
        /// As the maps say, for rows that end within a box.
        pub dq_rows, dk_rows, dv_rows: Elements,
        /// As `dbias_boxes` says.
        pub dbias: Elements,
        pub spans: SpanTables,
        /// Of `fused`: sums of dq, of 64 queries after the other, and of each of these whose turn it is.
        pub dq_sums: Ptr<f32>,
        pub turns: Ptr<u32>,
    }
}

/// True if scores may be kept over a scale.
pub(crate) fn is_unit(scale: f32) -> bool {
    scale > 1e-18 && scale < 1e18
}

impl ScoreOptions {
    /// The unit of scores is the scale where that is above 0 and of usual size. A cap of 0: none.
    pub fn new(bias: StridedTensor, scale: f32, cap: f32) -> Self {
        let unit = match is_unit(scale) {
            true => Unit { scale: 1.0, over: 1.0 / scale, natural: scale },
            false => Unit { scale, over: 1.0, natural: 1.0 },
        };
        let (cap, inverse_cap) = (cap * unit.over, 1.0 / cap);
        ScoreOptions { bias: bias.into(), unit, cap, inverse_cap, factor: scale }
    }
}

impl From<StridedTensor> for Pieces {
    fn from(place: StridedTensor) -> Self {
        let [batch, head, row, _] = place.strides.map(|stride| stride / 8);
        Pieces { data: place.address.into(), batch, head, row }
    }
}
