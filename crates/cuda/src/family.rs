//! Kernels that are compiled together: their sources, and the architectures that they serve.

use crate::unit::Unit;
use std::fmt;

/// A file of `kernels`, and its text.
type Text = (&'static str, &'static str);

/// Files of folders of `kernels`, each with its text.
macro_rules! texts {
    ($($folder:literal: $($file:literal)+;)+) => {
        &[$($((concat!($folder, $file), include_str!(concat!("kernels/", $folder, $file)))),+),+]
    };
}

// Preludes: of every kernel; in fused multiply-adds; on the tensor cores of any device, of 16-bit operands and of f32;
// on those of compute capability 9.0, and there of pairs of queries and keys.
const NONE: &[Text] = &[];
const TYPES: &[Text] = texts! { "tile/": "types.cuh"; };
const FFMA: &[Text] = texts! {
    "tile/": "types.cuh"; "pairs/": "tiles.cuh" "problem.cuh"; "feed/": "cp_async.cuh"; "tile/": "ffma.cuh";
    "pairs/": "walks.cuh"; "feed/": "slabs.cuh"; "multiply/": "ffma.cuh";
};
const MMA: &[Text] = texts! {
    "tile/": "types.cuh"; "pairs/": "tiles.cuh" "problem.cuh"; "tile/": "swizzle.cuh" "fragment.cuh";
    "pairs/": "walks.cuh"; "feed/": "cp_async.cuh" "load_tile.cuh"; "multiply/": "mma_sync.cuh" "pair_by_pair.cuh";
};
const MMA_F32: &[Text] = texts! {
    "tile/": "types.cuh"; "pairs/": "tiles.cuh" "problem.cuh"; "tile/": "swizzle.cuh" "fragment.cuh";
    "pairs/": "walks.cuh"; "feed/": "cp_async.cuh" "load_tile.cuh"; "multiply/": "mma_sync_f32.cuh";
};
const WGMMA: &[Text] = texts! {
    "tile/": "types.cuh" "swizzle.cuh"; "feed/": "roles.cuh" "barriers.cuh" "ring.cuh" "copy_engine.cuh";
    "multiply/": "wgmma.cuh"; "tile/": "accumulator.cuh";
};
const WGMMA_PAIRS: &[Text] = texts! {
    "tile/": "types.cuh" "swizzle.cuh"; "feed/": "roles.cuh" "barriers.cuh" "ring.cuh" "copy_engine.cuh";
    "multiply/": "wgmma.cuh"; "tile/": "accumulator.cuh"; "pairs/": "tiles.cuh" "work.cuh" "spans.cuh" "sm90a.cuh";
};

