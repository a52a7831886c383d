//! Kernels that are compiled together: their sources, and the architectures that they serve.

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
    /// All of them.
    pub const ALL: [Family; 25] = [
        Family::Portable,
        Family::Second,
        Family::Lazy,
        Family::LazyTensor,
        Family::HopperLazyForward,
        Family::HopperLazyBackward,
        Family::Tensor,
        Family::TensorFused,
        Family::TensorWide,
        Family::TensorF32,
        Family::TensorSecond,
        Family::HopperForward,
        Family::HopperBackward,
        Family::Linear,
        Family::LinearSecond,
        Family::CrossEntropy,
        Family::CrossEntropyShards,
        Family::HopperCrossEntropy,
        Family::LinearTensor,
        Family::HopperLinear,
        Family::Moves,
        Family::Tables,
        Family::Peak,
        Family::TensorPeak,
        Family::HopperPeak,
    ];

    /// The texts that make its source, in order: rooms of the prelude, then the kernels.
    pub(crate) fn texts(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Family::Portable => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("pairs.cuh", include_str!("kernels/pairs.cuh")),
                ("copies.cuh", include_str!("kernels/copies.cuh")),
                ("ffma.cuh", include_str!("kernels/ffma.cuh")),
                ("slots.cuh", include_str!("kernels/slots.cuh")),
                ("fused.cuh", include_str!("kernels/fused.cuh")),
                ("portable.cu", include_str!("kernels/portable.cu")),
                ("collect.cu", include_str!("kernels/collect.cu")),
            ],
            Family::Second => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("pairs.cuh", include_str!("kernels/pairs.cuh")),
                ("copies.cuh", include_str!("kernels/copies.cuh")),
                ("ffma.cuh", include_str!("kernels/ffma.cuh")),
                ("slots.cuh", include_str!("kernels/slots.cuh")),
                ("fused.cuh", include_str!("kernels/fused.cuh")),
                ("second.cuh", include_str!("kernels/second.cuh")),
                ("portable_second.cu", include_str!("kernels/portable_second.cu")),
                ("collect.cu", include_str!("kernels/collect.cu")),
            ],
            Family::Lazy => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("pairs.cuh", include_str!("kernels/pairs.cuh")),
                ("copies.cuh", include_str!("kernels/copies.cuh")),
                ("ffma.cuh", include_str!("kernels/ffma.cuh")),
                ("activity.cuh", include_str!("kernels/activity.cuh")),
                ("lazy.cuh", include_str!("kernels/lazy.cuh")),
                ("lazy.cu", include_str!("kernels/lazy.cu")),
            ],
            Family::LazyTensor => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("pairs.cuh", include_str!("kernels/pairs.cuh")),
                ("copies.cuh", include_str!("kernels/copies.cuh")),
                ("warps.cuh", include_str!("kernels/warps.cuh")),
                ("mma.cuh", include_str!("kernels/mma.cuh")),
                ("rows.cuh", include_str!("kernels/rows.cuh")),
                ("activity.cuh", include_str!("kernels/activity.cuh")),
                ("lazy.cuh", include_str!("kernels/lazy.cuh")),
                ("lazy_sm80.cuh", include_str!("kernels/lazy_sm80.cuh")),
                ("lazy_sm80_forward.cu", include_str!("kernels/lazy_sm80_forward.cu")),
                ("lazy_sm80_backward.cu", include_str!("kernels/lazy_sm80_backward.cu")),
            ],
            Family::HopperLazyForward => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("feed.cuh", include_str!("kernels/feed.cuh")),
                ("wgmma.cuh", include_str!("kernels/wgmma.cuh")),
                ("hopper.cuh", include_str!("kernels/hopper.cuh")),
                ("activity.cuh", include_str!("kernels/activity.cuh")),
                ("sm90a_lazy.cuh", include_str!("kernels/sm90a_lazy.cuh")),
                ("sm90a_lazy_feed.cuh", include_str!("kernels/sm90a_lazy_feed.cuh")),
                ("sm90a_lazy_forward.cu", include_str!("kernels/sm90a_lazy_forward.cu")),
            ],
            Family::HopperLazyBackward => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("feed.cuh", include_str!("kernels/feed.cuh")),
                ("wgmma.cuh", include_str!("kernels/wgmma.cuh")),
                ("hopper.cuh", include_str!("kernels/hopper.cuh")),
                ("activity.cuh", include_str!("kernels/activity.cuh")),
                ("sm90a_lazy.cuh", include_str!("kernels/sm90a_lazy.cuh")),
                ("sm90a_lazy_feed.cuh", include_str!("kernels/sm90a_lazy_feed.cuh")),
                ("sm90a_lazy_queries.cu", include_str!("kernels/sm90a_lazy_queries.cu")),
                ("sm90a_lazy_keys.cu", include_str!("kernels/sm90a_lazy_keys.cu")),
            ],
            Family::Tensor => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("pairs.cuh", include_str!("kernels/pairs.cuh")),
                ("copies.cuh", include_str!("kernels/copies.cuh")),
                ("warps.cuh", include_str!("kernels/warps.cuh")),
                ("mma.cuh", include_str!("kernels/mma.cuh")),
                ("rows.cuh", include_str!("kernels/rows.cuh")),
                ("slots.cuh", include_str!("kernels/slots.cuh")),
                ("sm80.cuh", include_str!("kernels/sm80.cuh")),
                ("sm80_forward.cu", include_str!("kernels/sm80_forward.cu")),
                ("sm80_backward.cu", include_str!("kernels/sm80_backward.cu")),
            ],
            Family::TensorWide => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("pairs.cuh", include_str!("kernels/pairs.cuh")),
                ("copies.cuh", include_str!("kernels/copies.cuh")),
                ("warps.cuh", include_str!("kernels/warps.cuh")),
                ("mma.cuh", include_str!("kernels/mma.cuh")),
                ("rows.cuh", include_str!("kernels/rows.cuh")),
                ("slots.cuh", include_str!("kernels/slots.cuh")),
                ("sm80.cuh", include_str!("kernels/sm80.cuh")),
                ("sm80_backward.cu", include_str!("kernels/sm80_backward.cu")),
            ],
            Family::TensorFused => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("pairs.cuh", include_str!("kernels/pairs.cuh")),
                ("copies.cuh", include_str!("kernels/copies.cuh")),
                ("warps.cuh", include_str!("kernels/warps.cuh")),
                ("mma.cuh", include_str!("kernels/mma.cuh")),
                ("rows.cuh", include_str!("kernels/rows.cuh")),
                ("slots.cuh", include_str!("kernels/slots.cuh")),
                ("sm80.cuh", include_str!("kernels/sm80.cuh")),
                ("sm80_slots.cuh", include_str!("kernels/sm80_slots.cuh")),
                ("sm80_backward.cu", include_str!("kernels/sm80_backward.cu")),
                ("sm80_fused.cu", include_str!("kernels/sm80_fused.cu")),
                ("collect.cu", include_str!("kernels/collect.cu")),
            ],
            Family::TensorF32 => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("pairs.cuh", include_str!("kernels/pairs.cuh")),
                ("copies.cuh", include_str!("kernels/copies.cuh")),
                ("warps.cuh", include_str!("kernels/warps.cuh")),
                ("mma_f32.cuh", include_str!("kernels/mma_f32.cuh")),
                ("rows.cuh", include_str!("kernels/rows.cuh")),
                ("slots.cuh", include_str!("kernels/slots.cuh")),
                ("sm80.cuh", include_str!("kernels/sm80.cuh")),
                ("sm80_forward.cu", include_str!("kernels/sm80_forward.cu")),
                ("sm80_backward.cu", include_str!("kernels/sm80_backward.cu")),
            ],
            Family::TensorSecond => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("pairs.cuh", include_str!("kernels/pairs.cuh")),
                ("copies.cuh", include_str!("kernels/copies.cuh")),
                ("warps.cuh", include_str!("kernels/warps.cuh")),
                ("mma.cuh", include_str!("kernels/mma.cuh")),
                ("rows.cuh", include_str!("kernels/rows.cuh")),
                ("second.cuh", include_str!("kernels/second.cuh")),
                ("sm80_second.cu", include_str!("kernels/sm80_second.cu")),
            ],
            Family::HopperForward => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("feed.cuh", include_str!("kernels/feed.cuh")),
                ("wgmma.cuh", include_str!("kernels/wgmma.cuh")),
                ("hopper.cuh", include_str!("kernels/hopper.cuh")),
                ("sm90a_forward.cu", include_str!("kernels/sm90a_forward.cu")),
            ],
            Family::HopperBackward => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("feed.cuh", include_str!("kernels/feed.cuh")),
                ("wgmma.cuh", include_str!("kernels/wgmma.cuh")),
                ("hopper.cuh", include_str!("kernels/hopper.cuh")),
                ("sm90a_backward.cuh", include_str!("kernels/sm90a_backward.cuh")),
                ("sm90a_backward.cu", include_str!("kernels/sm90a_backward.cu")),
                ("sm90a_backward_keys.cu", include_str!("kernels/sm90a_backward_keys.cu")),
                ("sm90a_backward_queries.cu", include_str!("kernels/sm90a_backward_queries.cu")),
                ("sm90a_backward_weights.cu", include_str!("kernels/sm90a_backward_weights.cu")),
            ],
            Family::Linear => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("pairs.cuh", include_str!("kernels/pairs.cuh")),
                ("copies.cuh", include_str!("kernels/copies.cuh")),
                ("ffma.cuh", include_str!("kernels/ffma.cuh")),
                ("linear.cuh", include_str!("kernels/linear.cuh")),
                ("linear_flow.cuh", include_str!("kernels/linear_flow.cuh")),
                ("linear_factors.cuh", include_str!("kernels/linear_factors.cuh")),
                ("linear_sums.cuh", include_str!("kernels/linear_sums.cuh")),
                ("linear.cu", include_str!("kernels/linear.cu")),
                ("linear_totals.cu", include_str!("kernels/linear_totals.cu")),
            ],
            Family::LinearSecond => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("pairs.cuh", include_str!("kernels/pairs.cuh")),
                ("copies.cuh", include_str!("kernels/copies.cuh")),
                ("ffma.cuh", include_str!("kernels/ffma.cuh")),
                ("linear.cuh", include_str!("kernels/linear.cuh")),
                ("linear_flow.cuh", include_str!("kernels/linear_flow.cuh")),
                ("linear_factors.cuh", include_str!("kernels/linear_factors.cuh")),
                ("linear_sums.cuh", include_str!("kernels/linear_sums.cuh")),
                ("linear_second.cu", include_str!("kernels/linear_second.cu")),
            ],
            Family::CrossEntropy => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("gemm.cuh", include_str!("kernels/gemm.cuh")),
                ("cross_entropy.cuh", include_str!("kernels/cross_entropy.cuh")),
                ("cross_entropy_tokens.cu", include_str!("kernels/cross_entropy_tokens.cu")),
                ("cross_entropy_rows.cu", include_str!("kernels/cross_entropy_rows.cu")),
                ("cross_entropy.cu", include_str!("kernels/cross_entropy.cu")),
                ("cross_entropy_filter.cu", include_str!("kernels/cross_entropy_filter.cu")),
            ],
            Family::CrossEntropyShards => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("cross_entropy.cuh", include_str!("kernels/cross_entropy.cuh")),
                ("cross_entropy_shards.cu", include_str!("kernels/cross_entropy_shards.cu")),
            ],
            Family::HopperCrossEntropy => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("feed.cuh", include_str!("kernels/feed.cuh")),
                ("wgmma.cuh", include_str!("kernels/wgmma.cuh")),
                ("cluster.cuh", include_str!("kernels/cluster.cuh")),
                ("cross_entropy.cuh", include_str!("kernels/cross_entropy.cuh")),
                ("sm90a_cross_entropy.cu", include_str!("kernels/sm90a_cross_entropy.cu")),
                (
                    "sm90a_cross_entropy_loop.cu",
                    include_str!("kernels/sm90a_cross_entropy_loop.cu"),
                ),
                (
                    "sm90a_cross_entropy_tree.cu",
                    include_str!("kernels/sm90a_cross_entropy_tree.cu"),
                ),
            ],
            Family::LinearTensor => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("pairs.cuh", include_str!("kernels/pairs.cuh")),
                ("copies.cuh", include_str!("kernels/copies.cuh")),
                ("warps.cuh", include_str!("kernels/warps.cuh")),
                ("mma.cuh", include_str!("kernels/mma.cuh")),
                ("rows.cuh", include_str!("kernels/rows.cuh")),
                ("linear.cuh", include_str!("kernels/linear.cuh")),
                ("linear_flow.cuh", include_str!("kernels/linear_flow.cuh")),
                ("linear_sm80.cu", include_str!("kernels/linear_sm80.cu")),
            ],
            Family::HopperLinear => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("feed.cuh", include_str!("kernels/feed.cuh")),
                ("wgmma.cuh", include_str!("kernels/wgmma.cuh")),
                ("sm90a_linear.cuh", include_str!("kernels/sm90a_linear.cuh")),
                ("sm90a_linear_parts.cuh", include_str!("kernels/sm90a_linear_parts.cuh")),
                ("sm90a_linear_gates.cuh", include_str!("kernels/sm90a_linear_gates.cuh")),
                ("sm90a_linear.cu", include_str!("kernels/sm90a_linear.cu")),
                ("sm90a_linear_segments.cu", include_str!("kernels/sm90a_linear_segments.cu")),
                ("sm90a_linear_flow.cu", include_str!("kernels/sm90a_linear_flow.cu")),
            ],
            Family::Moves => &[("move.cu", include_str!("kernels/move.cu"))],
            Family::Tables => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("tables.cu", include_str!("kernels/tables.cu")),
            ],
            Family::Peak => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("peak.cu", include_str!("kernels/peak.cu")),
            ],
            Family::TensorPeak => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("pairs.cuh", include_str!("kernels/pairs.cuh")),
                ("copies.cuh", include_str!("kernels/copies.cuh")),
                ("warps.cuh", include_str!("kernels/warps.cuh")),
                ("mma.cuh", include_str!("kernels/mma.cuh")),
                ("peak.cu", include_str!("kernels/peak.cu")),
            ],
            Family::HopperPeak => &[
                ("tile.cuh", include_str!("kernels/tile.cuh")),
                ("wgmma.cuh", include_str!("kernels/wgmma.cuh")),
                ("peak.cu", include_str!("kernels/peak.cu")),
            ],
        }
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

    /// The architectures that CI compiles it for.
    pub fn architectures(self) -> &'static [&'static str] {
        match self {
            Family::HopperForward
            | Family::HopperBackward
            | Family::HopperLazyForward
            | Family::HopperLazyBackward
            | Family::HopperCrossEntropy
            | Family::HopperLinear
            | Family::HopperPeak => &["sm_90a"],
            _ => &["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"],
        }
    }
}
