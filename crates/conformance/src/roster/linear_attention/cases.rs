//! The grid of linear_attention.

use crate::capabilities::{Fit, Number};
use crate::cases::axes::{Grid, grid};
use crate::generate::Stream;
use crate::laws::tensors::from_indices;
use crate::roster::attention::{SequenceKind, cuts, lengths, zero_half};
use crate::shapes::{HEADS, LATTICE};
use etalon_problem::{
    Algorithm, Blocking, Decay, Dtype, LinearAttention, LinearExtents, Operand, Problem,
    TokenSequences,
};
use ndarray::ArrayD;

grid! {
    /// Axes of a case of linear_attention, beside its storage type and seed.
    Point {
        /// The decay of the states.
        decay: Decay,
        /// Families of log-decays.
        gates: GateKind = "gates" fn log_decay(x: f64, of_five: usize) -> f64 {
            /// Between −1 and −1/16: a state is gone after a chunk.
            Usual = "usual" => usual(x),
            /// Between −2⁻⁶ and −2⁻¹⁰: a state outlives its sequence.
            Weak = "weak" => -(0.5f64.powi(10) + x * 0.5f64.powi(6)),
            /// From 0 to −30, and −10⁴ among them: e to a chunk's sum underflows, and one over it
            /// overflows.
            Strong = "strong" => match of_five {
                0 => -1e4,
                1 => 0.0,
                _ => -30.0 * x,
            },
            /// One in five is −∞, and one in five 0.
            Resets = "resets" => match of_five {
                0 => f64::NEG_INFINITY,
                1 => 0.0,
                _ => usual(x),
            },
            /// All within 2⁻¹⁴ of −1/16, a thousandth: none may stand for another.
            Near = "near" => -(0.0625 + x * 0.5f64.powi(14)),
        },
        /// States that go in and come out.
        states: StateKind = "states" fn initial_and_final() -> (bool, bool) {
            /// None.
            Neither = "no_state" => (false, false),
            /// An initial state.
            Initial = "initial" => (true, false),
            /// The final state is returned, and has a cotangent.
            Final = "final" => (false, true),
            /// Both.
            Both = "both" => (true, true),
            /// Both, but the final state has no cotangent.
            NoCotangent = "no_dfinal" => (true, true),
        },
        /// A class of extents; the seed draws one of it.
        shape: TokenShape = "shape"
            fn change(e: &mut LinearExtents, value_dim: &mut usize, stream: &Stream) -> () {
            /// Up to 3 tokens, batch 1 or 2.
            Tiny = "tiny" => (e.batch, e.tokens) = (stream.pick(4, &[1, 2]), stream.below(5, 4)),
            /// Some extent is 0: tokens, batch or query heads.
            Nothing = "nothing" => match stream.below(4, 3) {
                0 => e.tokens = 0,
                1 => e.batch = 0,
                _ => e.query_heads = 0,
            },
            /// One token, as in decoding.
            Single = "single" => (e.batch, e.tokens) = (2, 1),
            /// Any number of tokens around the widths of registers and chunks.
            Lattice = "lattice" => e.tokens = stream.pick(2, &LATTICE),
            /// One token beyond a multiple of 32.
            TailOne = "tail_one" => e.tokens = stream.pick(4, &[17, 33, 65, 97, 129]),
            /// Several chunks of any size up to 128.
            Long = "long" => {
                e.tokens = stream.pick(4, &[127, 129, 150, 257]);
                (e.query_heads, e.key_heads) = (2, 1);
                (e.dim, *value_dim) = (8, 8);
            },
            /// Values wider than keys.
            ValueWide = "value_wide" => *value_dim = stream.pick(4, &[41, 64, 72]),
            /// Values narrower than keys.
            ValueNarrow = "value_narrow" => {
                e.dim = stream.pick(4, &[40, 64, 72]);
                *value_dim = stream.pick(5, &[1, 8, 17]);
            },
            /// Square states of several registers' width.
            Dims = "dims" => {
                e.dim = stream.pick(4, &[1, 2, 32, 33, 48, 64]);
                (e.tokens, *value_dim) = (stream.pick(2, &LATTICE).min(33), e.dim);
            },
            /// Several key heads, each with a group.
            Groups = "groups" => {
                (e.query_heads, e.key_heads) = stream.pick(4, &HEADS[2..]);
                (e.batch, e.tokens) = (2, stream.pick(2, &LATTICE).min(33));
            },
            /// A batch of 3 to 5.
            Batch = "batch" => {
                e.batch = stream.pick(4, &[3, 4, 5]);
                e.tokens = stream.pick(2, &LATTICE).min(33);
            },
            /// Large: chunks of six micro-chunks.
            MicroChunks = "micro_chunks" => e.tokens = stream.pick(4, &[193, 250, 290]),
            /// Large: more states of chunks than are kept, so that a span has five chunks of 4.
            Spans = "spans" => {
                (e.query_heads, e.key_heads) = stream.pick(4, &[(1, 1), (2, 1)]);
                // 25 chunks or more, and states of which eleven are more than 1 MiB: five chunks in a
                // span then keep fewest. Products over either side of a state have more than 128 terms.
                (e.dim, *value_dim) = stream.pick(5, &[(160, 150), (190, 130), (130, 190)]);
                e.tokens = stream.pick(6, &[99, 101, 118]);
            },
            /// Large: the same with chunks of 96, the default.
            LongSpans = "long_spans" => {
                (e.query_heads, e.key_heads) = (1, 1);
                (e.tokens, e.dim, *value_dim) =
                    stream.pick(4, &[(1501, 128, 128), (590, 200, 200)]);
            },
            /// Large: wide states and odd ones.
            WideStates = "wide_states" => {
                (e.query_heads, e.key_heads) = (1, 1);
                (e.dim, *value_dim) = stream.pick(4, &[(256, 47), (23, 256), (193, 100)]);
                e.tokens = stream.pick(5, &[50, 97, 110]);
            },
            /// Large: states of more than 65,536 elements together, of which a step makes several
            /// tasks.
            ManyStates = "many_states" => {
                (e.query_heads, e.key_heads) = stream.pick(4, &[(3, 3), (6, 3)]);
                (e.batch, e.tokens) = (3, stream.pick(5, &[2, 5]));
                (e.dim, *value_dim) = stream.pick(6, &[(96, 100), (128, 128)]);
            },
            /// Large: a sequence of small states, of which a span may have more than 1024 tokens.
            LongSequence = "long_sequence" => {
                (e.query_heads, e.key_heads) = (1, 1);
                (e.tokens, e.dim, *value_dim) = stream.pick(4, &[(6500, 4, 3), (6601, 3, 5)]);
            },
        },
        /// Division of the tokens into sequences.
        sequences: SequenceKind,
        /// The factor of o.
        scale: ScaleKind = "scale" fn draw(dim: usize) -> f64 {
            /// 1.
            One = "one" => 1.0,
            /// 1/√D.
            Root = "root" => 1.0 / (dim as f64).sqrt(),
            /// Something negative.
            Negative = "negative" => -0.3,
            /// 0: o is 0, and most gradients.
            Zero = "zero" => 0.0,
        },
        /// Families of elements.
        family: Family = "family" fn element(x: f64, coin: f64, channel: f64, least: f64) -> f64 {
            /// Mean 0, variance 1.
            Generic = "generic" => x,
            /// Around 1, and all positive (|x| is at most 3.5): what is lost or counted twice shows in
            /// every sum.
            Positive = "positive" => 1.0 + 0.25 * x,
            /// Channels of very different size, subnormal numbers among them.
            Range = "range" => if coin < 0.05 { x * 0.5 * least } else { x * channel },
            /// Half of all elements are +0 or −0.
            Zeros = "zeros" => zero_half(x, coin),
        },
    }
}

