//! The grid of attention and attention_lse.

use super::factors::{Flags, add_bias, array, chunk, cuts, lengths, reach, segments, window};
use crate::capabilities::{Fit, Number};
use crate::cases::axes::{Grid, Names, grid};
use crate::generate::Stream;
use crate::shapes::ShapeClass;
use etalon_problem::Align::{BottomRight, TopLeft};
use etalon_problem::{
    Algorithm, Attention, AttentionLse, Blocking, Dtype, Extents, Mask, Operand, Problem, Role,
    Scores, Sequences,
};
use ndarray::ArrayD;

grid! {
    /// Axes of a case of attention or attention_lse, beside its storage type and seed.
    Point {
        /// Kinds of mask.
        mask: MaskKind = "mask" fn draw(e: &Extents, stream: &Stream) -> Mask {
            /// Every pair.
            Full = "full" => Mask::Full,
            /// Causal, the last query aligned with the last key.
            Causal = "causal" => Mask::causal(),
            /// Causal, the first query aligned with the first key.
            CausalTopLeft = "causal_top_left" => Mask::Causal { align: TopLeft },
            /// A window with both ends.
            Window = "window" => window(e, stream, BottomRight),
            /// A window open to the right.
            WindowLeft = "window_left" => Mask::window(reach(e, stream, 0), None),
            /// A window open to the left that reaches into the future.
            WindowRight = "window_right" => Mask::window(None, reach(e, stream, 1)),
            /// A window with both ends, aligned at the top left.
            WindowTopLeft = "window_top_left" => window(e, stream, TopLeft),
            /// Causal within chunks.
            Chunked = "chunked" => Mask::ChunkedCausal {
                chunk: chunk(e, stream),
                align: stream.pick(3, &[BottomRight, TopLeft]),
            },
            /// Segments, with padding, of ids that come back or lie side by side.
            Segments = "segments" => segments(e, stream),
            /// A random array, with empty rows, nearly full, or in blocks, that batch elements or heads
            /// may share.
            Array = "array" => {
                // Mostly each batch element and head has flags of its own.
                let own = |number, n| stream.pick(number, &[1, n, n, n]);
                let shared = [own(4, e.batch), own(5, e.query_heads)];
                array(e, shared, stream.pick(6, &[Flags::Some(0.7), Flags::Most, Flags::Blocks]), stream)
            },
            /// Causal and segments.
            And = "and" => Mask::And(vec![Mask::causal(), segments(e, stream)]),
            /// A window or a sparse array.
            Or = "or" => Mask::Or(vec![
                Mask::window(reach(e, stream, 0), 0),
                array(e, [1, 1], Flags::Some(0.1), stream),
            ]),
        },
        /// Sets of options.
        options: OptionKind = "options" fn set(scores: &mut Scores, stream: &Stream) -> () {
            /// None.
            Plain = "plain" => {},
            /// A softcap that bends the scores: their deviation is about 1, so that tanh does not only
            /// saturate.
            Softcap = "softcap" => scores.softcap = Some(stream.pick(0, &[1.5, 2.0, 5.0])),
            /// Sinks.
            Sinks = "sinks" => scores.sinks = true,
            /// A bias of every batch element and head.
            Bias = "bias" => add_bias(scores, |e| [e.batch, e.query_heads]),
            /// A bias that all share.
            BiasShared = "bias_shared" => add_bias(scores, |_| [1, 1]),
            /// A bias per head.
            BiasHeads = "bias_heads" => add_bias(scores, |e| [1, e.query_heads]),
            /// A scale that is not 1/√D, negative and 0 among them.
            Scale = "scale" => {
                scores.softmax_scale = Some(stream.pick(1, &[0.125, 0.3, 0.45, -0.3, 0.0]));
            },
            /// Scale, softcap, sinks and a bias per batch element.
            Everything = "everything" => {
                for kind in [Self::Scale, Self::Softcap, Self::Sinks] {
                    kind.set(scores, stream);
                }
                add_bias(scores, |e| [e.batch, 1]);
            },
        },
        /// The class of extents.
        shape: ShapeClass,
        /// Division of the rows into sequences.
        sequences: SequenceKind = "sequences" fn draw(e: &Extents, stream: &Stream) -> Sequences {
            /// One sequence per batch element.
            Dense = "dense" => Sequences::Dense,
            /// Padded on the right.
            Lengths = "lengths" => {
                let of = |n, first| lengths(e.batch, n, |b| stream.below(first + 2 * b, n + 1));
                Sequences::Lengths { query: of(e.queries, 0), key: of(e.keys, 1) }
            },
            /// Laid end to end, empty ones among them: one without queries, and another without keys.
            Packed = "packed" => Sequences::Packed {
                cu_query: cuts(e.queries, 1, stream, 0),
                cu_key: cuts(e.keys, 3, stream, 10),
            },
        },
        /// Families of elements. Upstream gradients are random and signed in each of them, never ones.
        family: Family = "family" {
            /// Mean 0, variance 1.
            Generic = "generic",
            /// Scores with deviation 3: one key has most of the weight, as in trained models.
            Peaked = "peaked",
            /// Every score far below any finite stand-in for −∞.
            Large = "large",
            /// Five distinct keys, repeated: equal maxima in every tile.
            Ties = "ties",
            /// Scores that climb with the key: each tile has a new maximum.
            Ascending = "ascending",
            /// Scores that fall with the key: no tile but the first has a new maximum.
            Descending = "descending",
            /// Every 64th key takes almost all weight, in each head another one.
            SinkKey = "sink_key",
            /// A bias with −∞: rows, tiles, heads and batch elements that see nothing, in each head others.
            Holes = "holes",
            /// Channels of very different size, subnormal numbers among them.
            Range = "range",
            /// Half of all elements are +0 or −0.
            Zeros = "zeros",
        },
        /// The cotangent of lse: given or absent.
        dlse: DlseKind = "dlse" {
            /// There is one.
            Present = "dlse",
            /// There is none.
            Absent = "no_dlse",
        },
    }
}

