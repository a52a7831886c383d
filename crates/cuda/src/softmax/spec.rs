//! A pass of attention, attention_lse or lazy_attention before it has memory or a kernel, and the levels that compute
//! it.

use super::counts::Counts;
use super::hopper_args::is_unit;
use super::variants::{AttentionShape, Hopper, Lengths, Visible};
use super::window::{LONGEST, Window, window};
use crate::level_table::{Facts, LevelRow, Rule, rule};
use crate::options::{Level, Options, Precision};
use crate::read_as::read_as;
use crate::target::CONSUMER;
use etalon_problem::{Attention, Dtype, Extents, Mode, Pass, Scores, Sequences};

#[derive(Debug, Clone, Copy)]
pub(crate) struct Spec {
    facts: Facts,
    pub extents: Extents,
    /// E; `None` of attention_lse.
    pub value_dim: Option<usize>,
    pub counts: Counts,
    pub lengths: Lengths,
    /// The mask, if it is a window.
    pub window: Option<Window>,
    /// True if the problem has a softcap, a bias or an array of flags.
    pub has_options: bool,
    /// True if it has a softcap, a bias, or a scale that turns the order of scores.
    pub is_scored: bool,
    /// True if it has a softcap and no bias.
    pub is_capped: bool,
    /// True if it has a bias, no softcap, and a scale that is the unit of its scores.
    pub is_biased: bool,
    /// True if the gradient of a bias that each head has for itself is wanted.
    pub has_own_dbias: bool,
    /// True if rows of what kernels multiply begin and end at multiples of 16 bytes.
    pub whole: bool,
    /// True if the gradient of q is wanted beside another that is computed by keys.
    pub both: bool,
    pub options: Options,
}

read_as!(Spec, facts: Facts);

impl Spec {
    pub fn new(
        (scores, value_dim): (&Scores, Option<usize>),
        facts: Facts,
        counts: Counts,
        [whole, both, has_dbias]: [bool; 3],
        options: &Options,
    ) -> Spec {
        let e = &scores.extents;
        let is_scored = scores.softcap.is_some() || scores.bias.is_some();
        Spec {
            facts,
            extents: *e,
            value_dim,
            counts,
            lengths: match scores.sequences {
                Sequences::Dense => Lengths::Equal,
                Sequences::Lengths { .. } => Lengths::Own,
                Sequences::Packed { .. } => Lengths::Listed,
            },
            window: window(&scores.mask, e.queries, e.keys),
            has_options: is_scored || counts.flags.is_some(),
            is_scored: is_scored || scores.scale() as f32 <= 0.0,
            is_capped: scores.softcap.is_some() && scores.bias.is_none(),
            is_biased: scores.bias.is_some() && scores.softcap.is_none() && is_unit(scores.scale() as f32),
            has_own_dbias: has_dbias
                && scores.bias.is_some_and(|bias| [bias.batch, bias.heads] == [e.batch, e.query_heads]),
            whole,
            both,
            options: *options,
        }
    }

    pub fn columns(&self) -> usize {
        self.extents.dim.max(self.value_dim.unwrap_or(1))
    }

    pub fn rows(&self) -> usize {
        self.extents.batch * self.extents.query_heads * self.extents.queries
    }

    /// True if the backward pass of the level sm80 has accumulators of its own.
    pub fn is_wide(&self) -> bool {
        self.columns() > 128
    }

    /// True if tensor cores compute the second order of what is finite.
    pub fn has_tensor_second(&self) -> bool {
        self.storage == Dtype::Bf16 && !self.is_wide()
    }

    /// True if those of compute capability 9.0 do, where they are faster.
    pub fn has_second_sm90a(&self) -> bool {
        let shape = self.shape();
        let is_narrow = self.columns() <= 64 && shape.value_dim.is_some();
        let is_plain = self.storage == Dtype::Bf16 && is_narrow && shape.whole && !shape.options;
        is_plain && self.target.is_hopper()
    }

    /// True if there is a choice of one sweep or two, and a mode insists on one.
    pub fn insists(&self) -> bool {
        self.pass == Pass::Backward && self.both && self.options.mode == Mode::FusedPartials
    }

    /// True if sm90a computes dq in the pass by keys as well, where the mode insists on it or it is faster: bits are
    /// the same.
    pub fn fuses_sm90a(&self) -> bool {
        let takes_dbias = self.is_biased && self.has_own_dbias;
        let may = self.pass == Pass::Backward && (self.both || takes_dbias) && self.has_fused_sm90a();
        may && match self.options.mode {
            Mode::FusedPartials => true,
            // A bias is read by rows, and dbias, whose bits are others, does not depend on sizes.
            Mode::Auto => self.is_biased || self.gains_by_turns(),
            Mode::Separate | Mode::ForwardGradient => false,
        }
    }

