//! The known bugs of attention and attention_lse.

use crate::zoo::job::Job;
use crate::zoo::mutant::Change::{Input, Output, Outputs, Request, SecondOrder, Unread};
use crate::zoo::mutant::mutants;
use crate::zoo::rows::{Results, Rows, through_bf16};
use etalon_problem::{Algorithm, Align, Mask, Pass, Scores, Sequences};
use std::f32::consts::LOG2_E;

mutants! {
    &[Algorithm::Attention, Algorithm::AttentionLse];
    /// In one row of each sequence every edge of the mask lies one key too far to the right.
    ONE_ROW_SHIFTED = "one-row-shifted", "edge_probe", "pytorch/pytorch#192138";
    /// Masks are aligned at the top left instead of the bottom right.
    "top-left", "edge_probe", "Dao-AILab/flash-attention#282", Request(align_top_left);
    /// A window reaches one key too far to the left.
    "window-left-plus-one", "edge_probe", "huggingface/transformers#39408",
        Request(|job| windows(job, |left, _| *left = left.map(|x| x + 1)));
    /// A window reaches one key less to the left.
    "window-left-minus-one", "edge_probe", "microsoft/onnxruntime#25927",
        Request(|job| windows(job, |left, _| *left = left.map(|x| x.saturating_sub(1))));
    /// A window lets one future key in.
    "window-right-plus-one", "edge_probe", "jax-ml/jax#39576",
        Request(|job| windows(job, |_, right| *right = right.map(|x| x + 1)));
    /// The backward pass forgets the window.
    "backward-without-window", "edge_probe", "meta-pytorch/MSLK#263", Request(without_window);
    /// The keys after the last whole tile are dropped.
    "key-tail-dropped", "count_probe", "pytorch/pytorch#191937",
        Request(|job| job.drops_tail = true);
    /// A packed sequence sees the first key of the next.
    PACKED_LEAK = "packed-leak", "count_probe", "NVIDIA-NeMo/RL#2105";
    /// The backward pass reads the padding beyond the lengths.
    "padding-read", "unseen_poison", "Dao-AILab/flash-attention#2167", Request(without_lengths);
    /// Masked pairs are multiplied by 0 instead of being skipped.
    TIMES_ZERO = "times-zero", "unseen_poison", "pytorch/pytorch#101967";
    /// Query head h uses key head h mod Hk.
    HEAD_MODULO = "head-modulo", "groups_are_copies", "HazyResearch/HipKittens#22";
    /// A bias per batch element is read from the first element always.
    "bias-of-first-batch", "batch_invariance", "",
        Input("bias", |x| x.take(|[_, h, i, j]| [0, h, i, j]));
    /// o is not rescaled when the maximum grows.
    NO_RESCALE_OF_O = "no-rescale-of-o", "edge_probe", "paiml/aprender#2753";
    /// l is not rescaled when the maximum grows.
    NO_RESCALE_OF_L = "no-rescale-of-l", "edge_probe", "Dao-AILab/flash-attention#2082";
    /// The rescale is skipped in the last tile.
    NO_RESCALE_IN_LAST_TILE = "no-rescale-in-last-tile", "edge_probe",
        "Dao-AILab/flash-attention@13696f2e";
    /// −1e4 stands for −∞: real scores below it vanish.
    FINITE_SENTINEL = "finite-sentinel", "bound", "tracel-ai/burn#4697";
    /// The maximum is also taken over masked keys.
    MAXIMUM_OF_INVISIBLE = "maximum-of-invisible", "edge_probe", "pytorch/pytorch#156379";
    /// The maximum is a constant.
    CONSTANT_MAXIMUM = "constant-maximum", "bound", "HabanaAI/vllm-fork#275";
    /// A fully masked row divides 0 by 0.
    "empty-row-is-nan", "empty_rows", "pytorch/pytorch#41508", Outputs(empty_rows_are_nan);
    /// The sink does not take part in the maximum: its exponential overflows.
    SINK_NOT_IN_MAXIMUM = "sink-not-in-maximum", "bound", "PaddlePaddle/PaddleFleet#1439";
    /// lse does not count the sink.
    SINK_NOT_IN_LSE = "sink-not-in-lse", "bound", "";
    /// The gradient of the sinks is not computed.
    "no-gradient-of-sinks", "sensitivity", "Dao-AILab/flash-attention#1973",
        Output("dsinks", |x| x.clear(|_| true));
    /// The gradient of the bias is not computed.
    "no-gradient-of-bias", "sum_dbias", "jax-ml/jax#27184", Output("dbias", |x| x.clear(|_| true));
    /// The gradient lacks the softcap's derivative.
    NO_SOFTCAP_DERIVATIVE = "no-softcap-derivative", "bound", "Dao-AILab/flash-attention@14f3627d";
    /// The softcap is applied after the bias: a key with bias −∞ comes back with weight e^−c.
    SOFTCAP_AFTER_BIAS = "softcap-after-bias", "bound", "onnx/onnx#7867";
    /// The variant with a scale, a softcap and a bias, but without sinks, caps both.
    BIAS_CAPPED_WITHOUT_SINKS = "bias-capped-without-sinks", "chunks_of_keys", "";
    /// The path of one query caps no scores under a causal mask or segments.
    "one-query-uncapped", "chunks_of_queries", "", Request(cap_of_several_queries);
    /// The softcap is ignored.
    "softcap-ignored", "bound", "sgl-project/sgl-kernel-xpu#491",
        Request(|job| scores(job, |scores| scores.softcap = None));
    /// The scale comes from the values' width.
    "scale-of-values", "bound", "XunhaoLai/native-sparse-attention-triton#27",
        Request(|job| scale_by(job.input("v").shape[3], job));
    /// The scale is 1/√(D + 1).
    "scale-off-by-one", "bound", "", Request(|job| scale_by(job.input("q").shape[3] + 1, job));
    /// Only the first 64 elements of a head take part in a score.
    "first-64-of-head", "bound", "fla-org/native-sparse-attention#26",
        Input("q", |x| x.clear(|[.., c]| c >= 64));
    /// lse is in base 2.
    "lse-in-base-2", "bound", "flashinfer-ai/flashinfer#2113",
        Output("lse", |x| x.each(|_, x| x * LOG2_E));
    /// lse is stored in bf16.
    "lse-in-bf16", "bound", "zhuzilin/ring-flash-attention#22",
        Output("lse", |x| x.each(|_, x| through_bf16(x)));
    /// The gradient through lse is ignored.
    "dlse-ignored", "sum_dk", "Dao-AILab/flash-attention#141", Unread(&["dlse"]);
    /// dS lacks δ.
    "delta-omitted", "sum_dk", "", Input("o", |x| x.clear(|_| true));
    /// The backward pass reads the next head's lse.
    "lse-of-next-head", "sum_dv", "Dao-AILab/flash-attention@b3f1b6a5", Input("lse", of_next_head);
    /// The last key tile's partial sum of dq is lost.
    PARTIAL_LOST = "partial-lost", "bound", "fla-org/flash-linear-attention@e4c7f880";
    /// The partial sums of dq are stored in bf16.
    PARTIALS_IN_BF16 = "partials-in-bf16", "bound", "";
    /// P is rounded to bf16 before it multiplies dout.
    WEIGHTS_IN_BF16 = "weights-in-bf16", "sum_dv", "";
    /// dk and dv hold the last head of the group, not the sum.
    GROUP_NOT_SUMMED = "group-not-summed", "groups_are_copies",
        "XunhaoLai/native-sparse-attention-triton#27";
    /// The last columns of dv are not written when E is no multiple of 8.
    "value-tail-dropped", "sum_dv", "flagos-ai/FlagGems#898", Output("dv", without_tail);
    /// Gradients of keys that nobody sees are not written.
    UNWRITTEN = "unwritten", "empty_rows", "linkedin/Liger-Kernel@4a1677b8";
    /// The order of the sums over a group changes from run to run.
    RACE = "race", "determinism", "facebookresearch/xformers#1392";
    /// The backward pass multiplies dS by q and k, but not by the scale.
    "gradients-unscaled", "bound", "", Outputs(unscaled);
    /// A row that sees nothing in its first tile subtracts −∞ from −∞.
    EMPTY_TILE_IS_NAN = "empty-tile-is-nan", "bound", "";
    /// The sink's weights are rounded to bf16 before their gradient is summed.
    SINK_TERMS_IN_BF16 = "sink-terms-in-bf16", "bound", "";
    /// The exponential of a weight is off by 16 roundoffs.
    EXP_OFF = "exp-off-by-16", "exp_probe", "";
    /// The logarithm of lse is off by 16 roundoffs.
    LOG_OFF = "log-off-by-16", "log_probe", "";
    /// The tanh of a softcap is off by 32 roundoffs.
    TANH_OFF = "tanh-off-by-32", "tanh_probe", "";
    /// The double backward pass treats the weights of the forward pass as constants.
    "constant-weights", "bound", "", SecondOrder(with_constant_weights);
}

