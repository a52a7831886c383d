//! Groups, the key heads of sequences, in which a sum of tensor cores is not finite: their flags, and the kernel that
//! computes their results again, `kernels/attention/fallback.cu`.

use crate::family::Family;
use crate::memory::{Layout, MemoryRange};
use crate::softmax::Steps;
use crate::softmax::pair_args::{FallbackArgs, PairArgs};
use crate::softmax::spec::Spec;
use crate::step::Work;
use crate::tensor_args::TensorArgs;
use etalon_problem::Error;

/// Takes a range for words that are 0 at first: counters from which blocks of sm90a claim tiles, one for each of two
/// kernels; and flags, of all groups together and then of each.
pub(crate) fn reserve(spec: &Spec, layout: &mut Layout) -> Result<MemoryRange, Error> {
    let groups = spec.counts.sequences * spec.extents.key_heads;
    layout.named("counters of tiles, and flags of key heads", 4 * (3 + groups))
}

impl Steps<'_> {
    /// Adds a fill of the counters and flags.
    pub(super) fn clear_flags(&self) {
        self.prepared.flags.into_iter().for_each(|flags| self.clear(flags));
    }

    /// The counter of a kernel of sm90a.
    pub(super) fn counter(&self, kernel: u64) -> u64 {
        self.range(self.prepared.flags) + 4 * kernel
    }

    /// The flag of all groups, and behind it that of each; 0 if nobody raises them.
    pub(super) fn group_flags(&self) -> u64 {
        self.prepared.flags.map_or(0, |_| self.counter(2))
    }
}

/// True if kernels write a gradient; not dq where it is a multiple of a `gradient` that is given.
pub(crate) fn writes(steps: &Steps<'_>, name: &str) -> bool {
    steps.is_there(name) && !(name == "dq" && steps.prepared.has_gradient())
}

/// dq, dk and dv of groups whose flags kernels have raised.
pub(crate) fn backward(steps: &Steps<'_>) -> Result<(), Error> {
    let (e, prepared) = (&steps.scores().extents, steps.prepared);
    let result = |name| if writes(steps, name) { steps.tensor(name) } else { TensorArgs::default() };
    let [dq, dk, dv] = ["dq", "dk", "dv"].map(result);
    let blocks = |wanted: bool, tiles: usize, heads: usize| if wanted { tiles * heads } else { 0 };
    let queries = blocks(dq.is_there(), prepared.counts.by_queries, e.query_heads);
    let keys = blocks(dk.is_there() || dv.is_there(), prepared.counts.by_keys, e.key_heads);
    let args = FallbackArgs {
        c: PairArgs { dq, dk, dv, ..PairArgs::new(steps) },
        key_tasks: steps.table(prepared.tables.by_keys).into(),
        query_blocks: queries as i32,
        key_blocks: keys as i32,
    };
    let variant = prepared.spec.shape().portable(Family::AttentionFallback);
    // Some blocks for each multiprocessor, which take turns. Tiles of one head are `heads` apart: where the number of
    // blocks is odd, all have a part of them.
    let most = (4 * steps.multiprocessors() - 1) | 1;
    let grid = ((queries + keys).min(most), variant.threads());
    steps.launch_work((&variant, "fallback"), grid, &args, Work::of(&variant, 0))
}
