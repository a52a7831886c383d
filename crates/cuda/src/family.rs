//! Kernels that are compiled together: their sources, and the architectures that they serve.

/// A file of `kernels`, and its text.
type Text = (&'static str, &'static str);

/// Files of `kernels`, each with its text.
macro_rules! texts {
    [$($file:literal),* $(,)?] => {
        &[$(($file, include_str!(concat!("kernels/", $file)))),*]
    };
}

// The rooms of the prelude that families share.
const TILE: &[Text] = texts!["tile.cuh"];
const FEED: &[Text] = texts!["tile.cuh", "feed.cuh", "wgmma.cuh"];
const HOPPER: &[Text] = texts!["tile.cuh", "feed.cuh", "wgmma.cuh", "hopper.cuh", "spans.cuh"];
const WARPS: &[Text] = texts!["tile.cuh", "pairs.cuh", "copies.cuh", "warps.cuh"];
const FFMA: &[Text] = texts!["tile.cuh", "pairs.cuh", "copies.cuh", "ffma.cuh"];
const MMA: &[Text] =
    texts!["tile.cuh", "pairs.cuh", "copies.cuh", "warps.cuh", "mma.cuh", "rows.cuh"];

/// Kernels that are compiled together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// attention and attention_lse in fused multiply-adds.
    Portable,
    /// Their second order in fused multiply-adds.
    Second,
    /// lazy_attention in fused multiply-adds.
    Lazy,
    /// lazy_attention on tensor cores of any device.
    LazyTensor,
    /// The forward pass of lazy_attention on the tensor cores of compute capability 9.0.
    HopperLazyForward,
    /// Its backward pass on them.
    HopperLazyBackward,
    /// The first order of attention and attention_lse on tensor cores of any device.
    Tensor,
    /// Their backward pass on them in one pass by keys, with what these add to dq in memory.
    TensorFused,
    /// Their backward pass on them, of wider operands.
    TensorWide,
    /// Their first order on them, of f32.
    TensorF32,
    /// Their second order on them, of bf16.
    TensorSecond,
    /// Their forward pass on the tensor cores of compute capability 9.0.
    HopperForward,
    /// Their backward pass on them.
    HopperBackward,
    /// linear_attention in fused multiply-adds.
    Linear,
    /// Its second order in fused multiply-adds.
    LinearSecond,
    /// linear_cross_entropy in fused multiply-adds.
    CrossEntropy,
    /// What shards of its classes need besides.
    CrossEntropyShards,
    /// Its first order on the tensor cores of compute capability 9.0.
    HopperCrossEntropy,
    /// Its first order on tensor cores of any device.
    LinearTensor,
    /// Its first order on the tensor cores of compute capability 9.0.
    HopperLinear,
    /// Copies and fills of tensors with strides.
    Moves,
    /// The tables of lengths, offsets and masks that lie on the device.
    Tables,
    /// The most that fused multiply-adds do.
    Peak,
    /// The most that the tensor cores of any device do by `mma.sync`.
    TensorPeak,
    /// The most that the tensor cores of compute capability 9.0 do.
    HopperPeak,
}

