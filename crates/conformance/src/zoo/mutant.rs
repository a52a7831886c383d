//! The mutants: real bugs, with their stories.

use crate::laws::law;
use etalon_problem::Algorithm;

/// One table, so that a mutant cannot lack its story, its address or its law.
macro_rules! mutants {
    ($(
        [$of:ident]
        $($(#[doc = $doc:literal])+ $variant:ident, $name:literal, $law:literal, $address:literal;)*
    )*) => {
        /// A known bug.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Mutant { $($($(#[doc = $doc])+ $variant,)*)* }

        impl Mutant {
            /// Every mutant.
            pub const ALL: &'static [Mutant] = &[$($(Mutant::$variant,)*)*];

            /// The algorithms that have it.
            pub fn of(self) -> &'static [Algorithm] {
                match self { $($(Mutant::$variant => law::$of,)*)* }
            }

            /// Its name.
            pub fn name(self) -> &'static str {
                match self { $($(Mutant::$variant => $name,)*)* }
            }

            /// The mistake, in a sentence.
            pub fn story(self) -> &'static str {
                match self { $($(Mutant::$variant => concat!($($doc),+).trim_ascii(),)*)* }
            }

            /// The law that must kill it; others may, too.
            pub fn killer(self) -> &'static str {
                match self { $($(Mutant::$variant => $law,)*)* }
            }

            /// Where it was seen in public: an issue (`owner/repository#number`) or a commit
            /// (`owner/repository@commit`); empty if it was made for this zoo.
            pub fn address(self) -> &'static str {
                match self { $($(Mutant::$variant => $address,)*)* }
            }
        }
    };
}

