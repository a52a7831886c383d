//! The arguments and the memory of the kernels of lazy_attention of the levels portable and sm80:
//! `kernels/lazy_attention/`.

use super::Steps;
use super::pair_args::{Numbers, PairArgs};
use super::prepared::Prepared;
use crate::args::{ConstPtr, Ptr, filled, int, kernel_args};
use crate::memory::{Layout, MemoryRange};
use crate::strided::TensorArgs;
use etalon_problem::{Align, Result};

#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    /// τ/n, 1/n, Δ − dlse and (1/n) Σ a g of every row.
    pub numbers: MemoryRange,
    pub active: MemoryRange,
    pub windows: Option<MemoryRange>,
}

impl Memory {
    pub fn new(prepared: &Prepared<'_>, layout: &mut Layout) -> Result<Memory> {
        let (scores, counts) = (prepared.scores, &prepared.spec.counts);
        let heads = scores.extents.query_heads;
        Ok(Memory {
            numbers: layout.range(16 * scores.row_shape().iter().product::<usize>())?,
            active: layout.range(4 * counts.tiles * heads)?,
            windows: layout.array_if(prepared.has("dbias"), 4, &[counts.by_keys, heads, reach(prepared)])?,
        })
    }
}

/// W, or as many distances as the extents of the problem have.
fn reach(prepared: &Prepared<'_>) -> usize {
    let e = &prepared.scores.extents;
    prepared.distance_bias.map_or(0, |bias| bias.width.min(e.queries.max(e.keys)))
}

kernel_args! {
    pub(super) struct LazyArgs as "LazyArgs" {
        /// Without bias, softcap and sinks.
        pub c: PairArgs,
        /// f32: Σ a P v (E47); where there is one, `values` writes it in place of o.
        pub pv: TensorArgs,
        /// `[heads, width]`.
        pub bias: ConstPtr<f32>,
        /// `[heads]`.
        pub tau: ConstPtr<f32>,
        /// As bias and tau.
        pub dbias, dtau: Ptr<f32>,
        /// `[batch, heads, queries]`.
        pub numbers: Ptr<Numbers>,
        /// Of each tile of queries and head: stripes of keys that may hold an active pair.
        pub active: Ptr<u32>,
        /// `[tasks by keys, heads, reach]`: what each adds to dbias.
        pub windows: Ptr<f32>,
        /// In the fallback: tiles of all groups.
        pub tiles: i32,
        /// W.
        pub width: i32,
        /// Distances that occur below it.
        pub reach: i32,
        /// True if distances are counted from the last query and key.
        pub bottom: i32,
        /// Tasks by keys.
        pub windowed: i32,
    }

    /// Arguments of `measure` of `lazy_attention/portable_backward.cu`.
    pub(super) struct MeasureArgs as "MeasureArgs" {
        pub lazy: LazyArgs,
        /// Of every row, in the order of `Figure`: 0 at first.
        pub figures: Ptr<f32>,
        /// `[batch, heads, tiles, tiles]`: whether a pair of a tile is visible (1), or active (2); 0 at first.
        pub states: Ptr<u32>,
        /// Of these tiles, which lie on the arrays.
        pub tile_queries, tile_keys: i32,
    }
}

impl LazyArgs {
    pub fn new(steps: &Steps<'_>, memory: &Memory) -> Self {
        let bias = steps.prepared.distance_bias;
        let (address, range) = (|name| steps.address(name), |range| steps.at(range));
        LazyArgs {
            c: PairArgs::new(steps),
            width: int(bias.map_or(0, |bias| bias.width)),
            reach: int(reach(steps.prepared)),
            bottom: bias.is_some_and(|bias| bias.align == Align::BottomRight).into(),
            windowed: int(steps.prepared.spec.counts.by_keys),
            ..filled!(LazyArgs: names(address) [bias tau dbias dtau] fields(memory, range) [numbers active])
        }
    }

    /// The launch whose accumulators begin at these columns.
    pub fn at(self, columns: [usize; 2]) -> Self {
        LazyArgs { c: self.c.at(columns), ..self }
    }
}