fn scores(job: &mut Job, change: impl FnOnce(&mut Scores)) {
    if let Some(scores) = job.problem.scores_mut() {
        change(scores);
    }
}

fn windows(job: &mut Job, change: fn(&mut Option<usize>, &mut Option<usize>)) {
    let change = &mut |mask: &mut Mask| {
        if let Mask::Window { left, right, .. } = mask {
            change(left, right);
        }
    };
    scores(job, |scores| scores.mask.visit_mut(change));
}

fn align_top_left(job: &mut Job) {
    let change = &mut |mask: &mut Mask| {
        mask.align_mut().into_iter().for_each(|align| *align = Align::TopLeft);
    };
    scores(job, |scores| scores.mask.visit_mut(change));
}

fn without_window(job: &mut Job) {
    let backward = job.pass == Pass::Backward;
    scores(job, |scores| match scores.mask {
        Mask::Window { .. } if backward => scores.mask = Mask::Full,
        _ => {}
    });
}

fn without_lengths(job: &mut Job) {
    let backward = job.pass == Pass::Backward;
    scores(job, |scores| match scores.sequences {
        Sequences::Lengths { .. } if backward => scores.sequences = Sequences::Dense,
        _ => {}
    });
}

/// The scale that follows from a width, where the problem leaves it to the kernel.
fn scale_by(width: usize, job: &mut Job) {
    if width > 0 {
        scores(job, |x| {
            x.softmax_scale.get_or_insert(1.0 / (width as f64).sqrt());
        });
    }
}

