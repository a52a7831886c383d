//! The arguments of kernels that walk pairs of queries and keys: `pairs/problem.cuh`, `attention/partials.cuh`.

use super::Steps;
use crate::args::{Byte, ConstPtr, Pointee, Ptr, filled, int, kernel_args, pointees};
use crate::strided::TensorArgs;

pointees! {
    /// A sequence: its batch element, first rows, extents and first tile.
    Sequence = "Sequence",
    /// The keys that some row of a tile may see.
    Tile = "Tile",
    /// The keys that a row may see.
    Span = "Span",
    /// The tiles of a block.
    Task = "Task",
    /// Numbers of a row that kernels keep.
    Numbers = "Numbers",
}

kernel_args! {
    /// The problem, and the columns of a launch.
    pub(crate) struct PairArgs as "PairArgs" {
        pub q, k, v, bias, o, dout, dq, dk, dv, dbias: TensorArgs,
        /// Of every row: `[batch, heads, queries]`.
        pub lse: Ptr<f32>,
        /// 0: everywhere −1.
        pub delta: Ptr<f32>,
        pub dlse: Ptr<f32>,
        /// Of every head.
        pub sinks: Ptr<f32>,
        pub dsinks: Ptr<f32>,
        /// `[.., .., queries, keys]`, beside the spans; 0: the spans alone.
        pub allowed: ConstPtr<Byte>,
        pub allowed_batch, allowed_head: i64,
        pub sequences: ConstPtr<Sequence>,
        /// `[batch, queries]`.
        pub spans: ConstPtr<Span>,
        /// Of each sequence from its `first_tile` on.
        pub tiles: ConstPtr<Tile>,
        pub tasks: ConstPtr<Task>,
        /// Of all groups together, and then of the key heads of each sequence: a sum or a result is not finite.
        pub flags: Ptr<u32>,
        pub batch, heads, key_heads, queries, keys, dim, value_dim, bias_heads: i32,
        /// The first columns of this launch's accumulators.
        pub first_dim, first_value: i32,
        pub scale: f32,
        /// 0: none.
        pub cap: f32,
        /// True if dq is f32 whatever the storage.
        pub wide: i32,
        /// Blocks of `queries` and `keys`.
        pub blocks: i32,
    }

    /// Parts of the gradient of q by tiles of keys.
    pub(crate) struct PartialArgs as "Slots" {
        /// `[key tiles, batch, heads, queries, columns]`: the tiles of keys first .. end.
        pub at: Ptr<f32>,
        /// `[batch, heads, queries, columns]`: the sums of the tiles before.
        pub totals: Ptr<f32>,
        pub first, end: i32,
        /// True if there are no tiles behind.
        pub last: i32,
    }

    pub(crate) struct FusedArgs as "FusedArgs" {
        pub c: PairArgs,
        pub slots: PartialArgs,
    }

    pub(crate) struct FallbackArgs as "FallbackArgs" {
        /// With tiles of queries.
        pub c: PairArgs,
        /// Tiles of keys.
        pub key_tasks: ConstPtr<Task>,
        /// Tiles times heads; 0 where dq is not wanted.
        pub query_blocks: i32,
        /// The same of keys; 0 where neither dk nor dv is wanted.
        pub key_blocks: i32,
    }
}

pub(crate) fn wanted(tensor: TensorArgs, columns: usize) -> usize {
    if tensor.is_there() { columns } else { 0 }
}

impl PairArgs {
    /// The launch whose accumulators begin at these columns.
    pub fn at(self, [first_dim, first_value]: [usize; 2]) -> Self {
        let (first_dim, first_value) = (first_dim as i32, first_value as i32);
        PairArgs { first_dim, first_value, ..self }
    }

    pub fn over(self, tasks: u64) -> Self {
        PairArgs { tasks: tasks.into(), ..self }
    }

    pub fn new(steps: &Steps<'_>) -> Self {
        let prepared = steps.prepared;
        let (scores, tables) = (prepared.scores, &prepared.tables);
        let (e, flags) = (&scores.extents, prepared.spec.counts.flags);
        let pairs = (e.queries * e.keys) as i64;
        let heads = flags.unwrap_or(1) as i64;
        let (tensor, table) = (|name| steps.tensor(name), |range| steps.table(range));
        // Lazy attention has a bias of another shape.
        let by_pair = |name| scores.bias.map_or(TensorArgs::default(), |_| tensor(name));
        let numbers = |name| steps.address(name);
        PairArgs {
            delta: steps.range(prepared.delta).into(),
            flags: steps.group_flags().into(),
            allowed: flags.map_or(0, |_| table(tables.allowed)).into(),
            allowed_batch: heads * pairs,
            allowed_head: if heads > 1 { pairs } else { 0 },
            tasks: table(tables.by_queries).into(),
            heads: int(e.query_heads),
            value_dim: int(steps.values()),
            bias_heads: scores.bias.map_or(0, |bias| int(bias.heads)),
            scale: scores.scale() as f32,
            cap: scores.softcap.unwrap_or(0.0) as f32,
            ..filled!(PairArgs:
                names(tensor) [q k v o dout dq dk dv]
                names(by_pair) [bias dbias]
                names(numbers) [lse dlse sinks dsinks]
                fields(tables, table) [sequences spans tiles]
                fields(e, int) [batch key_heads queries keys dim]
            )
        }
    }
}
