//! The axes of the grid of attention and its relatives, except shapes and families.

use crate::cases::axis;
use crate::generate::Stream;
use etalon_problem::{Align, BiasExtents, Extents, Mask, NamedArray, Scores, Sequences};

axis! {
    "mask",
    /// Kinds of mask.
    MaskKind {
        /// Every pair.
        Full = "full",
        /// Causal, the last query aligned with the last key.
        Causal = "causal",
        /// Causal, the first query aligned with the first key.
        CausalTopLeft = "causal_top_left",
        /// A window with both ends.
        Window = "window",
        /// A window open to the right.
        WindowLeft = "window_left",
        /// A window open to the left that reaches into the future.
        WindowRight = "window_right",
        /// A window with both ends, aligned at the top left.
        WindowTopLeft = "window_top_left",
        /// Causal within chunks.
        Chunked = "chunked",
        /// Segments, with padding and with ids that come back.
        Segments = "segments",
        /// A random array, with empty rows.
        Array = "array",
        /// Causal and segments.
        And = "and",
        /// A window or a sparse array.
        Or = "or",
    }
}

axis! {
    "options",
    /// Sets of options.
    OptionKind {
        /// None.
        Plain = "plain",
        /// A softcap that bends the scores.
        Softcap = "softcap",
        /// Sinks.
        Sinks = "sinks",
        /// A bias of every batch element and head.
        Bias = "bias",
        /// A bias that all share.
        BiasShared = "bias_shared",
        /// A bias per head.
        BiasHeads = "bias_heads",
        /// A scale that is not 1/√D.
        Scale = "scale",
        /// Scale, softcap, sinks and a bias per batch element.
        Everything = "everything",
    }
}

axis! {
    "sequences",
    /// How rows divide into sequences.
    SequenceKind {
        /// One sequence per batch element.
        Dense = "dense",
        /// Padded on the right.
        Lengths = "lengths",
        /// Laid end to end, empty ones among them.
        Packed = "packed",
    }
}

axis! {
    "dlse",
    /// Whether there is a cotangent of lse.
    DlseKind {
        /// There is one.
        Present = "dlse",
        /// There is none.
        Absent = "no_dlse",
    }
}

impl MaskKind {
    /// A mask of this kind.
    pub(crate) fn draw(self, e: &Extents, seed: u64) -> Mask {
        let stream = Stream::new(seed, "mask");
        let reach = |i| stream.pick(i, &[0, 1, 2, 5, 16, 31]);
        let (bottom_right, top_left) = (Align::BottomRight, Align::TopLeft);
        match self {
            MaskKind::Full => Mask::Full,
            MaskKind::Causal => Mask::causal(),
            MaskKind::CausalTopLeft => Mask::Causal { align: top_left },
            MaskKind::Window => {
                Mask::Window { left: Some(reach(0)), right: Some(reach(1)), align: bottom_right }
            }
            MaskKind::WindowLeft => Mask::window(reach(0), None),
            MaskKind::WindowRight => Mask::window(None, reach(1)),
            MaskKind::WindowTopLeft => {
                Mask::Window { left: Some(reach(0)), right: Some(reach(1)), align: top_left }
            }
            MaskKind::Chunked => {
                let chunk = stream.pick(2, &[1, 3, 8, 16, 29]);
                let align = stream.pick(3, &[bottom_right, top_left]);
                Mask::ChunkedCausal { chunk, align }
            }
            MaskKind::Segments => segments(e, &stream),
            MaskKind::Array => {
                let batch = stream.pick(4, &[1, e.batch]);
                let heads = stream.pick(5, &[1, e.query_heads]);
                array(e, [batch, heads], 0.7, &stream)
            }
            MaskKind::And => Mask::And(vec![Mask::causal(), segments(e, &stream)]),
            MaskKind::Or => {
                Mask::Or(vec![Mask::window(reach(0), 0), array(e, [1, 1], 0.1, &stream)])
            }
        }
    }
}

