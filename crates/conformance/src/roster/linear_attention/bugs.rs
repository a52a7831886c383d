//! The known bugs of linear_attention.

use crate::zoo::job::Job;
use crate::zoo::mutant::Change::{Output, Request, SecondOrder, Unread};
use crate::zoo::mutant::mutants;
use crate::zoo::rows::{Results, Rows};
use etalon_problem::{Algorithm, Problem};

mutants! {
    &[Algorithm::LinearAttention];
    /// The state takes in a chunk before the chunk's outputs are read from it.
    STATE_BEFORE_USE = "state-before-use", "bound", "mcpirate17/HYDRA@57a55dc";
    /// The gradient of the state takes in a chunk before the chunk's dk and dv are read from it.
    COTANGENT_BEFORE_USE = "cotangent-before-use", "euler_of_states", "mcpirate17/HYDRA@57a55dc";
    /// dk reads the gradient of the state untransposed.
    STATE_NOT_TRANSPOSED = "state-not-transposed", "bound", "mcpirate17/HYDRA@57a55dc";
    /// dq keeps the micro-chunk of its own token only.
    QUERIES_OF_DIAGONAL = "queries-of-diagonal", "euler_of_outputs", "mcpirate17/HYDRA@57a55dc";
    /// The part within chunks uses chunks half as long as the part between them.
    CHUNKS_OF_TWO_SIZES = "chunks-of-two-sizes", "integer_probe", "mcpirate17/HYDRA@57a55dc";
    /// The second derivative by dout is not computed.
    "no-second-gradient-of-dout", "second_of_outputs", "", SecondOrder(without_gdout);
    /// The exponential of a decay is off by 16 roundoffs.
    DECAY_OFF = "decay-off-by-16", "decay_probe", "";
    /// The decay is ignored.
    "decay-ignored", "bound", "mcpirate17/HYDRA@57a55dc", Unread(&["g", "g_gamma"]);
    /// The tokens after the last whole chunk are not written.
    "tail-of-tokens-dropped", "integer_probe", "OpenNLPLab/lightning-attention#27",
        Request(|job| job.drops_tail = true);
    /// A part of dq is rounded to bf16 before the other is added.
    QUERY_GRADIENT_ROUNDED_TWICE = "query-gradient-rounded-twice", "bound",
        "OpenNLPLab/lightning-attention@d15c385";
    /// The state from before the chunk is decayed once too little.
    QUERY_DECAY_ONE_SHORT = "query-decay-one-short", "two_halves", "vllm-project/vllm@030ea52";
    /// The last chunk decays the state as if it were whole.
    TAIL_DECAYS_AS_CHUNK = "tail-decays-as-chunk", "token_by_token", "inclusionAI/cuLA@fa742a2";
    /// The state decays by one token's gate per chunk.
    ONE_DECAY_PER_CHUNK = "one-decay-per-chunk", "bound", "inclusionAI/linghe@02edabd";
    /// Keys are divided by the decay up to them.
    INVERSE_DECAY = "inverse-decay", "bound", "sgl-project/sglang@7121d18";
    /// The decay between two tokens is the difference of two sums from the beginning.
    PREFIX_DIFFERENCE = "prefix-difference", "bound", "";
    /// The state is stored in bf16 between chunks.
    STATE_IN_BF16 = "state-in-bf16", "bound", "vllm-project/vllm#19592";
    /// A packed sequence begins with the state of the one before it.
    STATE_OF_PREVIOUS_SEQUENCE = "state-of-previous-sequence", "alone", "";
    /// Only the last slice of the final state is written.
    "last-slice-of-state", "bound", "vllm-project/vllm@7e1c150", Output("final_state", last_slice);
    /// A square final state is written transposed.
    "final-state-transposed", "two_halves", "", Output("final_state", transposed);
    /// Padding tokens are multiplied by 0 and added to the state.
    PADDING_TIMES_ZERO = "padding-times-zero", "padded_tokens", "vllm-project/vllm-ascend#10276";
    /// A reset multiplies the state by 0.
    RESET_TIMES_ZERO = "reset-times-zero", "resets", "";
    /// The first token does not decay the initial state.
    INITIAL_STATE_UNDECAYED = "initial-state-undecayed", "two_halves", "";
    /// A sequence without tokens has a final state of 0.
    EMPTY_SEQUENCE_FORGETS = "empty-sequence-forgets", "empty_sequences", "";
    /// The scale is divided by √D.
    "scale-by-width", "bound", "", Request(scale_by_width);
    /// dk lacks the scale.
    NO_SCALE_IN_KEYS = "no-scale-in-keys", "euler_of_states", "";
    /// Query head h reads the state of key head h mod Hk.
    STATE_OF_HEAD_MODULO = "state-of-head-modulo", "shared_states",
        "fla-org/flash-linear-attention#1029";
    /// dk and dv hold the last query head of the group.
    STATE_GROUP_NOT_SUMMED = "state-group-not-summed", "shared_states", "";
    /// The gradient by the final state is ignored.
    "final-cotangent-ignored", "sensitivity", "", Unread(&["dfinal_state"]);
    /// A gate's gradient counts the token that it does not decay.
    GATE_COUNTS_ITS_TOKEN = "gate-counts-its-token", "gradient_of_gates",
        "erfanzar/ejkernel@2107406";
    /// The gradient of a head's decay holds the last batch element only.
    GATE_GRADIENT_OF_LAST_ELEMENT = "gate-gradient-of-last-element", "constant_gates", "";
    /// The decay of a head has no gradient.
    "no-gate-gradient", "sensitivity", "fla-org/flash-linear-attention@bc3b101",
        Output("dg_gamma", |x| x.clear(|_| true));
    /// The order of the sums over a group changes from run to run.
    STATE_RACE = "state-race", "determinism", "fla-org/flash-linear-attention#1228";
}

fn scale_by_width(job: &mut Job) {
    if let Problem::LinearAttention(problem) = &mut job.problem {
        problem.scale /= (problem.extents.dim as f64).sqrt();
    }
}

fn last_slice(x: &mut Rows) {
    let sliced = x.shape[2] > 32;
    x.clear(|[_, _, d, _]| sliced && d < 32);
}

fn transposed(x: &mut Rows) {
    if x.shape[2] == x.shape[3] {
        x.take(|[s, h, d, e]| [s, h, e, d]);
    }
}

fn without_gdout(results: &mut Results, _: Results) {
    results.get_mut("gdout").into_iter().for_each(|x| x.clear(|_| true));
}
