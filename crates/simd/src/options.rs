//! Options that may change a result's speed and rounding, but not its meaning.

use crate::Level;
use etalon_problem::{Blocking, Dtype, Mode, Pass, named};

/// Half of an L2 cache of today.
const KEPT_STATES: usize = 1 << 20;

named! {
    /// Rounding that a pass may do between its inputs and its results, where there are such kernels: others are
    /// stricter. Sums are f32 in any case.
    #[derive(Default)]
    Precision, "precision" {
        /// Nothing is stored in less than f32: the profile `f32-simd`.
        #[default]
        Strict = "strict",
        /// Of bf16 storage, P and dS, and what else [`Precision::Flash`] rounds, may be multiplied as sums of two
        /// numbers in bf16: the profile `bf16-split2`. So do the passes in which [`Precision::Flash`] rounds them.
        Split2 = "split2",
        /// Of bf16 storage, P and dS, and of linear attention states and weighted rows, may be rounded to bf16 before
        /// they are multiplied: the profile `bf16-flash`. With the levels `avx512bf16` and `amx` every pass does so,
        /// but for a step and a filter. Subnormal elements are read as 0 there.
        Flash = "flash",
    }
}

impl Precision {
    /// Numbers of bf16 as whose sum P and dS are multiplied.
    pub(crate) fn pieces(self) -> usize {
        if self == Precision::Split2 { 2 } else { 1 }
    }
}

/// Options of the simd tier. Threads are those of rayon's current pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The instruction set.
    pub level: Level,
    /// Rounding within a pass.
    pub precision: Precision,
    /// Queries and keys in a tile, or tokens of a chunk, at most 256, and of a micro-chunk in linear
    /// attention, which in tiles of bf16 is the chunk; `None`: what was measured to be best.
    pub blocking: Option<Blocking>,
    /// Organisation of a backward pass; linear attention has one way.
    pub mode: Mode,
    /// The most bytes of sums of dq that [`Mode::FusedPartials`] may keep: as many heads are worked
    /// on together as fit, at least those of one key head, and with dbias all. [`Mode::Auto`] takes
    /// [`Mode::Separate`] where the least is too much. The result does not depend on it.
    pub partials_budget: usize,
    /// The most bytes that linear cross-entropy takes beside operands, results and 64 bytes for each token,
    /// in the second order 100: packed operands, logits and sums, of as many tokens and classes at a time as
    /// fit. Where not even a few do, it takes what those need. The result does not depend on it.
    pub memory_budget: usize,
    /// The most bytes of states that a backward pass of linear attention keeps of a sequence, where keeping
    /// fewer would save memory and cost time; a double backward pass keeps as many, each with its tangent. Of
    /// each span of chunks the state before it is kept; with fewer states spans are longer, up to the root of
    /// the number of chunks.
    pub kept_states: usize,
    /// True if [`run`](crate::run()) computes the forward pass again where a later pass lacks what it saved;
    /// otherwise that is an error.
    pub recompute: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            level: Level::best(),
            precision: Precision::default(),
            blocking: None,
            mode: Mode::Auto,
            partials_budget: 256 << 20,
            memory_budget: 64 << 20,
            kept_states: KEPT_STATES,
            recompute: false,
        }
    }
}

impl Options {
    /// For a level that a user names: one of pairs is named for what it rounds.
    pub fn of_level(level: Level) -> Self {
        let precision = if level.has_pairs() { Precision::Flash } else { Precision::Strict };
        Options { level, precision, ..Options::default() }
    }

    /// The levels of this machine, each with the precision that its name stands for, narrowest first; those of pairs
    /// also with [`Precision::Split2`].
    pub fn of_levels() -> impl Iterator<Item = Self> {
        let split =
            |level: Level| Options { precision: Precision::Split2, ..Options::of_level(level) };
        Level::all().flat_map(move |level| {
            level.has_pairs().then(|| split(level)).into_iter().chain([Options::of_level(level)])
        })
    }

    /// The one of [`Options::of_levels`] that has this name.
    pub fn by_name(name: &str) -> Option<Self> {
        Options::of_levels().find(|options| options.name() == name)
    }

    /// The name of its level and precision: `avx2`, `amx`, `amx-split2`.
    pub fn name(&self) -> String {
        match self.precision {
            Precision::Strict => self.level.in_f32().to_string(),
            Precision::Split2 if self.level.has_pairs() => format!("{}-split2", self.level),
            Precision::Split2 | Precision::Flash => self.level.to_string(),
        }
    }

    /// True if a pass multiplies operands of this type as they are, not in f32.
    pub fn multiplies_bf16(&self, pass: Pass, dtype: Dtype) -> bool {
        pass != Pass::Step && self.pairs(dtype)
    }

    /// True if operands of this type may be multiplied as pairs.
    pub(crate) fn pairs(&self, dtype: Dtype) -> bool {
        self.precision != Precision::Strict && dtype == Dtype::Bf16 && self.level.has_pairs()
    }
}