/// Ids 0, 1, 2 in runs of 9 and back to 0; every 11th row is padding.
fn segments(e: &Extents, stream: &Stream) -> Mask {
    let shift = stream.below(6, 9);
    let ids = |length: usize| -> Vec<i64> {
        let id = |b: usize, i: usize| match (i + b) % 11 {
            10 => -1,
            _ => ((i + shift + 2 * b) / 9 % 3) as i64,
        };
        (0..e.batch).flat_map(|b| (0..length).map(move |i| id(b, i))).collect()
    };
    Mask::Segments {
        query: NamedArray::new("query_segments", &[e.batch, e.queries], ids(e.queries)),
        key: NamedArray::new("key_segments", &[e.batch, e.keys], ids(e.keys)),
    }
}

/// Random flags; rows 1, 14, 27, … are empty.
fn array(e: &Extents, [batch, heads]: [usize; 2], density: f64, stream: &Stream) -> Mask {
    let flags: Vec<bool> = (0..batch * heads * e.queries * e.keys)
        .map(|at| {
            let row = at / e.keys % e.queries;
            row % 13 != 1 && stream.uniform(100 + at) < density
        })
        .collect();
    Mask::Array(NamedArray::new("mask", &[batch, heads, e.queries, e.keys], flags))
}

impl OptionKind {
    /// Sets these options.
    pub(crate) fn set(self, scores: &mut Scores, seed: u64) {
        let stream = Stream::new(seed, "options");
        let e = scores.extents;
        let bias = |batch, heads| Some(BiasExtents { batch, heads });
        // Within the scores' deviation of about 1, so that tanh bends and does not only saturate.
        let cap = stream.pick(0, &[1.5, 2.0, 5.0]);
        let scale = stream.pick(1, &[0.125, 0.3, 0.45]);
        match self {
            OptionKind::Plain => {}
            OptionKind::Softcap => scores.softcap = Some(cap),
            OptionKind::Sinks => scores.sinks = true,
            OptionKind::Bias => scores.bias = bias(e.batch, e.query_heads),
            OptionKind::BiasShared => scores.bias = bias(1, 1),
            OptionKind::BiasHeads => scores.bias = bias(1, e.query_heads),
            OptionKind::Scale => scores.softmax_scale = Some(scale),
            OptionKind::Everything => {
                scores.softmax_scale = Some(scale);
                scores.softcap = Some(cap);
                scores.sinks = true;
                scores.bias = bias(e.batch, 1);
            }
        }
    }
}

impl SequenceKind {
    /// Sequences of this kind.
    pub(crate) fn draw(self, e: &Extents, seed: u64) -> Sequences {
        let stream = Stream::new(seed, "sequences");
        match self {
            SequenceKind::Dense => Sequences::Dense,
            SequenceKind::Lengths => {
                // The first element is whole, the second one row short, the others anything.
                let length = |at: usize, b: usize, full: usize| match b {
                    0 if e.batch > 1 => full,
                    1 => full.saturating_sub(1),
                    _ => stream.below(at + 2 * b, full + 1),
                };
                Sequences::Lengths {
                    query: (0..e.batch).map(|b| length(0, b, e.queries)).collect(),
                    key: (0..e.batch).map(|b| length(1, b, e.keys)).collect(),
                }
            }
            SequenceKind::Packed => {
                // Five sequences: one without queries, one without keys, and rows left over.
                let cuts = |rows: usize, empty: usize, at: usize| {
                    let last = rows - (rows > 4) as usize;
                    let mut cuts: Vec<usize> =
                        (0..4).map(|i| stream.below(at + i, last + 1)).collect();
                    cuts.extend([0, last]);
                    cuts.sort_unstable();
                    cuts[empty + 1] = cuts[empty];
                    cuts
                };
                Sequences::Packed { cu_query: cuts(e.queries, 1, 0), cu_key: cuts(e.keys, 3, 10) }
            }
        }
    }
}
