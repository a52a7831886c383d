//! The grid of lazy_attention.

use super::Grid;
use super::attention::{DlseKind, Family, MaskKind, SequenceKind};
use super::axes::{Axis, point};
use crate::cases::axis;
use crate::generate::Stream;
use crate::shapes::ShapeClass;
use etalon_problem::{
    Algorithm, Align, DistanceBias, Dtype, Extents, LazyAttention, Operand, Problem, Role,
};
use ndarray::{ArrayD, IxDyn};

axis! {
    "reach",
    /// How far the bias by distance reaches.
    ReachKind {
        /// There is none.
        Absent = "no_bias",
        /// One distance.
        One = "reach_1",
        /// Fewer distances than there are.
        Short = "reach_short",
        /// As many as there are, counted from the bottom right.
        Whole = "reach_whole",
        /// More than there are.
        Beyond = "reach_beyond",
        /// Some, counted from the top left.
        TopLeft = "reach_top_left",
    }
}

axis! {
    "tau",
    /// What τ is.
    TauKind {
        /// As in trained models: −0.94 to −0.14.
        Learned = "learned",
        /// −1, where training begins: rows that see one key lie on the kink.
        Begun = "begun",
        /// −3 to −1.01: rows that see few keys are dead.
        Below = "below",
        /// 0 to 1: nothing is filtered.
        Above = "above",
        /// Of each kind, head by head.
        Mixed = "mixed",
    }
}

axis! {
    "scale",
    /// What the scores are scaled by.
    ScaleKind {
        /// 1/√D.
        Default = "default_scale",
        /// Another number.
        Given = "scale",
    }
}

axis! {
    "elements",
    /// Families of elements.
    LazyFamily {
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
        /// Every 64th key takes almost all weight.
        SinkKey = "sink_key",
        /// Every score far below 0.
        Large = "large",
        /// Channels of very different size, subnormal numbers among them.
        Range = "range",
        /// Half of all elements are +0 or −0.
        Zeros = "zeros",
    }
}

point! {
    /// What a case of lazy_attention is made of, beside its storage type and seed.
    Point {
        /// The kind of mask.
        mask: MaskKind,
        /// The class of extents.
        shape: ShapeClass,
        /// How the rows divide into sequences.
        sequences: SequenceKind,
        /// How far the bias reaches.
        reach: ReachKind,
        /// What τ is.
        tau: TauKind,
        /// The family of the elements.
        family: LazyFamily,
        /// Whether there is a cotangent of lse.
        dlse: DlseKind,
        /// What the scores are scaled by.
        scale: ScaleKind,
    }
}

impl ReachKind {
    fn draw(self, e: &Extents, seed: u64) -> Option<DistanceBias> {
        let far = e.queries.max(e.keys);
        let short = Stream::new(seed, "reach").pick(0, &[2, 3, 7, 16, 31]);
        let (align, width) = match self {
            ReachKind::Absent => return None,
            ReachKind::One => (Align::BottomRight, 1),
            ReachKind::Short => (Align::BottomRight, short),
            ReachKind::Whole => (Align::BottomRight, e.keys.max(1)),
            ReachKind::Beyond => (Align::BottomRight, far + 3),
            ReachKind::TopLeft => (Align::TopLeft, short),
        };
        Some(DistanceBias { width, align })
    }
}

impl TauKind {
    /// τ of a query head; `u` is uniform in [0, 1).
    fn draw(self, head: usize, u: f64) -> f64 {
        match self {
            TauKind::Learned => -0.14 - 0.8 * u,
            TauKind::Begun => -1.0,
            TauKind::Below => -1.01 - 2.0 * u,
            TauKind::Above => u,
            TauKind::Mixed => {
                let kinds = [TauKind::Learned, TauKind::Above, TauKind::Below, TauKind::Begun];
                kinds[head % kinds.len()].draw(head, u)
            }
        }
    }
}

impl LazyFamily {
    /// The family of attention that q, k, v and the cotangents are drawn from.
    pub(crate) fn of_attention(self) -> Family {
        match self {
            LazyFamily::Generic | LazyFamily::Decaying | LazyFamily::Uniform => Family::Generic,
            LazyFamily::Peaked => Family::Peaked,
            LazyFamily::Ties => Family::Ties,
            LazyFamily::Ascending => Family::Ascending,
            LazyFamily::Descending => Family::Descending,
            LazyFamily::SinkKey => Family::SinkKey,
            LazyFamily::Large => Family::Large,
            LazyFamily::Range => Family::Range,
            LazyFamily::Zeros => Family::Zeros,
        }
    }
}

impl Grid for Point {
    const STORAGE: &'static [Dtype] = &[Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::F64];

    fn problem(&self, _: Algorithm, seed: u64) -> Problem {
        let mut shape = self.shape.draw(seed);
        if self.sequences == SequenceKind::Packed {
            shape.extents.batch = 1;
        }
        let mut problem = LazyAttention::new(shape.extents)
            .value_dim(shape.value_dim)
            .mask(self.mask.draw(&shape.extents, seed))
            .sequences(self.sequences.draw(&shape.extents, seed));
        problem.bias = self.reach.draw(&shape.extents, seed);
        if self.scale == ScaleKind::Given {
            let scale = Stream::new(seed, "scale").pick(0, &[0.125, 0.3, -0.45]);
            problem = problem.softmax_scale(scale);
        }
        problem.into()
    }

    fn values(&self, problem: &Problem, operand: &Operand, dtype: Dtype, seed: u64) -> ArrayD<f64> {
        let Some(scores) = problem.scores() else { return ArrayD::zeros(operand.shape.clone()) };
        let stream = Stream::new(seed, operand.name);
        let shape = IxDyn(&operand.shape);
        match operand.name {
            "tau" => ArrayD::from_shape_fn(shape, |at| self.tau.draw(at[0], stream.uniform(at[0]))),
            "bias" => ArrayD::from_shape_fn(shape, |at| {
                let x = stream.normal(at[0] * operand.shape[1] + at[1]);
                if self.family == LazyFamily::Decaying { -0.2 * at[1] as f64 } else { 0.5 * x }
            }),
            name => {
                let values = self.family.of_attention().values(scores, operand, dtype, seed);
                match (self.family, name) {
                    (LazyFamily::Uniform, "q") => values * 1e-3,
                    (LazyFamily::Decaying, "q") => values * 0.25,
                    _ => values,
                }
            }
        }
    }

    fn given(&self, operand: &Operand) -> bool {
        !(operand.name == "dlse"
            && operand.role == Role::OptionalCotangent
            && self.dlse == DlseKind::Absent)
    }

    fn few_words(&self) -> &'static str {
        self.family.name()
    }

    fn is_rich(&self, problem: &Problem) -> bool {
        self.family == LazyFamily::Generic
            && self.sequences == SequenceKind::Dense
            && matches!(self.tau, TauKind::Learned | TauKind::Above)
            && problem.scores().is_some_and(|s| s.extents.queries.min(s.extents.keys) > 15)
    }

    fn is_smooth(&self) -> bool {
        matches!(self.family, LazyFamily::Generic | LazyFamily::Peaked | LazyFamily::Decaying)
    }
}
