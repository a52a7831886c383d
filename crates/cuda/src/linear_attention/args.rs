//! The arguments of the kernels of linear_attention.

use super::tables::{Chunk, Line, Run, Segment, Strip};
use crate::args::{ConstPtr, Declaration, Element, Ptr, declarations, kernel_args};
use crate::strided::TensorArgs;
use crate::tensor_map::TensorMap;

kernel_args! {
    /// Every gradient is o of another problem: out_i = Σ_j w_ij x_j + reach_i y_i·state.
    pub(super) struct LinearArgs as "LinearArgs" {
        pub y, y1, b, b1, x, x1, out: TensorArgs,
        /// Operands that dg is made of; of a step q, k and v.
        pub q, q1, k, k1, v, v1, dout, dout1: TensorArgs,
        /// Rows that out, or its part from the state, is multiplied with.
        pub dot: TensorArgs,
        /// States [sequence, head, row] that a sweep begins with, and where it ends.
        pub begin, begin1, end, end1: TensorArgs,
        /// [batch, heads, tokens]
        pub state_dots, dots: Ptr<f32>,
        /// [chunk, key head, D, E]: before a chunk, or behind it; the same behind a chunk.
        pub states, states1, other, other1: Ptr<f32>,
        /// x and y of (R27).
        pub x_dots, y_dots: ConstPtr<f32>,
        /// As `states`, rounded: read by tensor cores.
        pub narrow: Ptr<Element>,
        pub other_narrow: ConstPtr<Element>,
        /// Not 0 if a number is not finite.
        pub found: Ptr<u32>,
        /// Log-decays of heads or tokens, and their tangents.
        pub logs, log_tangents: ConstPtr<f32>,
        /// Tables of `fill_gates`: a plane for each level, then two more.
        pub gates, slopes: Ptr<f32>,
        pub dg, total: Ptr<f32>,
        /// Numbers that `sum_all` and `sum_heads` sum.
        pub numbers: ConstPtr<f32>,
        pub ddscale: ConstPtr<f32>,
        pub chunks: ConstPtr<Chunk>,
        pub strips: ConstPtr<Strip>,
        pub lines: ConstPtr<Line>,
        pub batch, heads, key_heads, tokens, dim, value_dim: i32,
        /// Columns of y and b, and of x and out.
        pub inner, outer: i32,
        /// The first column of the accumulators of this launch.
        pub first: i32,
        /// 1: rows see themselves and later tokens, and are those of key heads.
        pub back: i32,
        /// 1: y is multiplied with the transposed state.
        pub turned: i32,
        /// 1: before the first chunk (back: behind the last) the state is 0; dots are added to those that are there.
        pub blank, add: i32,
        /// 1: a log-decay for each head, not for each token.
        pub by_head: i32,
        /// Treatment of numbers that are not finite: `linear_attention/problem.cuh`.
        pub mode: i32,
        /// Blocks that there would be, if each owned one thing only: `each_block`.
        pub blocks: i32,
        /// σ, of pairs; factors of products with the state, of what is stored, and of `state_dots`.
        pub scale, state_scale, store_scale, dot_scale: f32,
    }

    /// Arguments of `sm90a_*.cu`; results as of [`LinearArgs`]. Boxes have 64 columns and 128 rows, of `out` 64.
    pub(super) struct WalkArgs as "WalkArgs" {
        /// q, k and v, or what takes their places; dout.
        pub y, b, x, dots, out, out_dk, out_dv: TensorMap,
        /// o or dq by its elements; without an address where it is not wanted.
        pub rows: TensorArgs,
        pub dk, dv: TensorArgs,
        /// States [sequence, key head, row] that a sequence begins with, from either end, and where it ends.
        pub begin, begin_back, end: TensorArgs,
        /// [segment, key head, row of D]: the states that other segments begin with, from either end.
        pub between, between_back: TensorArgs,
        /// The log-decay of each key head, or [batch, key head, token].
        pub logs: ConstPtr<f32>,
        /// S before a chunk of the first half of a segment, D behind one of the second: [chunk, key head], tiles of
        /// the columns that kernels are compiled for.
        pub states: Ptr<u32>,
        /// [segment, key head, S or D], in the order of threads: the states in the middle of a segment.
        pub middle: Ptr<f32>,
        /// [key head, chunk, warp]: summed to dg_gamma, and to dσ.
        pub gammas, scales: Ptr<f32>,
        /// [segment, key head]: with log-decays of tokens, the decay of a whole segment.
        pub decays: Ptr<f32>,
        /// x and y of (R27) with log-decays of tokens: [batch, head, token].
        pub x_dots, y_dots: Ptr<f32>,
        /// <S, D> of each chunk: [chunk, key head, warp].
        pub z_dots: Ptr<f32>,
        pub dg: Ptr<f32>,
        /// As that of [`LinearArgs`].
        pub found: Ptr<u32>,
        pub chunks: ConstPtr<Chunk>,
        pub segments: ConstPtr<Segment>,
        pub runs: ConstPtr<Run>,
        pub heads, key_heads, tokens: i32,
        /// As those of [`LinearArgs`]: the rows and the columns of the state.
        pub inner, outer: i32,
        /// Chunks of key heads, for `gradients` and `flow`.
        pub items: i32,
        /// 1: `scan` goes from the last segment to the first.
        pub back: i32,
        /// σ, of pairs and of the factors of the state.
        pub scale, store_scale: f32,
    }
}

pub(crate) const ARGUMENTS: &[Declaration] = declarations![LinearArgs, WalkArgs];