    /// True where it was faster on an H200. The pass gains nothing where tiles of keys walk few queries, since it
    /// begins and ends a tile while nothing multiplies; where all tiles of a head begin together and walk the same
    /// queries, and so wait for each other; and where only tiles of queries, of groups of heads, would keep the
    /// device busy. With 64 columns a tile ends sooner beside what it gains.
    fn gains_by_turns(&self) -> bool {
        let e = &self.extents;
        let pairs = self.window.map_or(0, |window| window.pairs(e.queries, e.keys));
        let [queries, keys] = [e.queries, e.keys].map(|n| n as u128);
        let [tiles, device] = [e.batch * e.key_heads * e.keys.div_ceil(128), self.target.multiprocessors];
        let is_apart = 5 * pairs <= 3 * queries * keys && (e.query_heads == e.key_heads || 4 * tiles >= 3 * device);
        let least = match self.unboxed().width {
            64 if tiles >= 8 * device => 120,
            64 => 240,
            _ => 640,
        };
        pairs >= least * keys && (is_apart || 2 * tiles >= 3 * device)
    }

    /// True if it has a kernel for that.
    pub fn has_fused_sm90a(&self) -> bool {
        let of = self.unboxed();
        let takes_scores = !of.options || self.is_capped || (self.is_biased && of.fuses_boxes());
        let is_plain = of.lengths == Lengths::Equal && takes_scores && of.visible != Visible::Spans;
        is_plain && !of.is_wide() && self.value_dim.is_some()
    }

    /// The blocks of 64 queries of which that pass has sums.
    pub fn sums_of_rows(&self) -> usize {
        let e = &self.extents;
        e.batch * e.query_heads * e.queries.div_ceil(64)
    }

    /// The shared memory that a block of the level sm80 may have, in bytes.
    pub fn shared_memory(&self) -> u32 {
        match self.options.level {
            Level::Sm80Narrow => CONSUMER,
            _ => self.target.shared_memory,
        }
    }

    pub fn shape(&self) -> AttentionShape {
        let Spec { value_dim, whole, has_options: options, .. } = *self;
        AttentionShape { storage: self.storage, dim: self.extents.dim, value_dim, options, whole }
    }

    /// Choices of the kernels of the pass: backward, boxes are of `fused`.
    pub fn hopper(&self) -> Hopper {
        let of = self.unboxed();
        let boxes = self.is_biased
            && of.has_boxes()
            && match self.pass {
                Pass::Forward => self.value_dim.is_some(),
                _ => self.fuses_sm90a(),
            };
        Hopper { boxes, ..of }
    }

    fn unboxed(&self) -> Hopper {
        let (storage, lengths) = (self.storage, self.lengths);
        let [width, values] = self.hopper_columns();
        let visible = match self.window {
            Some(Window::ALL) => Visible::All,
            Some(_) => Visible::Window,
            None => Visible::Spans,
        };
        // Maxima are those of scores: a scale that turns their order is an option.
        Hopper { storage, width, values, visible, lengths, options: self.is_scored, boxes: false }.within()
    }

    /// The columns of q and of v that kernels of sm90a are compiled for, the fewest that hold D and E.
    fn hopper_columns(&self) -> [usize; 2] {
        let (dim, values) = (self.extents.dim, self.value_dim.unwrap_or(1));
        let list = [[64, 64], [128, 128], [192, 128]];
        let holds = |x: &[usize; 2]| dim <= x[0] && values <= x[1];
        list.into_iter().find(holds).unwrap_or([256, 256])
    }

    /// True if D, and E in the backward pass, are at most so many columns, of this pass and these storage types.
    fn has_columns(&self, pass: Pass, most: usize, storage: &[Dtype]) -> bool {
        let values = if pass == Pass::Backward { self.value_dim.unwrap_or(0) } else { 0 };
        let is_meant = self.pass == pass && storage.contains(&self.storage);
        !is_meant || self.extents.dim.max(values) <= most
    }
}

impl From<Facts> for Spec {
    fn from(facts: Facts) -> Self {
        let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 64, keys: 64, dim: 128 };
        let scores = Attention::new(extents).scores;
        Spec::new((&scores, Some(128)), facts, Counts::of_scores(&scores), [true, true, false], &Options::default())
    }
}

