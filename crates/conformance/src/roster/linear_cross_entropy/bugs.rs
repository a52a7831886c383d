//! The known bugs of linear_cross_entropy.

use crate::zoo::job::Job;
use crate::zoo::mutant::Change::{Input, Request, Unread};
use crate::zoo::mutant::mutants;
use etalon_problem::{Algorithm, LinearCrossEntropy, NothingLeft, Pass, Problem, Reduction};

mutants! {
    &[Algorithm::LinearCrossEntropy];
    /// The last tile is filled up with classes of logit 0.
    PADDED_CLASSES = "padded-classes", "equal_logits", "verl-project/verl#2656";
    /// Classes that fill up the last tile are −∞ before the cap, and −c after it.
    PADDING_CAPPED = "padding-capped", "bound", "unslothai/unsloth#10616";
    /// The classes after the last whole tile are dropped.
    "class-tail-dropped", "equal_logits", "", Request(|job| job.drops_tail = true);
    /// The running maximum starts at 0: rows of very negative logits underflow.
    MAXIMUM_STARTS_AT_ZERO = "maximum-starts-at-zero", "bound", "";
    /// The temperature divides the log-probability, not the logits.
    TEMPERATURE_OF_LOGPROB = "temperature-of-logprob", "bound", "";
    /// The gradients lack the cap's derivative.
    NO_CAP_DERIVATIVE = "no-cap-derivative", "bound", "";
    /// Ignored tokens have no loss, but the gradients of a row without a target.
    IGNORED_IN_GRADIENT = "ignored-in-gradient", "ignored_poison", "linkedin/Liger-Kernel#974";
    /// A target that is no class counts as the class next to it.
    TARGET_CLAMPED = "target-clamped", "no_such_class", "";
    /// The smoothing term adds up logarithms of probabilities, which are −∞ once these underflow.
    SMOOTHING_BY_LOG = "smoothing-by-log", "bound", "";
    /// The target's logit is a sum of logits times 0 or 1: NaN beside a logit of −∞.
    TARGET_BY_MASK = "target-by-mask", "impossible_class", "";
    /// Losses are not reduced, but the first token's cotangent is used for all.
    "upstream-of-first", "bound", "linkedin/Liger-Kernel#968",
        Input("dloss", |x| x.take(|_| [0; 4]));
    /// The gradient through the log-probability is ignored.
    "dlogprob-dropped", "sensitivity", "", Unread(&["dlogprob"]);
    /// The gradient through lse is ignored.
    "lse-cotangent-dropped", "class_sums", "", Unread(&["dlse"]);
    /// The loss has the z-loss, the gradients do not.
    "lse-square-without-gradient", "bound", "", Request(without_lse_square);
    /// The target's probability is rounded to bf16 before 1 is subtracted.
    TARGET_ROUNDED = "target-rounded", "bound", "linkedin/Liger-Kernel#1329";
    /// Gradients of logits below 2⁻¹² are dropped, though nobody asked for it.
    SMALL_TILES_DROPPED = "small-tiles-dropped", "class_sums", "apple/ml-cross-entropy#14";
    /// The path of one token and several classes adds no bias.
    "one-token-without-bias", "chunks_of_tokens", "", Request(bias_of_several_tokens);
    /// dw is summed in bf16.
    DW_IN_BF16 = "dw-in-bf16", "bound", "linkedin/Liger-Kernel#512";
    /// Smoothing divides by the classes of a tile, not of all.
    SMOOTHING_OF_TILE = "smoothing-of-tile", "bound", "NVIDIA/Megatron-LM#737";
    /// The mean counts ignored tokens.
    "mean-over-ignored", "bound", "", Request(|job| mean_by(job.input("targets").data.len(), job));
    /// The mean divides by the number of tokens instead of their weights.
    "mean-without-weights", "bound", "", Request(|job| mean_by(counted(job), job));
    /// The mean of no tokens is 0/0.
    "nothing-over-nothing", "bound", "NVIDIA-NeMo/Automodel#3796",
        Request(|job| problem(job, |x| x.nothing_left = NothingLeft::Nan));
    /// The entropy's sum is not rescaled when the maximum grows.
    ENTROPY_NOT_RESCALED = "entropy-not-rescaled", "bound", "";
    /// p ln p is 0 · −∞ for a class without probability.
    ENTROPY_TIMES_ZERO = "entropy-times-zero", "impossible_class", "";
    /// A filter compares da itself with its threshold, so that it leaves out what is very negative.
    THRESHOLD_WITH_SIGN = "threshold-with-sign", "filter", "";
    /// The bound of dh takes the first row of w in a tile for the longest.
    BOUND_OF_FIRST_ROW = "bound-of-first-row", "filter", "";
    /// Contributions that a filter leaves out of dh and dw are missing in dbias, too.
    DBIAS_FILTERED = "dbias-filtered", "filter", "";
    /// A filter leaves out what is as large as its threshold.
    THRESHOLD_LEFT_OUT = "threshold-left-out", "filter_of_nothing", "";
    /// Among equal logits the last one is the argmax.
    LAST_OF_EQUALS = "last-of-equals", "equal_logits", "";
}

fn problem(job: &mut Job, change: impl FnOnce(&mut LinearCrossEntropy)) {
    if let Problem::LinearCrossEntropy(problem) = &mut job.problem {
        change(problem);
    }
}

fn without_lse_square(job: &mut Job) {
    if job.pass == Pass::Backward {
        problem(job, |problem| problem.lse_square_scale = 0.0);
    }
}

fn bias_of_several_tokens(job: &mut Job) {
    if matches!(&job.problem, Problem::LinearCrossEntropy(x) if x.tokens == 1 && x.vocab > 1) {
        job.inputs.get_mut("bias").into_iter().for_each(|x| x.clear(|_| true));
    }
}

/// A mean divides by this number.
fn mean_by(number: usize, job: &mut Job) {
    problem(job, |problem| {
        if problem.reduction == Reduction::Mean {
            problem.reduction = Reduction::By { normaliser: number as f64 };
        }
    });
}

/// The number of tokens with a target.
fn counted(job: &Job) -> usize {
    let Problem::LinearCrossEntropy(problem) = &job.problem else { return 0 };
    let counts = |target: &&f32| **target as i64 != problem.ignore_index;
    job.input("targets").data.iter().filter(counts).count()
}