/// A log-decay of [`GateKind::Usual`].
fn usual(x: f64) -> f64 {
    -(0.0625 + 0.9375 * x)
}

/// The size of a channel: 2⁻³ to 2³, so that also f16 holds every gradient.
fn channel(column: usize) -> f64 {
    2f64.powi((column * 5 % 7) as i32 - 3)
}

impl Grid for Point {
    const LARGE: &'static [&'static str] =
        &["micro_chunks", "spans", "long_spans", "wide_states", "many_states", "long_sequence"];
    const THIN: &'static [&'static str] = &["long_sequence"];
    const ONCE: &'static [&'static str] = &["spans", "wide_states"];

    const TOGETHER: &'static [&'static [(&'static str, &'static str)]] = &[
        &[("decay", "per_token"), ("gates", "resets"), ("states", "final"), ("shape", "long")],
        &[("decay", "per_token"), ("gates", "resets"), ("states", "both"), ("shape", "long")],
        &[("decay", "per_head"), ("gates", "near"), ("shape", "groups")],
        // Over a chunk of 4 a quarter decays: what decays over a chunk too few or too many shows.
        &[
            ("decay", "per_token"),
            ("gates", "near"),
            ("states", "both"),
            ("shape", "spans"),
            ("sequences", "dense"),
            ("scale", "root"),
            ("family", "positive"),
        ],
        // Several resets in a chunk, and chunks without one.
        &[
            ("decay", "per_token"),
            ("gates", "resets"),
            ("states", "both"),
            ("shape", "spans"),
            ("sequences", "lengths"),
            ("scale", "one"),
            ("family", "generic"),
        ],
    ];

    fn problem(&self, _: Algorithm, seed: u64, fit: Fit<'_>) -> Problem {
        let (mut extents, mut value_dim) = shape(self.shape, seed);
        let e = &mut extents;
        fit(&mut [
            (Number::Batch, &mut e.batch),
            (Number::QueryHeads, &mut e.query_heads),
            (Number::KeyHeads, &mut e.key_heads),
            (Number::Tokens, &mut e.tokens),
            (Number::Dim, &mut e.dim),
            (Number::ValueDim, &mut value_dim),
        ]);
        if self.sequences == SequenceKind::Packed {
            extents.batch = 1;
        }
        let sequences = sequences(self.sequences, &extents, seed);
        let mut problem = LinearAttention::new(extents).value_dim(value_dim).decay(self.decay);
        (problem.initial_state, problem.final_state) = self.states.initial_and_final();
        problem.scale(self.scale.draw(extents.dim)).sequences(sequences).into()
    }

    fn values(&self, _: &Problem, operand: &Operand, dtype: Dtype, seed: u64) -> ArrayD<f64> {
        let gates = matches!(operand.name, "g" | "g_gamma");
        let coins = Stream::new(seed, if gates { "gate coins" } else { "coins" });
        let (stream, mut at) = (Stream::new(seed, operand.name), 0);
        from_indices(&operand.shape, |index| {
            at += 1;
            if gates {
                return self.gates.log_decay(stream.uniform(at), coins.below(at, 5));
            }
            let column = index.last().copied().unwrap_or(0);
            let (x, coin) = (stream.normal(at), coins.uniform(at));
            self.family.element(x, coin, channel(column), dtype.min_positive())
        })
    }

    fn given(&self, operand: &Operand) -> bool {
        operand.name != "dfinal_state" || self.states != StateKind::NoCotangent
    }

    fn blocking(&self) -> Option<Blocking> {
        match self.shape {
            TokenShape::Spans => Some(Blocking::new(4, 4)),
            TokenShape::MicroChunks => Some(Blocking::new(96, 16)),
            _ => None,
        }
    }

    /// The bounds follow the results where terms do not cancel, however many they are. (dscale is one sum over
    /// everything, and elsewhere it may come out anywhere near 0.)
    fn is_rich(&self, problem: &Problem) -> bool {
        let Problem::LinearAttention(problem) = problem else { return false };
        let lengths = problem.list_sequences().iter().map(|s| s.tokens).max();
        self.family == Family::Positive
            && !matches!(self.gates, GateKind::Strong | GateKind::Resets)
            && lengths.is_some_and(|tokens| tokens >= 4)
            && problem.extents.query_heads > 0
            && problem.scale > 0.0
    }

    fn is_generic(&self) -> bool {
        matches!(self.family, Family::Generic | Family::Positive)
    }

    fn is_smooth(&self) -> bool {
        // A gate of 0 or −∞ is not to be moved.
        let gates = matches!(self.gates, GateKind::Usual | GateKind::Weak | GateKind::Near);
        let elements = !matches!(self.family, Family::Range | Family::Zeros);
        elements && (gates || self.decay == Decay::None)
    }
}