macro_rules! families {
    ($($(#[$doc:meta])* $family:ident = $name:literal: $prelude:ident $texts:tt)+) => {
        /// Kernels that are compiled together, named like their files.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Family {
            $($(#[$doc])* $family),+
        }

        impl Family {
            /// Its name, and the texts that make its source, in order: the prelude, then the kernels.
            fn parts(self) -> (&'static str, [&'static [Text]; 2]) {
                match self {
                    $(Family::$family => ($name, [$prelude, texts! $texts])),+
                }
            }
        }
    };
}

families! {
    /// attention and attention_lse in fused multiply-adds.
    AttentionPortable = "attention/portable": FFMA {
        "attention/": "partials.cuh" "portable_partials.cuh" "portable_forward.cuh" "portable_forward.cu"
        "portable_backward.cuh" "portable_backward.cu" "partials.cu";
    }
    /// The same in groups in which results of tensor cores are not finite.
    AttentionFallback = "attention/fallback": FFMA {
        "attention/": "partials.cuh" "portable_partials.cuh" "portable_forward.cuh" "portable_backward.cuh" "fallback.cu";
    }
    /// Their second order in fused multiply-adds.
    AttentionPortableSecondOrder = "attention/portable_second_order": FFMA {
        "attention/": "partials.cuh" "portable_partials.cuh" "second_order.cuh"
        "portable_second_order.cu" "partials.cu";
    }
    /// The first order of attention and attention_lse on tensor cores of any device.
    AttentionSm80 = "attention/sm80": MMA {
        "attention/": "partials.cuh" "sm80.cuh"; "pairs/": "sm80_walks.cuh";
        "attention/": "sm80_forward.cu" "sm80_backward.cu";
    }
    /// Their backward pass on them in one pass by keys, with dq partials in memory.
    AttentionSm80Fused = "attention/sm80_fused": MMA {
        "attention/": "partials.cuh" "sm80.cuh"; "pairs/": "sm80_walks.cuh";
        "attention/": "sm80_partials.cuh" "sm80_backward.cu" "sm80_backward_fused.cu" "partials.cu";
    }
    /// Their backward pass on them, of wider operands.
    AttentionSm80Wide = "attention/sm80_wide": MMA {
        "attention/": "partials.cuh" "sm80.cuh"; "pairs/": "sm80_walks.cuh";
        "attention/": "sm80_backward.cu";
    }
    /// Their first order on them, of f32.
    AttentionSm80F32 = "attention/sm80_f32": MMA_F32 {
        "attention/": "partials.cuh" "sm80.cuh"; "pairs/": "sm80_walks.cuh";
        "attention/": "sm80_forward.cu" "sm80_backward.cu";
    }
    /// Their second order on them, of bf16.
    AttentionSm80SecondOrder = "attention/sm80_second_order": MMA {
        "attention/": "second_order.cuh" "sm80_second_order.cu";
    }
    /// Their forward pass on the tensor cores of compute capability 9.0.
    AttentionSm90aForward = "attention/sm90a_forward": WGMMA_PAIRS {
        "attention/": "sm90a_forward.cu";
    }
    /// Their backward pass on them.
    AttentionSm90aBackward = "attention/sm90a_backward": WGMMA_PAIRS {
        "attention/": "sm90a_backward.cuh" "sm90a_backward.cu"
        "sm90a_backward_keys.cu" "sm90a_backward_queries.cu" "sm90a_backward_weights.cu";
    }
    /// lazy_attention in fused multiply-adds.
    LazyPortable = "lazy_attention/portable": FFMA {
        "lazy_attention/": "activity.cuh" "problem.cuh" "portable_forward.cu"
        "portable_backward.cu";
    }
    /// lazy_attention on tensor cores of any device.
    LazySm80 = "lazy_attention/sm80": MMA {
        "lazy_attention/": "activity.cuh" "problem.cuh" "sm80.cuh"; "pairs/": "sm80_walks.cuh";
        "lazy_attention/": "sm80_forward.cu" "sm80_backward.cu";
    }
    /// The forward pass of lazy_attention on the tensor cores of compute capability 9.0.
    LazySm90aForward = "lazy_attention/sm90a_forward": WGMMA_PAIRS {
        "lazy_attention/": "activity.cuh" "sm90a.cuh" "sm90a_feed.cuh"
        "sm90a_forward.cu";
    }
    /// Its backward pass on them.
    LazySm90aBackward = "lazy_attention/sm90a_backward": WGMMA_PAIRS {
        "lazy_attention/": "activity.cuh" "sm90a.cuh" "sm90a_feed.cuh"
        "sm90a_backward_queries.cu" "sm90a_backward_keys.cu";
    }
    /// linear_attention in fused multiply-adds.
    LinearPortable = "linear_attention/portable": FFMA {
        "linear_attention/": "problem.cuh" "flow.cuh" "portable.cuh" "portable.cu" "totals.cu";
    }
    /// Its second order in fused multiply-adds.
    LinearPortableSecondOrder = "linear_attention/portable_second_order": FFMA {
        "linear_attention/": "problem.cuh" "flow.cuh" "portable.cuh" "portable_second_order.cu";
    }
    /// Its first order on tensor cores of any device.
    LinearSm80 = "linear_attention/sm80": MMA {
        "linear_attention/": "problem.cuh" "flow.cuh" "sm80.cu";
    }
    /// Its first order on the tensor cores of compute capability 9.0.
    LinearSm90a = "linear_attention/sm90a": WGMMA {
        "linear_attention/": "sm90a.cuh" "sm90a_parts.cuh" "sm90a_gates.cuh" "sm90a_walk.cu"
        "sm90a_segments.cu" "sm90a_flow.cu";
    }
    /// linear_cross_entropy in fused multiply-adds.
    CrossEntropyPortable = "linear_cross_entropy/portable": TYPES {
        "tile/": "gemm.cuh"; "feed/": "gemm.cuh"; "multiply/": "gemm.cuh";
        "linear_cross_entropy/": "problem.cuh" "tokens.cu" "rows.cu" "portable_products.cu"
        "filter.cu";
    }
    /// The kernels that shards of its classes need besides.
    CrossEntropyShards = "linear_cross_entropy/shards": TYPES {
        "linear_cross_entropy/": "problem.cuh" "shards.cu";
    }
    /// Its first order on the tensor cores of compute capability 9.0.
    CrossEntropySm90a = "linear_cross_entropy/sm90a": WGMMA {
        "feed/": "cluster.cuh"; "linear_cross_entropy/": "problem.cuh" "sm90a_products.cu"
        "sm90a_loop.cu" "sm90a_tree.cu";
    }
    /// Copies and fills of tensors with strides.
    Move = "move": NONE { "": "move.cu"; }
    /// The tables of lengths, offsets and masks that lie on the device.
    Tables = "pairs/tables": TYPES { "pairs/": "tiles.cuh" "tables.cu"; }
    /// The most that fused multiply-adds do.
    PeakFfma = "peak_ffma": TYPES { "": "peak.cu"; }
    /// The most that the tensor cores of any device do by `mma.sync`.
    PeakMma = "peak_mma": TYPES {
        "pairs/": "tiles.cuh" "problem.cuh"; "tile/": "swizzle.cuh" "fragment.cuh"; "multiply/": "mma_sync.cuh";
        "": "peak.cu";
    }
    /// The most that the tensor cores of compute capability 9.0 do.
    PeakWgmma = "peak_wgmma": TYPES { "multiply/": "wgmma.cuh"; "": "peak.cu"; }
}

impl Family {
    /// The texts that make its source, in order.
    pub(crate) fn texts(self) -> Vec<Text> {
        self.parts().1.concat()
    }

    /// The architecture that it is compiled for on devices of a compute capability; `None` if it does not run there.
    pub fn architecture_on(self, (major, minor): (i32, i32)) -> Option<String> {
        if self.unit() == Unit::Wgmma {
            return ((major, minor) == (9, 0)).then(|| "sm_90a".to_string());
        }
        Some(format!("sm_{major}{minor}"))
    }

    /// The arithmetic that computes its products.
    pub fn unit(self) -> Unit {
        match self {
            Family::AttentionSm80
            | Family::AttentionSm80Fused
            | Family::AttentionSm80F32
            | Family::AttentionSm80Wide
            | Family::AttentionSm80SecondOrder
            | Family::LazySm80
            | Family::LinearSm80
            | Family::PeakMma => Unit::Mma,
            Family::AttentionSm90aForward
            | Family::AttentionSm90aBackward
            | Family::LazySm90aForward
            | Family::LazySm90aBackward
            | Family::LinearSm90a
            | Family::CrossEntropySm90a
            | Family::PeakWgmma => Unit::Wgmma,
            _ => Unit::Ffma,
        }
    }

    /// The names of its kernels, of which some variants lack some.
    pub(crate) fn entries(self) -> impl Iterator<Item = &'static str> {
        let names = match self {
            Family::AttentionPortable => "forward delta queries scale keys fused collect dsinks dbias",
            Family::AttentionFallback => "fallback",
            Family::AttentionPortableSecondOrder => "tangents rows queries keys fused collect gsinks gbias",
            Family::AttentionSm80 => "forward queries keys values dbias",
            Family::AttentionSm80Fused => "fused collect",
            Family::AttentionSm80F32 => "forward queries keys dbias",
            Family::AttentionSm80Wide => "queries keys values",
            Family::AttentionSm80SecondOrder => "tangents queries keys",
            Family::AttentionSm90aForward => "forward",
            Family::AttentionSm90aBackward => "delta keys values queries",
            Family::LazyPortable => "scores values measure counts queries keys dbias dtau",
            Family::LazySm80 => "scores values means queries keys",
            Family::LazySm90aForward => "scores values sums",
            Family::LazySm90aBackward => "queries keys",
            Family::LinearPortable => "fill_gates sums scan attend flow sum_all sum_heads step mend_sums mend",
            Family::LinearPortableSecondOrder => "tangent_sums scan_second attend_second flow_second",
            Family::LinearSm80 => "sums attend flow",
            Family::LinearSm90a => {
                "attend_plain attend attend_dots attend_back attend_back_dots sums sums_back scan flow"
            }
            Family::CrossEntropyPortable => {
                "tokens logits motions totals finish loss gradients hidden head bias norms measure certify choose"
            }
            Family::CrossEntropyShards => "place identities partials combine recall add sum",
            Family::CrossEntropySm90a => "leaves scale gradient hidden hidden_192 head tree gather bias",
            Family::Move => "move",
            Family::Tables => "sequences rows intervals",
            Family::PeakFfma | Family::PeakMma | Family::PeakWgmma => "peak",
        };
        names.split(' ')
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.parts().0)
    }
}
