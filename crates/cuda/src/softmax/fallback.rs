//! Groups, the key heads of sequences, in which a sum of tensor cores is not finite: their flags, and the kernel that
//! computes them again, `kernels/attention/fallback.cu`.

use super::Steps;
use super::pair_args::{FallbackArgs, PairArgs};
use super::prepared::Prepared;
use crate::memory::{Layout, MemoryRange};
use crate::options::Level;
use crate::strided::TensorArgs;
use crate::variant::width;
use etalon_problem::{Dtype, Pass, Result};

/// As [`range`]; none where no kernel looks at it.
pub(crate) fn reserve(prepared: &Prepared<'_>, layout: &mut Layout) -> Result<Option<MemoryRange>> {
    let has_flags = match prepared.pass {
        Pass::Forward => prepared.choice.level == Level::Sm90a || has_forward(prepared),
        Pass::Backward => prepared.choice.level != Level::Portable,
        _ => prepared.spec.has_tensor_second(),
    };
    let is_fused = prepared.choice.level == Level::Sm90a && prepared.spec.fuses_sm90a();
    let turns = if is_fused { prepared.spec.sums_of_rows() } else { 0 };
    has_flags.then(|| range(prepared, turns, layout)).transpose()
}

/// Range of words that are 0 at first: counters from which blocks of sm90a claim tiles, of two kernels; flags,
/// of all groups together and then of each; and so many numbers that say whose turn it is to add to sums of dq.
pub(crate) fn range(prepared: &Prepared<'_>, turns: usize, layout: &mut Layout) -> Result<MemoryRange> {
    layout.named("counters of tiles, and flags of key heads", 4 * (3 + groups(prepared) + turns))
}

fn groups(prepared: &Prepared<'_>) -> usize {
    prepared.spec.counts.sequences * prepared.scores.extents.key_heads
}

impl Steps<'_> {
    pub(super) fn clear_flags(&self) {
        self.prepared.flags.into_iter().for_each(|flags| self.clear(flags));
    }

    pub(super) fn counter(&self, kernel: u64) -> u64 {
        self.range(self.prepared.flags) + 4 * kernel
    }

    /// The flag of all groups, and behind it that of each; 0 if nobody raises them.
    pub(super) fn group_flags(&self) -> u64 {
        self.prepared.flags.map_or(0, |_| self.counter(2))
    }

    /// The numbers behind these that say whose turn it is.
    pub(super) fn turns(&self) -> u64 {
        self.counter(3 + groups(self.prepared) as u64)
    }
}

/// True if kernels write a gradient: not dq where it is a multiple of a given `gradient`.
pub(crate) fn writes(steps: &Steps<'_>, name: &str) -> bool {
    steps.is_there(name) && !(name == "dq" && steps.prepared.has_gradient())
}

/// True if kernels of a forward pass raise flags: an lse of 16-bit operands alone needs none.
pub(crate) fn has_forward(prepared: &Prepared<'_>) -> bool {
    prepared.choice.level != Level::Portable && (prepared.spec.value_dim.is_some() || prepared.storage == Dtype::F32)
}

/// o and lse of groups whose flags kernels have raised.
pub(crate) fn forward(steps: &Steps<'_>) -> Result<()> {
    let (args, prepared) = (PairArgs::new(steps), steps.prepared);
    let query_blocks = steps.query_blocks() as i32;
    let columns = prepared.spec.value_dim.filter(|_| args.o.is_there()).unwrap_or(1);
    (0..columns).step_by(width(columns)).try_for_each(|first| {
        launch(steps, false, FallbackArgs { c: args.at([0, first]), query_blocks, ..FallbackArgs::default() })
    })
}

/// dq, dk and dv of groups whose flags kernels have raised.
pub(crate) fn backward(steps: &Steps<'_>) -> Result<()> {
    let result = |name| if writes(steps, name) { steps.tensor(name) } else { TensorArgs::default() };
    let [dq, dk, dv] = ["dq", "dk", "dv"].map(result);
    let tiles = |wanted: bool, all: usize| if wanted { all as i32 } else { 0 };
    let args = FallbackArgs {
        c: PairArgs { dq, dk, dv, ..PairArgs::new(steps) },
        key_tasks: steps.table(steps.prepared.tables.by_keys).into(),
        query_blocks: tiles(dq.is_there(), steps.query_blocks()),
        key_blocks: tiles(dk.is_there() || dv.is_there(), steps.key_blocks()),
    };
    launch(steps, true, args)
}

fn launch(steps: &Steps<'_>, backward: bool, args: FallbackArgs) -> Result<()> {
    let variant = steps.prepared.spec.shape().fallback(backward);
    let tiles = (args.query_blocks + args.key_blocks) as usize;
    steps.launch((&variant, "fallback"), (blocks(steps, tiles), variant.threads()), &args)
}

/// Blocks that take turns at so many tiles: some for each multiprocessor, an odd number, so that all have a part of
/// the tiles of one head, which are `heads` apart.
pub(crate) fn blocks(steps: &Steps<'_>, tiles: usize) -> usize {
    tiles.min((4 * steps.multiprocessors() - 1) | 1)
}