const ALL: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

/// The rules of sm90a, with one on modes and those on columns.
macro_rules! sm90a {
    ($modes:expr, $($columns:expr),+) => {
        &[
            Rule::FLASH,
            Rule::HOPPER,
            Rule::SIXTEEN_BITS,
            Rule::FIRST_ORDER,
            $modes,
            $($columns),+,
            rule("there are no queries or no keys, and nothing for sm90a to compute", |spec| {
                let e = &spec.extents;
                let (rows, tiles) = (spec.rows().min(e.keys), &spec.counts);
                rows.min(tiles.by_queries).min(tiles.by_keys) > 0
            }),
            rule("sequences must have at most 2²⁸ rows for sm90a", |spec| {
                spec.extents.queries.max(spec.extents.keys) <= LONGEST
            }),
            rule(
                "masks must show each query one range of keys, known before the call (no ids or flags \
                    on the device), for sm90a",
                |spec| spec.counts.flags.is_none(),
            ),
        ]
    };
}

const SM90A: &[Rule<Spec>] = sm90a!(
    rule(
        "the mode `fused` of sm90a needs dim and value_dim up to 128 (with a bias one above 64, and no softcap), equal \
         lengths, a full or causal mask or a window, and a softcap or a scale above 0",
        |spec| !spec.insists() || spec.has_fused_sm90a()
    ),
    rule("dim and value_dim must be at most 256 for sm90a", |spec| spec.columns() <= 256),
    rule(
        "with dim or value_dim above 128 sm90a computes attention of bf16, without softcap or bias, and with a scale \
         above 0",
        |spec| !spec.is_wide() || (spec.value_dim.is_some() && spec.storage == Dtype::Bf16 && !spec.is_scored)
    )
);

const LAZY_SM90A: &[Rule<Spec>] = sm90a!(
    rule("the backward pass of sm90a has one mode, `separate`", |spec| !spec.insists()),
    rule("dim and value_dim must be at most 128 for sm90a", |spec| spec.columns() <= 128)
);

const SM80: &[Rule<Spec>] = &[
    rule("tensor cores multiply f32 with the precisions `tf32` and `bf16x3`", |spec| {
        spec.storage != Dtype::F32 || spec.precision.narrows_f32()
    }),
    rule(Precision::FACTORS, |spec| spec.storage == Dtype::F32 || spec.precision == Precision::Flash),
    rule("dim must be at most 128 for f32 on sm80", |spec| spec.has_columns(Pass::Forward, 128, &[Dtype::F32])),
    rule("dim and value_dim must be at most 128 for the backward pass of f32 on sm80", |spec| {
        spec.has_columns(Pass::Backward, 128, &[Dtype::F32])
    }),
    rule("dim must be at most 256 for sm80", |spec| spec.has_columns(Pass::Forward, 256, &ALL)),
    rule("dim and value_dim must be at most 256 for the backward pass of sm80", |spec| {
        spec.has_columns(Pass::Backward, 256, &ALL)
    }),
    rule("the mode `fused` is not written for f32 on sm80, which computes it in two sweeps", |spec| {
        !(spec.insists() && spec.storage == Dtype::F32)
    }),
    rule("dim and value_dim must be at most 128 for the mode `fused` of sm80", |spec| {
        !(spec.insists() && spec.is_wide())
    }),
    Rule::FIRST_ORDER,
];

const LAZY_SM80: &[Rule<Spec>] = &[
    Rule::FLASH,
    Rule::SIXTEEN_BITS,
    rule("dim must be at most 128 for sm80", |spec| spec.extents.dim <= 128),
    rule("value_dim must be at most 128 for the backward pass of sm80", |spec| {
        spec.has_columns(Pass::Backward, 128, &ALL)
    }),
];

/// The levels of attention and attention_lse, the fastest first.
pub(crate) static LEVELS: [LevelRow<Spec>; 3] = [
    LevelRow { level: Level::Sm90a, rules: SM90A },
    LevelRow { level: Level::Sm80, rules: SM80 },
    LevelRow { level: Level::Portable, rules: &[] },
];

pub(crate) static LAZY_LEVELS: [LevelRow<Spec>; 3] = [
    LevelRow { level: Level::Sm90a, rules: LAZY_SM90A },
    LevelRow { level: Level::Sm80, rules: LAZY_SM80 },
    LevelRow { level: Level::Portable, rules: &[] },
];