/// Extents of a class, and E: tokens around the edges of chunks, states that are no squares, groups
/// of heads.
fn shape(class: TokenShape, seed: u64) -> (LinearExtents, usize) {
    let stream = Stream::new(seed, "shape");
    let (query_heads, key_heads) = stream.pick(0, &[(1, 1), (2, 1), (2, 2), (4, 2), (3, 1)]);
    let dim = stream.pick(1, &[4, 8, 11, 16, 20]);
    let mut extents = LinearExtents { batch: 1, query_heads, key_heads, tokens: 33, dim };
    let mut value_dim = stream.pick(3, &[dim, dim, 9]);
    class.change(&mut extents, &mut value_dim, &stream);
    (extents, value_dim)
}

/// Sequences of a kind.
fn sequences(kind: SequenceKind, e: &LinearExtents, seed: u64) -> TokenSequences {
    let stream = Stream::new(seed, "sequences");
    match kind {
        SequenceKind::Dense => TokenSequences::Dense,
        SequenceKind::Lengths => {
            let draw = |b| stream.below(b, e.tokens + 1);
            TokenSequences::Lengths { tokens: lengths(e.batch, e.tokens, draw) }
        }
        SequenceKind::Packed => TokenSequences::Packed { cu_tokens: cuts(e.tokens, 1, &stream, 0) },
    }
}
