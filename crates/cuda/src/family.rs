//! Kernels that are compiled together: their sources, their arithmetic, and the architectures that they serve.

use std::fmt;

type Text = (&'static str, &'static str);

/// Texts before those of a family, and the arithmetic that they multiply by.
type Prelude = (Unit, &'static [&'static [Text]]);

/// Files of folders of `kernels`, each with its text.
macro_rules! texts {
    ($($folder:literal: $($file:literal)+;)+) => {
        &[$($((concat!($folder, $file), include_str!(concat!("kernels/", $folder, $file)))),+),+]
    };
}

/// Of every kernel.
const BASE: &[Text] = texts! { "tile/": "types.cuh"; };
/// In fused multiply-adds, and there of attention.
const BY_FFMA: &[Text] = texts! {
    "pairs/": "tiles.cuh" "problem.cuh"; "feed/": "cp_async.cuh"; "tile/": "ffma.cuh";
    "pairs/": "walks.cuh"; "feed/": "slabs.cuh"; "multiply/": "ffma.cuh";
};
const ATTENTION: &[Text] = texts! { "attention/": "partials.cuh" "portable_partials.cuh"; };
/// On the tensor cores of any device, of 16-bit operands or f32, and there of attention.
const BY_MMA: &[Text] = texts! {
    "pairs/": "tiles.cuh" "problem.cuh"; "tile/": "swizzle.cuh" "fragment.cuh";
    "pairs/": "walks.cuh"; "feed/": "cp_async.cuh" "load_tile.cuh";
};
const NARROW: &[Text] = texts! { "multiply/": "mma_sync.cuh" "pair_by_pair.cuh"; };
const WIDE: &[Text] = texts! { "multiply/": "mma_sync_f32.cuh"; };
const SM80: &[Text] = texts! { "attention/": "partials.cuh" "sm80.cuh"; "pairs/": "sm80_walks.cuh"; };
/// On those of compute capability 9.0, and there of pairs of queries and keys.
const BY_WGMMA: &[Text] = texts! {
    "tile/": "swizzle.cuh"; "feed/": "roles.cuh" "barriers.cuh" "ring.cuh" "copy_engine.cuh";
    "multiply/": "wgmma.cuh"; "tile/": "accumulator.cuh";
};
const PAIRS: &[Text] = texts! { "pairs/": "tiles.cuh" "work.cuh" "spans.cuh" "sm90a.cuh"; };

/// Copies by the copy engine and products by wgmma, beside tiles of any device.
const TILES_BY_WGMMA: &[Text] = texts! { "feed/": "copy_engine.cuh"; "multiply/": "wgmma.cuh"; };

const NONE: Prelude = (Unit::Ffma, &[]);
const TYPES: Prelude = (Unit::Ffma, &[BASE]);
const TYPES_MMA: Prelude = (Unit::Mma, &[BASE]);
const TYPES_WGMMA: Prelude = (Unit::Wgmma, &[BASE]);
const FFMA: Prelude = (Unit::Ffma, &[BASE, BY_FFMA]);
const FFMA_ATTENTION: Prelude = (Unit::Ffma, &[BASE, BY_FFMA, ATTENTION]);
const MMA: Prelude = (Unit::Mma, &[BASE, BY_MMA, NARROW]);
const MMA_ATTENTION: Prelude = (Unit::Mma, &[BASE, BY_MMA, NARROW, SM80]);
const F32_ATTENTION: Prelude = (Unit::Mma, &[BASE, BY_MMA, WIDE, SM80]);
const WGMMA: Prelude = (Unit::Wgmma, &[BASE, BY_WGMMA]);
const WGMMA_TILES: Prelude = (Unit::Wgmma, &[BASE, BY_MMA, TILES_BY_WGMMA]);
const WGMMA_PAIRS: Prelude = (Unit::Wgmma, &[BASE, BY_WGMMA, PAIRS]);

struct Parts {
    name: &'static str,
    kernels: &'static str,
    prelude: Prelude,
    texts: &'static [Text],
}