fn cap_of_several_queries(job: &mut Job) {
    scores(job, |scores| match scores.mask {
        Mask::Causal { .. } | Mask::Segments { .. } if scores.extents.queries == 1 => {
            scores.softcap = None;
        }
        _ => {}
    });
}

fn of_next_head(x: &mut Rows) {
    let heads = x.shape[1];
    x.take(|[b, h, i, c]| [b, (h + 1) % heads, i, c]);
}

fn without_tail(x: &mut Rows) {
    let whole = x.shape[3] / 8 * 8;
    x.clear(|[.., c]| c >= whole);
}

fn empty_rows_are_nan(_: &Job, results: &mut Results) {
    let Some(lse) = results.get("lse").cloned() else { return };
    let empty = |at| lse.row(at)[0] == f32::NEG_INFINITY;
    let change =
        |x: &mut Rows| x.each(|[b, h, i, _], x| if empty([b, h, i]) { f32::NAN } else { x });
    results.get_mut("o").into_iter().for_each(change);
}

fn unscaled(job: &Job, results: &mut Results) {
    let scale = job.problem.scores().map_or(1.0, |scores| scores.scale() as f32);
    let gradients = results.iter_mut().filter(|(name, _)| ["dq", "dk"].contains(name));
    gradients.for_each(|(_, x)| x.each(|_, x| x / scale));
}

/// With constant weights, dS times ddk and ddq is all that is left of the second derivative.
fn with_constant_weights(results: &mut Results, mut first: Results) {
    let pairs = [("gq", "dq"), ("gk", "dk")].into_iter();
    results.extend(pairs.filter_map(|(second, name)| Some((second, first.remove(name)?))));
}
