//! The grid of lazy_attention.

use crate::capabilities::Fit;
use crate::cases::axes::{Grid, grid};
use crate::generate::Stream;
use crate::roster::attention::{DlseKind, Family, MaskKind, SequenceKind, has_many_pairs, scores};
use crate::shapes::ShapeClass;
use etalon_problem::Align::{BottomRight, TopLeft};
use etalon_problem::{
    Algorithm, Align, Blocking, DistanceBias, Dtype, Extents, LazyAttention, Operand, Problem,
};
use ndarray::{ArrayD, IxDyn};

grid! {
    /// Axes of a case of lazy_attention, beside its storage type and seed.
    Point {
        /// The kind of mask.
        mask: MaskKind,
        /// The class of extents.
        shape: ShapeClass,
        /// Division of the rows into sequences.
        sequences: SequenceKind,
        /// Reach of the bias by distance.
        reach: ReachKind = "reach" fn draw(e: &Extents, short: usize) -> Option<(usize, Align)> {
            /// There is none.
            Absent = "no_bias" => None,
            /// One distance.
            One = "reach_1" => Some((1, BottomRight)),
            /// Fewer distances than there are.
            Short = "reach_short" => Some((short, BottomRight)),
            /// As many as there are, counted from the bottom right.
            Whole = "reach_whole" => Some((e.keys.max(1), BottomRight)),
            /// More than there are.
            Beyond = "reach_beyond" => Some((e.queries.max(e.keys) + 3, BottomRight)),
            /// Some, counted from the top left.
            TopLeft = "reach_top_left" => Some((short, TopLeft)),
        },
        /// The value of τ; `u` is uniform in [0, 1).
        tau: TauKind = "tau" fn draw(head: usize, u: f64) -> f64 {
            /// As in trained models: −0.94 to −0.14.
            Learned = "learned" => -0.14 - 0.8 * u,
            /// −1, where training begins: rows that see one key lie on the kink.
            Begun = "begun" => -1.0,
            /// −3 to −1.01: rows that see few keys are dead.
            Below = "below" => -1.01 - 2.0 * u,
            /// 0 to 1: nothing is filtered.
            Above = "above" => u,
            /// Of each kind, head by head.
            Mixed = "mixed" => {
                [Self::Learned, Self::Above, Self::Below, Self::Begun][head % 4].draw(head, u)
            },
        },
        /// Families of elements.
        elements: LazyFamily = "elements" {
            /// Mean 0, variance 1.
            Generic = "generic",
            /// Scores with deviation 3.
            Peaked = "peaked",
            /// A bias that falls by 0.2 with each distance: far tiles are inactive, but not weightless.
            Decaying = "decaying",
            /// Scores within 10⁻³ of each other: at τ = −1 every pair lies near the kink.
            Uniform = "uniform",
            /// Five distinct keys, repeated.
            Ties = "ties",
            /// Scores that climb with the key.
            Ascending = "ascending",
            /// Scores that fall with the key.
            Descending = "descending",
            /// Every 64th key takes almost all weight, in each head another one.
            SinkKey = "sink_key",
            /// Every score far below 0.
            Large = "large",
            /// Channels of very different size, subnormal numbers among them.
            Range = "range",
            /// Half of all elements are +0 or −0.
            Zeros = "zeros",
        },
        /// The cotangent of lse: given or absent.
        dlse: DlseKind,
        /// The scale of the scores.
        scale: ScaleKind = "scale" fn draw(stream: &Stream) -> Option<f64> {
            /// 1/√D.
            Default = "default_scale" => None,
            /// Another number.
            Given = "scale" => Some(stream.pick(0, &[0.125, 0.3, -0.45])),
        },
    }
}

impl LazyFamily {
    /// The family of attention that q, k, v and the cotangents are drawn from: that of the same name.
    pub(crate) fn of_attention(self) -> Family {
        self.name().parse().unwrap_or(Family::Generic)
    }
}

impl Grid for Point {
    const LARGE: &'static [&'static str] = crate::shapes::LARGE;
    const THIN: &'static [&'static str] = crate::shapes::THIN;
    const ONCE: &'static [&'static str] = crate::shapes::ONCE;
    const TOGETHER: &'static [&'static [(&'static str, &'static str)]] = &[
        // dtau is one number a head: what it shows under this mask, it shows where there are many heads, and
        // every row sees several keys.
        &[
            ("mask", "or"),
            ("shape", "groups"),
            ("sequences", "dense"),
            ("tau", "learned"),
            ("elements", "generic"),
        ],
    ];

    fn problem(&self, _: Algorithm, seed: u64, fit: Fit<'_>) -> Problem {
        let (mut scores, value_dim) = scores(self.mask, self.shape, self.sequences, seed, fit);
        scores.softmax_scale = self.scale.draw(&Stream::new(seed, "scale"));
        let short = Stream::new(seed, "reach").pick(0, &[2, 3, 7, 16, 31]);
        let bias = self.reach.draw(&scores.extents, short);
        let bias = bias.map(|(width, align)| DistanceBias { width, align });
        LazyAttention { scores, value_dim, bias }.into()
    }

    fn values(&self, problem: &Problem, operand: &Operand, dtype: Dtype, seed: u64) -> ArrayD<f64> {
        let Some(scores) = problem.scores() else { return ArrayD::zeros(operand.shape.clone()) };
        let stream = Stream::new(seed, operand.name);
        let shape = IxDyn(&operand.shape);
        match operand.name {
            "tau" => ArrayD::from_shape_fn(shape, |at| self.tau.draw(at[0], stream.uniform(at[0]))),
            "bias" => ArrayD::from_shape_fn(shape, |at| {
                let x = stream.normal(at[0] * operand.shape[1] + at[1]);
                if self.elements == LazyFamily::Decaying { -0.2 * at[1] as f64 } else { 0.5 * x }
            }),
            name => {
                let values = self.elements.of_attention().values(scores, operand, dtype, seed);
                match (self.elements, name) {
                    (LazyFamily::Uniform, "q") => values * 1e-3,
                    (LazyFamily::Decaying, "q") => values * 0.25,
                    _ => values,
                }
            }
        }
    }

    fn blocking(&self) -> Option<Blocking> {
        self.shape.blocking()
    }

    fn given(&self, operand: &Operand) -> bool {
        self.dlse.gives(operand)
    }

    fn is_rich(&self, problem: &Problem) -> bool {
        let filters = matches!(self.tau, TauKind::Learned | TauKind::Above);
        self.elements == LazyFamily::Generic && filters && has_many_pairs(problem)
    }

    fn is_generic(&self) -> bool {
        self.elements == LazyFamily::Generic
    }

    fn is_smooth(&self) -> bool {
        matches!(self.elements, LazyFamily::Generic | LazyFamily::Peaked | LazyFamily::Decaying)
    }
}