impl Family {
    /// The texts that make its source, in order: rooms of the prelude, then the kernels.
    pub(crate) fn texts(self) -> Vec<Text> {
        let (prelude, own): (&[Text], &[Text]) = match self {
            Family::Portable => {
                (FFMA, texts!["slots.cuh", "fused.cuh", "portable.cu", "collect.cu"])
            }
            Family::Second => (
                FFMA,
                texts!["slots.cuh", "fused.cuh", "second.cuh", "portable_second.cu", "collect.cu"],
            ),
            Family::Lazy => (FFMA, texts!["activity.cuh", "lazy.cuh", "lazy.cu"]),
            Family::LazyTensor => (
                MMA,
                texts![
                    "activity.cuh",
                    "lazy.cuh",
                    "lazy_sm80.cuh",
                    "lazy_sm80_forward.cu",
                    "lazy_sm80_backward.cu"
                ],
            ),
            Family::HopperLazyForward => (
                HOPPER,
                texts![
                    "activity.cuh",
                    "sm90a_lazy.cuh",
                    "sm90a_lazy_feed.cuh",
                    "sm90a_lazy_forward.cu"
                ],
            ),
            Family::HopperLazyBackward => (
                HOPPER,
                texts![
                    "activity.cuh",
                    "sm90a_lazy.cuh",
                    "sm90a_lazy_feed.cuh",
                    "sm90a_lazy_queries.cu",
                    "sm90a_lazy_keys.cu"
                ],
            ),
            Family::Tensor => {
                (MMA, texts!["slots.cuh", "sm80.cuh", "sm80_forward.cu", "sm80_backward.cu"])
            }
            Family::TensorWide => (MMA, texts!["slots.cuh", "sm80.cuh", "sm80_backward.cu"]),
            Family::TensorFused => (
                MMA,
                texts![
                    "slots.cuh",
                    "sm80.cuh",
                    "sm80_slots.cuh",
                    "sm80_backward.cu",
                    "sm80_fused.cu",
                    "collect.cu"
                ],
            ),
            Family::TensorF32 => (
                WARPS,
                texts![
                    "mma_f32.cuh",
                    "rows.cuh",
                    "slots.cuh",
                    "sm80.cuh",
                    "sm80_forward.cu",
                    "sm80_backward.cu"
                ],
            ),
            Family::TensorSecond => (MMA, texts!["second.cuh", "sm80_second.cu"]),
            Family::HopperForward => (HOPPER, texts!["sm90a_forward.cu"]),
            Family::HopperBackward => (
                HOPPER,
                texts![
                    "sm90a_backward.cuh",
                    "sm90a_backward.cu",
                    "sm90a_backward_keys.cu",
                    "sm90a_backward_queries.cu",
                    "sm90a_backward_weights.cu"
                ],
            ),
            Family::Linear => (
                FFMA,
                texts![
                    "linear.cuh",
                    "linear_flow.cuh",
                    "linear_factors.cuh",
                    "linear_sums.cuh",
                    "linear.cu",
                    "linear_totals.cu"
                ],
            ),
            Family::LinearSecond => (
                FFMA,
                texts![
                    "linear.cuh",
                    "linear_flow.cuh",
                    "linear_factors.cuh",
                    "linear_sums.cuh",
                    "linear_second.cu"
                ],
            ),
            Family::CrossEntropy => (
                TILE,
                texts![
                    "gemm.cuh",
                    "cross_entropy.cuh",
                    "cross_entropy_tokens.cu",
                    "cross_entropy_rows.cu",
                    "cross_entropy.cu",
                    "cross_entropy_filter.cu"
                ],
            ),
            Family::CrossEntropyShards => {
                (TILE, texts!["cross_entropy.cuh", "cross_entropy_shards.cu"])
            }
            Family::HopperCrossEntropy => (
                FEED,
                texts![
                    "cluster.cuh",
                    "cross_entropy.cuh",
                    "sm90a_cross_entropy.cu",
                    "sm90a_cross_entropy_loop.cu",
                    "sm90a_cross_entropy_tree.cu"
                ],
            ),
            Family::LinearTensor => {
                (MMA, texts!["linear.cuh", "linear_flow.cuh", "linear_sm80.cu"])
            }
            Family::HopperLinear => (
                FEED,
                texts![
                    "sm90a_linear.cuh",
                    "sm90a_linear_parts.cuh",
                    "sm90a_linear_gates.cuh",
                    "sm90a_linear.cu",
                    "sm90a_linear_segments.cu",
                    "sm90a_linear_flow.cu"
                ],
            ),
            Family::Moves => (&[], texts!["move.cu"]),
            Family::Tables => (TILE, texts!["tables.cu"]),
            Family::Peak => (TILE, texts!["peak.cu"]),
            Family::TensorPeak => (WARPS, texts!["mma.cuh", "peak.cu"]),
            Family::HopperPeak => (TILE, texts!["wgmma.cuh", "peak.cu"]),
        };
        [prelude, own].concat()
    }

    /// What it is compiled for on devices of a compute capability; `None` if it does not run there.
    pub fn architecture_on(self, (major, minor): (i32, i32)) -> Option<String> {
        match self {
            Family::HopperForward
            | Family::HopperBackward
            | Family::HopperLazyForward
            | Family::HopperLazyBackward
            | Family::HopperCrossEntropy
            | Family::HopperLinear
            | Family::HopperPeak => ((major, minor) == (9, 0)).then(|| "sm_90a".to_string()),
            _ => Some(format!("sm_{major}{minor}")),
        }
    }
}
