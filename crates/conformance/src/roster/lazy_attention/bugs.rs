//! The known bugs of lazy_attention.

use crate::zoo::job::Job;
use crate::zoo::mutant::Change::{Input, Outputs, Request};
use crate::zoo::mutant::mutants;
use crate::zoo::rows::Results;
use etalon_problem::{Algorithm, Align, LazyAttention, Mask, Problem};

mutants! {
    &[Algorithm::LazyAttention];
    /// The backward pass skips the tiles that the forward pass may skip.
    INACTIVE_TILE_SKIPPED = "inactive-tile-skipped", "sum_dk",
        "Fzkuji/flash-lazy-attention@1b88414";
    /// dS of an inactive pair is 0, as for a kernel whose threshold does not normalise.
    INACTIVE_PAIR_SKIPPED = "inactive-pair-skipped", "sum_dk", "";
    /// dS follows softmax attention: an inactive pair keeps its dout · v.
    GRADIENT_OF_IDLE = "gradient-of-idle", "idle_values", "";
    /// dbias is summed over the active pairs only.
    DBIAS_OF_ACTIVE_ALONE = "dbias-of-active-alone", "sum_distances", "";
    /// Δ is dout · o, as in softmax attention.
    DELTA_OF_OUTPUT = "delta-of-output", "sum_dk", "";
    /// Δ is summed for each key tile instead of the row.
    DELTA_PER_TILE = "delta-per-tile", "sum_dk", "Fzkuji/swat-attention@baccc4d";
    /// Keys beyond the reach of the bias are not attended to.
    "reach-is-a-mask", "softmax_at_zero", "Fzkuji/flash-lazy-attention@99744f3",
        Request(reach_is_a_mask);
    /// The bias reaches one distance too far.
    REACH_PLUS_ONE = "reach-plus-one", "reach_probe", "Fzkuji/flash-lazy-attention@16c0d0e";
    /// The last column of the bias is ignored.
    LAST_COLUMN_IGNORED = "last-column-ignored", "reach_probe",
        "Fzkuji/flash-lazy-attention@dc1e61b";
    /// Beyond its reach the bias stays at its last value.
    BIAS_CLAMPED = "bias-clamped", "reach_probe", "";
    /// Pairs beyond the reach of the bias add their gradient to its last column.
    FAR_GRADIENT_IN_LAST_COLUMN = "far-gradient-in-last-column", "bound", "";
    /// The scale is applied before the gradient of the bias is taken.
    "dbias-scaled", "sum_distances", "Fzkuji/swat-attention@baccc4d", Outputs(scale_dbias);
    /// Distances are counted from the first query and key, though the mask is aligned at the last.
    "distance-from-top-left", "reach_probe", "", Request(from_top_left);
    /// Distances in packed sequences are counted along the arrays, not within the sequence.
    DISTANCE_ACROSS_SEQUENCES = "distance-across-sequences", "sequence_invariance", "";
    /// Distances have no sign: keys ahead get a bias.
    DISTANCE_WITHOUT_SIGN = "distance-without-sign", "bound", "";
    /// n is the number of the row, whatever it sees.
    ROW_NUMBER_AS_COUNT = "row-number-as-count", "kink_probe",
        "Fzkuji/flash-lazy-attention@dc1e61b";
    /// n is the number of the key.
    KEY_NUMBER_AS_COUNT = "key-number-as-count", "kink_probe", "Fzkuji/swat-attention@baccc4d";
    /// n is the length of the sequence.
    LENGTH_AS_COUNT = "length-as-count", "kink_probe", "";
    /// τ/n is truncated to an integer.
    INTEGER_DIVISION = "integer-division", "left_of_weights", "Fzkuji/flash-lazy-attention@299f606";
    /// All heads use the τ of the first head.
    "tau-of-first-head", "head_invariance", "", Input("tau", |x| x.take(|_| [0; 4]));
    /// P and τ/n are rounded to bf16 before they are added.
    THRESHOLD_IN_BF16 = "threshold-in-bf16", "bound", "Fzkuji/flash-lazy-attention@9528efe";
    /// A pair with P + τ/n = 0 is active.
    KINK_IS_ACTIVE = "kink-is-active", "kink_probe", "";
    /// The weights that remain are normalised again.
    RENORMALISED = "renormalised", "left_of_weights", "";
    /// τ > 0 raises the weights of keys that are not visible, too.
    OFFSET_OF_INVISIBLE = "offset-of-invisible", "softmax_at_zero", "";
    /// Values of inactive pairs are multiplied by 0 instead of being skipped.
    IDLE_TIMES_ZERO = "idle-times-zero", "idle_values", "";
    /// max(NaN, 0) is 0: a NaN score leaves no trace in o.
    NAN_IS_INACTIVE = "nan-is-inactive", "seen_poison", "";
    /// Tiles are skipped by a threshold that forgets n.
    SKIP_WITHOUT_COUNT = "skip-without-count", "bound", "";
    /// dtau is summed over all visible pairs, active or not.
    DTAU_THROUGH_THE_KINK = "dtau-through-the-kink", "dead_rows",
        "Fzkuji/flash-lazy-attention@146202e";
    /// dtau lacks the factor 1/n.
    DTAU_WITHOUT_COUNT = "dtau-without-count", "bound", "";
    /// Every head reads dout of the first head.
    "dout-of-first-head", "head_invariance", "Fzkuji/flash-lazy-attention@7ff07c6",
        Input("dout", |x| x.take(|[b, _, i, c]| [b, 0, i, c]));
    /// Rows beyond the length of a sequence are not written.
    PADDING_UNWRITTEN = "padding-unwritten", "empty_rows", "Fzkuji/flash-lazy-attention@dc1e61b";
}

fn from_top_left(job: &mut Job) {
    if let Problem::LazyAttention(LazyAttention { bias: Some(bias), .. }) = &mut job.problem {
        bias.align = Align::TopLeft;
    }
}

fn reach_is_a_mask(job: &mut Job) {
    if let Problem::LazyAttention(LazyAttention { bias: Some(bias), scores, .. }) = &mut job.problem
    {
        let (left, right) = (Some(bias.width - 1), Some(0));
        let within = Mask::Window { left, right, align: bias.align };
        scores.mask = Mask::And(vec![scores.mask.clone(), within]);
    }
}

fn scale_dbias(job: &Job, results: &mut Results) {
    let scale = job.problem.scores().map_or(1.0, |scores| scores.scale() as f32);
    results.get_mut("dbias").into_iter().for_each(|x| x.each(|_, x| scale * x));
}