macro_rules! families {
    ($($(#[$doc:meta])* $family:ident = $name:literal: $kernels:literal $prelude:ident $texts:tt)+) => {
        /// Kernels that are compiled together, named like their files.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Family {
            $($(#[$doc])* $family),+
        }

        impl Family {
            fn parts(self) -> Parts {
                match self {
                    $(Family::$family => Parts {
                        name: $name,
                        kernels: $kernels,
                        prelude: $prelude,
                        texts: texts! $texts,
                    }),+
                }
            }
        }
    };
}

families! {
    /// attention and attention_lse in fused multiply-adds.
    AttentionPortable = "attention/portable":
    "forward delta queries scale keys fused collect dsinks dbias" FFMA_ATTENTION {
        "attention/": "portable_forward.cuh" "portable_forward.cu" "portable_backward.cuh" "portable_backward.cu"
        "partials.cu";
    }
    /// The same in groups in which results of tensor cores are not finite.
    AttentionFallback = "attention/fallback": "fallback" FFMA_ATTENTION {
        "attention/": "portable_forward.cuh" "portable_backward.cuh" "fallback.cu";
    }
    /// Their second order in fused multiply-adds.
    AttentionPortableSecondOrder = "attention/portable_second_order":
    "tangents rows queries keys fused collect gsinks gbias" FFMA_ATTENTION {
        "attention/": "second_order.cuh" "portable_second_order.cu" "partials.cu";
    }
    /// The first order of attention and attention_lse for sm80.
    AttentionSm80 = "attention/sm80": "forward queries keys values dbias" MMA_ATTENTION {
        "attention/": "sm80_forward.cu" "sm80_backward.cu";
    }
    /// Their backward pass for sm80 in one pass by keys, with dq partials in memory.
    AttentionSm80Fused = "attention/sm80_fused": "fused collect" MMA_ATTENTION {
        "attention/": "sm80_partials.cuh" "sm80_backward.cu" "sm80_backward_fused.cu" "partials.cu";
    }
    /// Their backward pass for sm80, of wider operands.
    AttentionSm80Wide = "attention/sm80_wide": "queries keys values" MMA_ATTENTION {
        "attention/": "sm80_backward.cu";
    }
    /// Their first order for sm80, of f32.
    AttentionSm80F32 = "attention/sm80_f32": "forward queries keys dbias" F32_ATTENTION {
        "attention/": "sm80_forward.cu" "sm80_backward.cu";
    }
    /// Their second order for sm80, of bf16.
    AttentionSm80SecondOrder = "attention/sm80_second_order": "tangents queries keys" MMA {
        "attention/": "second_order.cuh" "tensor_second_order.cuh" "sm80_second_order.cu";
    }
    /// Their second order for sm90a, of bf16 and narrow operands.
    AttentionSm90aSecondOrder = "attention/sm90a_second_order": "tangents queries keys" WGMMA_TILES {
        "attention/": "second_order.cuh" "tensor_second_order.cuh" "sm90a_second_order.cu";
    }
    /// Their forward pass for sm90a.
    AttentionSm90aForward = "attention/sm90a_forward": "forward" WGMMA_PAIRS {
        "attention/": "sm90a_forward.cu";
    }
    /// Their backward pass for sm90a.
    AttentionSm90aBackward = "attention/sm90a_backward":
    "delta keys values queries fused collect unseen" WGMMA_PAIRS {
        "attention/": "sm90a_backward.cuh" "sm90a_backward.cu"
        "sm90a_backward_keys.cu" "sm90a_backward_queries.cu" "sm90a_backward_weights.cu"
        "sm90a_backward_fused.cu" "sm90a_backward_fused_128.cu" "sm90a_backward_fused_64.cu";
    }
    /// The same of attention with D or E above 128.
    AttentionSm90aWide = "attention/sm90a_backward_wide": "delta keys values queries" WGMMA_PAIRS {
        "attention/": "sm90a_backward.cuh" "sm90a_backward.cu" "sm90a_backward_wide.cu";
    }
    /// lazy_attention in fused multiply-adds.
    LazyPortable = "lazy_attention/portable": "scores values measure counts queries keys dbias dtau" FFMA {
        "lazy_attention/": "activity.cuh" "problem.cuh" "portable_forward.cu" "portable_backward.cu";
    }
    /// lazy_attention for sm80.
    LazySm80 = "lazy_attention/sm80": "scores values means queries keys" MMA {
        "lazy_attention/": "activity.cuh" "problem.cuh" "sm80.cuh"; "pairs/": "sm80_walks.cuh";
        "lazy_attention/": "sm80_forward.cu" "sm80_backward.cu";
    }
    /// The forward pass of lazy_attention for sm90a.
    LazySm90aForward = "lazy_attention/sm90a_forward": "scores values sums" WGMMA_PAIRS {
        "lazy_attention/": "activity.cuh" "sm90a.cuh" "sm90a_feed.cuh" "sm90a_forward.cu";
    }
    /// Its backward pass for sm90a.
    LazySm90aBackward = "lazy_attention/sm90a_backward": "queries keys" WGMMA_PAIRS {
        "lazy_attention/": "activity.cuh" "sm90a.cuh" "sm90a_feed.cuh"
        "sm90a_backward_queries.cu" "sm90a_backward_keys.cu";
    }
    /// linear_attention in fused multiply-adds.
    LinearPortable = "linear_attention/portable":
    "fill_gates sums scan attend flow sum_all sum_heads step mend_sums mend" FFMA {
        "linear_attention/": "problem.cuh" "flow.cuh" "portable.cuh" "portable.cu" "totals.cu";
    }
    /// Its second order in fused multiply-adds.
    LinearPortableSecondOrder = "linear_attention/portable_second_order":
    "tangent_sums scan_second attend_second flow_second" FFMA {
        "linear_attention/": "problem.cuh" "flow.cuh" "portable.cuh" "portable_second_order.cu";
    }
    /// Its first order for sm80.
    LinearSm80 = "linear_attention/sm80": "sums attend flow" MMA {
        "linear_attention/": "problem.cuh" "flow.cuh" "sm80.cu";
    }
    /// Its first order for sm90a.
    LinearSm90a = "linear_attention/sm90a":
    "attend_plain attend sums sums_back scan states gradients gradients_dots gradients_grouped flow" WGMMA {
        "linear_attention/": "sm90a.cuh" "sm90a_parts.cuh" "sm90a_gates.cuh" "sm90a_walk.cu"
        "sm90a_segments.cu" "sm90a_states.cu" "sm90a_gradients.cu" "sm90a_flow.cu";
    }
    /// linear_cross_entropy in fused multiply-adds.
    CrossEntropyPortable = "linear_cross_entropy/portable":
    "tokens logits motions totals finish loss gradients hidden head bias norms measure certify choose" TYPES {
        "tile/": "gemm.cuh"; "feed/": "gemm.cuh"; "multiply/": "gemm.cuh";
        "linear_cross_entropy/": "problem.cuh" "tokens.cu" "rows.cu" "portable_products.cu"
        "filter.cu";
    }
    /// The kernels that shards of its classes need besides.
    CrossEntropyShards = "linear_cross_entropy/shards": "place identities partials combine recall add sum" TYPES {
        "linear_cross_entropy/": "problem.cuh" "shards.cu";
    }
    /// Its first order for sm90a.
    CrossEntropySm90a = "linear_cross_entropy/sm90a":
    "leaves scale gradient hidden hidden_192 head tree gather bias" WGMMA {
        "feed/": "cluster.cuh"; "linear_cross_entropy/": "problem.cuh" "sm90a_products.cu"
        "sm90a_loop.cu" "sm90a_tree.cu";
    }
    /// Copies and fills of tensors with strides.
    Move = "move": "move" NONE { "": "move.cu"; }
    /// The tables of lengths, offsets and masks that lie on the device.
    Tables = "pairs/tables": "sequences rows intervals" TYPES { "pairs/": "tiles.cuh" "tables.cu"; }
    /// The most that fused multiply-adds do.
    PeakFfma = "peak_ffma": "peak" TYPES { "": "peak.cu"; }
    /// The most that the tensor cores of any device do by `mma.sync`.
    PeakMma = "peak_mma": "peak" TYPES_MMA {
        "pairs/": "tiles.cuh" "problem.cuh"; "tile/": "swizzle.cuh" "fragment.cuh"; "multiply/": "mma_sync.cuh";
        "": "peak.cu";
    }
    /// The most that the tensor cores of compute capability 9.0 do.
    PeakWgmma = "peak_wgmma": "peak" TYPES_WGMMA { "multiply/": "wgmma.cuh"; "": "peak.cu"; }
}

impl Family {
    /// The texts that make its source, in order.
    pub(crate) fn texts(self) -> Vec<Text> {
        let Parts { prelude, texts, .. } = self.parts();
        [&prelude.1.concat(), texts].concat()
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
        self.parts().prelude.0
    }

    /// The names of its kernels, of which some variants lack some.
    pub(crate) fn entries(self) -> impl Iterator<Item = &'static str> {
        self.parts().kernels.split(' ')
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.parts().name)
    }
}

/// Arithmetic that multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Fused multiply-adds in f32.
    Ffma,
    /// `mma.sync` on 16-bit numbers, with sums in f32.
    Mma,
    /// `wgmma` of compute capability 9.0, on 16-bit numbers, with sums in f32.
    Wgmma,
}

impl Unit {
    /// Flops of a thread in a round.
    pub(crate) fn flops(self) -> f64 {
        match self {
            Unit::Ffma => 2.0 * 32.0,
            Unit::Mma => 12.0 * 2.0 * (16 * 8 * 16) as f64 / 32.0,
            Unit::Wgmma => 8.0 * 2.0 * (64 * 128 * 16) as f64 / 128.0,
        }
    }

    /// Blocks that a multiprocessor has at a time.
    pub(crate) fn blocks(self) -> usize {
        match self {
            Unit::Ffma => 6,
            Unit::Mma => 2,
            Unit::Wgmma => 1,
        }
    }
}