impl Grid for Point {
    const STORAGE: &'static [Dtype] = &[Dtype::F32, Dtype::Bf16, Dtype::F16];
    const LARGE: &'static [&'static str] = crate::shapes::LARGE;
    const THIN: &'static [&'static str] = crate::shapes::THIN;
    const ONCE: &'static [&'static str] = crate::shapes::ONCE;

    const TOGETHER: &'static [&'static [(&'static str, &'static str)]] = &[
        // A sink of +∞, the second, beside pairs that a bias of −∞ hides and the mask does not, in tiles
        // that every pair of the mask fills.
        &[
            ("mask", "full"),
            ("options", "sinks"),
            ("shape", "tail_one"),
            ("sequences", "dense"),
            ("family", "holes"),
        ],
        // Wide sums are rescaled: every row sees all keys, of which the last are far above the others.
        &[
            ("storage", "bf16"),
            ("mask", "full"),
            ("options", "plain"),
            ("shape", "wide_heads"),
            ("sequences", "dense"),
            ("family", "ascending"),
        ],
        // Wide heads of a type that tensor cores multiply, with all that their kernels take.
        &[
            ("storage", "bf16"),
            ("mask", "chunked"),
            ("options", "sinks"),
            ("shape", "wide_heads"),
            ("sequences", "packed"),
            ("family", "generic"),
            ("dlse", "dlse"),
        ],
        // The gradient of the sinks is summed over several waves.
        &[
            ("mask", "and"),
            ("options", "sinks"),
            ("shape", "query_pack"),
            ("sequences", "packed"),
            ("family", "descending"),
            ("dlse", "dlse"),
        ],
    ];

    fn restrict(algorithm: Algorithm, axes: &mut [Names]) {
        if let (Algorithm::AttentionLse, Some((_, dlse))) = (algorithm, axes.last_mut()) {
            dlse.truncate(1); // only the first, `Present`: without it there is nothing to compute
        }
    }

    fn problem(&self, algorithm: Algorithm, seed: u64, fit: Fit<'_>) -> Problem {
        let (mut scores, value_dim) = scores(self.mask, self.shape, self.sequences, seed, fit);
        self.options.set(&mut scores, &Stream::new(seed, "options"));
        if self.family == Family::Holes && scores.bias.is_none() {
            add_bias(&mut scores, |e| [e.batch, e.query_heads]);
        }
        match algorithm {
            Algorithm::AttentionLse => AttentionLse { scores }.into(),
            _ => Attention { scores, value_dim }.into(),
        }
    }

    fn values(&self, problem: &Problem, operand: &Operand, dtype: Dtype, seed: u64) -> ArrayD<f64> {
        match problem.scores() {
            Some(scores) => self.family.values(scores, operand, dtype, seed),
            None => ArrayD::zeros(operand.shape.clone()),
        }
    }

    fn blocking(&self) -> Option<Blocking> {
        self.shape.blocking()
    }

    fn given(&self, operand: &Operand) -> bool {
        self.dlse.gives(operand)
    }

    fn is_rich(&self, problem: &Problem) -> bool {
        self.family == Family::Generic && has_many_pairs(problem)
    }

    fn is_generic(&self) -> bool {
        self.family == Family::Generic
    }

    fn is_smooth(&self) -> bool {
        self.family == Family::Generic
    }
}

/// Scores of these kinds without options, and E.
pub(crate) fn scores(
    mask: MaskKind,
    shape: ShapeClass,
    sequences: SequenceKind,
    seed: u64,
    fit: Fit<'_>,
) -> (Scores, usize) {
    let (mut extents, mut value_dim) = shape.draw(seed);
    let e = &mut extents;
    fit(&mut [
        (Number::Batch, &mut e.batch),
        (Number::QueryHeads, &mut e.query_heads),
        (Number::KeyHeads, &mut e.key_heads),
        (Number::Queries, &mut e.queries),
        (Number::Keys, &mut e.keys),
        (Number::Dim, &mut e.dim),
        (Number::ValueDim, &mut value_dim),
    ]);
    if sequences == SequenceKind::Packed {
        extents.batch = 1;
    }
    let mut scores = Scores::new(extents);
    scores.sequences = sequences.draw(&extents, &Stream::new(seed, "sequences"));
    scores.mask = mask.draw(&extents, &Stream::new(seed, "mask"));
    (scores, value_dim)
}

/// True if rows and columns of scores are dense and long enough for sums of many terms.
pub(crate) fn has_many_pairs(problem: &Problem) -> bool {
    let many = |e: &Extents| e.queries.min(e.keys) > 15;
    problem.scores().is_some_and(|s| s.sequences == Sequences::Dense && many(&s.extents))
}

impl DlseKind {
    /// True if an operand is there: any but perhaps the cotangent of lse.
    pub(crate) fn gives(self, operand: &Operand) -> bool {
        let optional = operand.role == Role::OptionalCotangent;
        !(operand.name == "dlse" && optional && self == DlseKind::Absent)
    }
}