mutants! {
    [ATTENTION]
    /// In one row of each sequence every edge of the mask lies one key too far to the right.
    OneRowShifted, "one-row-shifted", "edge_probe", "pytorch/pytorch#192138";
    /// Masks are aligned at the top left instead of the bottom right.
    TopLeft, "top-left", "edge_probe", "Dao-AILab/flash-attention#282";
    /// A window reaches one key too far to the left.
    WindowLeftPlusOne, "window-left-plus-one", "edge_probe", "huggingface/transformers#39408";
    /// A window reaches one key less to the left.
    WindowLeftMinusOne, "window-left-minus-one", "edge_probe", "microsoft/onnxruntime#25927";
    /// A window lets one future key in.
    WindowRightPlusOne, "window-right-plus-one", "edge_probe", "jax-ml/jax#39576";
    /// The backward pass forgets the window.
    BackwardWithoutWindow, "backward-without-window", "edge_probe", "meta-pytorch/MSLK#263";
    /// The keys after the last whole tile are dropped.
    KeyTailDropped, "key-tail-dropped", "count_probe", "pytorch/pytorch#191937";
    /// A packed sequence sees the first key of the next.
    PackedLeak, "packed-leak", "count_probe", "NVIDIA-NeMo/RL#2105";
    /// The backward pass reads the padding beyond the lengths.
    PaddingRead, "padding-read", "unseen_poison", "Dao-AILab/flash-attention#2167";
    /// Masked pairs are multiplied by 0 instead of being skipped.
    TimesZero, "times-zero", "unseen_poison", "pytorch/pytorch#101967";
    /// Query head h uses key head h mod Hk.
    HeadModulo, "head-modulo", "groups_are_copies", "HazyResearch/HipKittens#22";
    /// A bias per batch element is read from the first element always.
    BiasOfFirstBatch, "bias-of-first-batch", "batch_invariance", "";
    /// o is not rescaled when the maximum grows.
    NoRescaleOfO, "no-rescale-of-o", "edge_probe", "paiml/aprender#2753";
    /// l is not rescaled when the maximum grows.
    NoRescaleOfL, "no-rescale-of-l", "edge_probe", "Dao-AILab/flash-attention#2082";
    /// The rescale is skipped in the last tile.
    NoRescaleInLastTile, "no-rescale-in-last-tile", "edge_probe", "Dao-AILab/flash-attention@13696f2e";
    /// −1e4 stands for −∞: real scores below it vanish.
    FiniteSentinel, "finite-sentinel", "bound", "tracel-ai/burn#4697";
    /// The maximum is also taken over masked keys.
    MaximumOfInvisible, "maximum-of-invisible", "edge_probe", "pytorch/pytorch#156379";
    /// The maximum is a constant.
    ConstantMaximum, "constant-maximum", "bound", "HabanaAI/vllm-fork#275";
    /// A fully masked row divides 0 by 0.
    EmptyRowIsNan, "empty-row-is-nan", "empty_rows", "pytorch/pytorch#41508";
    /// The sink does not take part in the maximum: its exponential overflows.
    SinkNotInMaximum, "sink-not-in-maximum", "bound", "PaddlePaddle/PaddleFleet#1439";
    /// lse does not count the sink.
    SinkNotInLse, "sink-not-in-lse", "bound", "";
    /// The gradient of the sinks is not computed.
    NoGradientOfSinks, "no-gradient-of-sinks", "sensitivity", "Dao-AILab/flash-attention#1973";
    /// The gradient of the bias is not computed.
    NoGradientOfBias, "no-gradient-of-bias", "sum_dbias", "jax-ml/jax#27184";
    /// The gradient lacks the softcap's derivative.
    NoSoftcapDerivative, "no-softcap-derivative", "bound", "Dao-AILab/flash-attention@14f3627d";
    /// The softcap is applied after the bias: a key with bias −∞ comes back with weight e^−c.
    SoftcapAfterBias, "softcap-after-bias", "bound", "onnx/onnx#7867";
    /// The softcap is ignored.
    SoftcapIgnored, "softcap-ignored", "bound", "sgl-project/sgl-kernel-xpu#491";
    /// The scale comes from the values' width.
    ScaleOfValues, "scale-of-values", "bound", "XunhaoLai/native-sparse-attention-triton#27";
    /// The scale is 1/√(D + 1).
    ScaleOffByOne, "scale-off-by-one", "bound", "";
    /// Only the first 64 elements of a head take part in a score.
    First64OfHead, "first-64-of-head", "bound", "fla-org/native-sparse-attention#26";
    /// lse is in base 2.
    LseInBase2, "lse-in-base-2", "bound", "flashinfer-ai/flashinfer#2113";
    /// lse is stored in bf16.
    LseInBf16, "lse-in-bf16", "bound", "zhuzilin/ring-flash-attention#22";
    /// The gradient through lse is ignored.
    DlseIgnored, "dlse-ignored", "sum_dk", "Dao-AILab/flash-attention#141";
    /// dS lacks δ.
    DeltaOmitted, "delta-omitted", "sum_dk", "";
    /// The backward pass reads the next head's lse.
    LseOfNextHead, "lse-of-next-head", "sum_dv", "Dao-AILab/flash-attention@b3f1b6a5";
    /// The last key tile's partial sum of dq is lost.
    PartialLost, "partial-lost", "bound", "fla-org/flash-linear-attention@e4c7f880";
    /// The partial sums of dq are stored in bf16.
    PartialsInBf16, "partials-in-bf16", "bound", "";
    /// P is rounded to bf16 before it multiplies dout.
    WeightsInBf16, "weights-in-bf16", "sum_dv", "";
    /// dk and dv hold the last head of the group, not the sum.
    GroupNotSummed, "group-not-summed", "groups_are_copies", "XunhaoLai/native-sparse-attention-triton#27";
    /// The last columns of dv are not written when E is no multiple of 8.
    ValueTailDropped, "value-tail-dropped", "sum_dv", "flagos-ai/FlagGems#898";
    /// Gradients of keys that nobody sees are not written.
    Unwritten, "unwritten", "empty_rows", "linkedin/Liger-Kernel@4a1677b8";
    /// The order of the sums over a group changes from run to run.
    Race, "race", "determinism", "facebookresearch/xformers#1392";
    /// The backward pass multiplies dS by q and k, but not by the scale.
    GradientsUnscaled, "gradients-unscaled", "bound", "";
    /// A row that sees nothing in its first tile subtracts −∞ from −∞.
    EmptyTileIsNan, "empty-tile-is-nan", "bound", "";
    /// The sink's weights are rounded to bf16 before their gradient is summed.
    SinkTermsInBf16, "sink-terms-in-bf16", "bound", "";
    /// The double backward pass treats the weights of the forward pass as constants.
    ConstantWeights, "constant-weights", "bound", "";

    [LINEAR_ATTENTION]
    /// The state takes in a chunk before the chunk's outputs are read from it.
    StateBeforeUse, "state-before-use", "bound", "mcpirate17/HYDRA@57a55dc";
    /// The gradient of the state takes in a chunk before the chunk's dk and dv are read from it.
    CotangentBeforeUse, "cotangent-before-use", "euler_of_states", "mcpirate17/HYDRA@57a55dc";
    /// dk reads the gradient of the state untransposed.
    StateNotTransposed, "state-not-transposed", "bound", "mcpirate17/HYDRA@57a55dc";
    /// dq keeps the micro-chunk of its own token only.
    QueriesOfDiagonal, "queries-of-diagonal", "euler_of_outputs", "mcpirate17/HYDRA@57a55dc";
    /// The part within chunks uses chunks half as long as the part between them.
    ChunksOfTwoSizes, "chunks-of-two-sizes", "integer_probe", "mcpirate17/HYDRA@57a55dc";
    /// The decay is ignored.
    DecayIgnored, "decay-ignored", "bound", "mcpirate17/HYDRA@57a55dc";
    /// The tokens after the last whole chunk are not written.
    TailOfTokensDropped, "tail-of-tokens-dropped", "integer_probe", "OpenNLPLab/lightning-attention#27";
    /// A part of dq is rounded to bf16 before the other is added.
    QueryGradientRoundedTwice, "query-gradient-rounded-twice", "bound", "OpenNLPLab/lightning-attention@d15c385";
    /// The state from before the chunk is decayed once too little.
    QueryDecayOneShort, "query-decay-one-short", "two_halves", "vllm-project/vllm@030ea52";
    /// The last chunk decays the state as if it were whole.
    TailDecaysAsChunk, "tail-decays-as-chunk", "token_by_token", "inclusionAI/cuLA@fa742a2";
    /// The state decays by one token's gate per chunk.
    OneDecayPerChunk, "one-decay-per-chunk", "bound", "inclusionAI/linghe@02edabd";
    /// Keys are divided by the decay up to them.
    InverseDecay, "inverse-decay", "bound", "sgl-project/sglang@7121d18";
    /// The decay between two tokens is the difference of two sums from the beginning.
    PrefixDifference, "prefix-difference", "bound", "";
    /// The state is stored in bf16 between chunks.
    StateInBf16, "state-in-bf16", "bound", "vllm-project/vllm#19592";
    /// A packed sequence begins with the state of the one before it.
    StateOfPreviousSequence, "state-of-previous-sequence", "alone", "";
    /// Only the last slice of the final state is written.
    LastSliceOfState, "last-slice-of-state", "bound", "vllm-project/vllm@7e1c150";
    /// Padding tokens are multiplied by 0 and added to the state.
    PaddingTimesZero, "padding-times-zero", "padded_tokens", "vllm-project/vllm-ascend#10276";
    /// A reset multiplies the state by 0.
    ResetTimesZero, "reset-times-zero", "resets", "";
    /// The first token does not decay the initial state.
    InitialStateUndecayed, "initial-state-undecayed", "two_halves", "";
    /// A sequence without tokens has a final state of 0.
    EmptySequenceForgets, "empty-sequence-forgets", "empty_sequences", "";
    /// The scale is divided by √D.
    ScaleByWidth, "scale-by-width", "bound", "";
    /// dk lacks the scale.
    NoScaleInKeys, "no-scale-in-keys", "euler_of_states", "";
    /// Query head h reads the state of key head h mod Hk.
    StateOfHeadModulo, "state-of-head-modulo", "shared_states", "fla-org/flash-linear-attention#1029";
    /// dk and dv hold the last query head of the group.
    StateGroupNotSummed, "state-group-not-summed", "shared_states", "";
    /// The gradient by the final state is ignored.
    FinalCotangentIgnored, "final-cotangent-ignored", "sensitivity", "";
    /// A gate's gradient counts the token that it does not decay.
    GateCountsItsToken, "gate-counts-its-token", "gradient_of_gates", "erfanzar/ejkernel@2107406";
    /// The gradient of a head's decay holds the last batch element only.
    GateGradientOfLastElement, "gate-gradient-of-last-element", "constant_gates", "";
    /// The decay of a head has no gradient.
    NoGateGradient, "no-gate-gradient", "sensitivity", "fla-org/flash-linear-attention@bc3b101";
    /// The order of the sums over a group changes from run to run.
    StateRace, "state-race", "determinism", "fla-org/flash-linear-attention#1228";

    [LAZY_ATTENTION]
    /// The backward pass skips the tiles that the forward pass may skip.
    InactiveTileSkipped, "inactive-tile-skipped", "sum_dk", "Fzkuji/flash-lazy-attention@1b88414";
    /// dS of an inactive pair is 0, as for a kernel whose threshold does not normalise.
    InactivePairSkipped, "inactive-pair-skipped", "sum_dk", "";
    /// dS follows softmax attention: an inactive pair keeps its dout · v.
    GradientOfIdle, "gradient-of-idle", "idle_values", "";
    /// dbias is summed over the active pairs only.
    DbiasOfActiveAlone, "dbias-of-active-alone", "sum_distances", "";
    /// Δ is dout · o, as in softmax attention.
    DeltaOfOutput, "delta-of-output", "sum_dk", "";
    /// Δ is summed for each key tile instead of the row.
    DeltaPerTile, "delta-per-tile", "sum_dk", "Fzkuji/swat-attention@baccc4d";
    /// Keys beyond the reach of the bias are not attended to.
    ReachIsAMask, "reach-is-a-mask", "softmax_at_zero", "Fzkuji/flash-lazy-attention@99744f3";
    /// The bias reaches one distance too far.
    ReachPlusOne, "reach-plus-one", "reach_probe", "Fzkuji/flash-lazy-attention@16c0d0e";
    /// The last column of the bias is ignored.
    LastColumnIgnored, "last-column-ignored", "reach_probe", "Fzkuji/flash-lazy-attention@dc1e61b";
    /// Beyond its reach the bias stays at its last value.
    BiasClamped, "bias-clamped", "reach_probe", "";
    /// Pairs beyond the reach of the bias add their gradient to its last column.
    FarGradientInLastColumn, "far-gradient-in-last-column", "bound", "";
    /// The scale is applied before the gradient of the bias is taken.
    DbiasScaled, "dbias-scaled", "sum_distances", "Fzkuji/swat-attention@baccc4d";
    /// Distances are counted from the first query and key, though the mask is aligned at the last.
    DistanceFromTopLeft, "distance-from-top-left", "reach_probe", "";
    /// Distances in packed sequences are counted along the arrays, not within the sequence.
    DistanceAcrossSequences, "distance-across-sequences", "sequence_invariance", "";
    /// Distances have no sign: keys ahead get a bias.
    DistanceWithoutSign, "distance-without-sign", "bound", "";
    /// n is the number of the row, whatever it sees.
    RowNumberAsCount, "row-number-as-count", "kink_probe", "Fzkuji/flash-lazy-attention@dc1e61b";
    /// n is the number of the key.
    KeyNumberAsCount, "key-number-as-count", "kink_probe", "Fzkuji/swat-attention@baccc4d";
    /// n is the length of the sequence.
    LengthAsCount, "length-as-count", "kink_probe", "";
    /// τ/n is truncated to an integer.
    IntegerDivision, "integer-division", "left_of_weights", "Fzkuji/flash-lazy-attention@299f606";
    /// All heads use the τ of the first head.
    TauOfFirstHead, "tau-of-first-head", "head_invariance", "";
    /// P and τ/n are rounded to bf16 before they are added.
    ThresholdInBf16, "threshold-in-bf16", "bound", "Fzkuji/flash-lazy-attention@9528efe";
    /// A pair with P + τ/n = 0 is active.
    KinkIsActive, "kink-is-active", "kink_probe", "";
    /// e⁰ is one unit in the last place above 1.
    ExpOfZero, "exp-of-zero", "kink_probe", "";
    /// The weights that remain are normalised again.
    Renormalised, "renormalised", "left_of_weights", "";
    /// τ > 0 raises the weights of keys that are not visible, too.
    OffsetOfInvisible, "offset-of-invisible", "softmax_at_zero", "";
    /// Values of inactive pairs are multiplied by 0 instead of being skipped.
    IdleTimesZero, "idle-times-zero", "idle_values", "";
    /// max(NaN, 0) is 0: a NaN score leaves no trace in o.
    NanIsInactive, "nan-is-inactive", "seen_poison", "";
    /// Tiles are skipped by a threshold that forgets n.
    SkipWithoutCount, "skip-without-count", "bound", "";
    /// dtau is summed over all visible pairs, active or not.
    DtauThroughTheKink, "dtau-through-the-kink", "dead_rows", "Fzkuji/flash-lazy-attention@146202e";
    /// dtau lacks the factor 1/n.
    DtauWithoutCount, "dtau-without-count", "bound", "";
    /// Every head reads dout of the first head.
    DoutOfFirstHead, "dout-of-first-head", "head_invariance", "Fzkuji/flash-lazy-attention@7ff07c6";
    /// Rows beyond the length of a sequence are not written.
    PaddingUnwritten, "padding-unwritten", "empty_rows", "Fzkuji/flash-lazy-attention@dc1e61b";

    [LINEAR_CROSS_ENTROPY]
    /// The last tile is filled up with classes of logit 0.
    PaddedClasses, "padded-classes", "equal_logits", "verl-project/verl#2656";
    /// Classes that fill up the last tile are −∞ before the cap, and −c after it.
    PaddingCapped, "padding-capped", "bound", "unslothai/unsloth#10616";
    /// The classes after the last whole tile are dropped.
    ClassTailDropped, "class-tail-dropped", "equal_logits", "";
    /// The running maximum starts at 0: rows of very negative logits underflow.
    MaximumStartsAtZero, "maximum-starts-at-zero", "bound", "";
    /// The temperature divides the log-probability, not the logits.
    TemperatureOfLogprob, "temperature-of-logprob", "bound", "";
    /// The gradients lack the cap's derivative.
    NoCapDerivative, "no-cap-derivative", "bound", "";
    /// Ignored tokens have no loss, but the gradients of a row without a target.
    IgnoredInGradient, "ignored-in-gradient", "ignored_poison", "linkedin/Liger-Kernel#974";
    /// The target's logit is a sum of logits times 0 or 1: NaN beside a logit of −∞.
    TargetByMask, "target-by-mask", "impossible_class", "";
    /// Losses are not reduced, but the first token's cotangent is used for all.
    UpstreamOfFirst, "upstream-of-first", "bound", "linkedin/Liger-Kernel#968";
    /// The gradient through the log-probability is ignored.
    DlogprobDropped, "dlogprob-dropped", "sensitivity", "";
    /// The gradient through lse is ignored.
    LseCotangentDropped, "lse-cotangent-dropped", "class_sums", "";
    /// The loss has the z-loss, the gradients do not.
    LseSquareWithoutGradient, "lse-square-without-gradient", "bound", "";
    /// The target's probability is rounded to bf16 before 1 is subtracted.
    TargetRounded, "target-rounded", "bound", "linkedin/Liger-Kernel#1329";
    /// Gradients of logits below 2⁻¹² are dropped, though nobody asked for it.
    SmallTilesDropped, "small-tiles-dropped", "class_sums", "apple/ml-cross-entropy#14";
    /// dw is summed in bf16.
    DwInBf16, "dw-in-bf16", "bound", "linkedin/Liger-Kernel#512";
    /// Smoothing divides by the classes of a tile, not of all.
    SmoothingOfTile, "smoothing-of-tile", "bound", "NVIDIA/Megatron-LM#737";
    /// The mean counts ignored tokens.
    MeanOverIgnored, "mean-over-ignored", "bound", "";
    /// The mean divides by the number of tokens instead of their weights.
    MeanWithoutWeights, "mean-without-weights", "bound", "";
    /// The mean of no tokens is 0/0.
    NothingOverNothing, "nothing-over-nothing", "bound", "NVIDIA-NeMo/Automodel#3796";
    /// The entropy's sum is not rescaled when the maximum grows.
    EntropyNotRescaled, "entropy-not-rescaled", "bound", "";
    /// p ln p is 0 · −∞ for a class without probability.
    EntropyTimesZero, "entropy-times-zero", "impossible_class", "";
    /// Among equal logits the last one is the argmax.
    LastOfEquals, "last-of-equals", "equal_logits", "";
}
