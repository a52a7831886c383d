//! A tier: anything that computes the algorithms.

use crate::profile::Profile;
use crate::tensor::Tensors;
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Algorithm, Blocking, Dtype, Error, Mode, Pass, Problem, named};

named! {
    /// Layout of the elements of operands and results in memory.
    #[derive(Default)]
    Layout, "layout" {
        /// Row by row, without gaps.
        #[default]
        RowMajor = "row_major",
        /// The first axis is the fastest.
        Transposed = "transposed",
        /// Every axis runs backwards: strides are negative.
        Reversed = "reversed",
        /// Gaps between elements, and between rows: of results, nobody may write them.
        Strided = "strided",
        /// Gaps between rows alone, as where heads lie side by side.
        Padded = "padded",
        /// Each operand and each result in one of the layouts above, which its name draws: no two
        /// strides are alike.
        Mixed = "mixed",
        /// Operands share memory where they may: equal operands are one, so are equal entries of an
        /// axis (stride 0), and rows that are windows of one list overlap. Results lie row by row.
        Overlapping = "overlapping",
    }
}

named! {
    /// Choices of a caller beside a problem, a pass and operands. A law about a choice is not asked of a tier that
    /// lacks it.
    Choice, "choice" {
        /// The places of operands and results: [`Hints::layout`], [`Hints::filled`], [`Hints::alone`],
        /// [`Hints::in_place`] and [`Hints::wrong`].
        Places = "calls in memory",
        /// Tile sizes: [`Hints::blocking`].
        Blocking = "tile sizes",
        /// The organisation of the backward pass: [`Hints::mode`] and [`Hints::recompute`].
        Modes = "modes",
        /// The memory of partial sums of dq: [`Hints::partials_budget`].
        Partials = "a budget of partial sums",
        /// The memory of logits: [`Hints::memory_budget`].
        Budget = "a budget of memory",
        /// The memory of states: [`Hints::kept_states`].
        States = "a budget of states",
        /// A workspace that is kept between calls: [`Tier::in_turn`].
        Workspace = "a kept workspace",
        /// Classes in shards: [`Hints::shards`].
        Shards = "shards",
        /// A filter: [`Tier::filtered`].
        Filter = "a filter",
    }
}

named! {
    /// A call that must be refused.
    Wrong, "wrong" {
        /// The first operand is given twice.
        OperandTwice = "operand_twice",
        /// The first result has two places.
        ResultTwice = "result_twice",
        /// A step in place has no place: neither an initial state nor a place of the final one.
        NoState = "no_state",
    }
}

named! {
    /// The boundaries of the shards of classes of linear_cross_entropy.
    Cuts, "cuts" {
        /// Between nodes of the tree over tiles; some shards have no classes.
        Nodes = "nodes",
        /// Between tiles, such that a shard has several nodes, each of which it returns by itself; some
        /// shards have no classes.
        Several = "several",
        /// At quarters of the tree; some shards have no classes.
        Quarters = "quarters",
        /// Anywhere; some shards have no classes.
        Anywhere = "anywhere",
    }
}

/// Settings that may change a result's speed and rounding, but not its meaning.
#[derive(Debug, Clone, Copy, Default)]
pub struct Hints {
    /// Tile sizes.
    pub blocking: Option<Blocking>,
    /// The organisation of the backward pass; tiers without the choice ignore it.
    pub mode: Mode,
    /// The most bytes of partial sums of dq; `None`: as many as the tier likes. Tiers without such sums ignore it.
    pub partials_budget: Option<usize>,
    /// The most bytes that linear_cross_entropy takes beside operands and results; `None`: as many as the
    /// tier likes. Tiers without such a budget ignore it.
    pub memory_budget: Option<usize>,
    /// The most bytes of states that a backward pass of linear attention keeps of a sequence where it could do
    /// with fewer; `None`: as many as the tier likes. Tiers without the choice ignore it.
    pub kept_states: Option<usize>,
    /// True if a later pass is to compute again what the forward pass could have saved.
    pub recompute: bool,
    /// Threads; `None`: those of the current pool.
    pub threads: Option<usize>,
    /// The layout of operands and results in memory; a tier that is not called in memory ignores it.
    pub layout: Layout,
    /// The prior contents of the memory of results; `None`: NaN.
    pub filled: Option<f64>,
    /// True if every result is asked for in a call of its own.
    pub alone: bool,
    /// True if a step writes the states after the token in place of those before it.
    pub in_place: bool,
    /// The fault of the call, which must then be refused.
    pub wrong: Option<Wrong>,
    /// To what all memory is set that a kept workspace has, before the call; `None`: it is left as the
    /// calls before have left it.
    pub stale: Option<f64>,
    /// Of the forward and the backward pass of linear_cross_entropy, how classes are cut into shards that
    /// are computed each by itself and then put together; tiers without shards ignore it.
    pub shards: Option<Cuts>,
}

/// One question to a tier.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The problem to compute; it has passed its check.
    pub problem: &'a Problem,
    /// The pass to compute.
    pub pass: Pass,
    /// The storage type: that of every operand of [`etalon_problem::Precision::Storage`]; `Wide`
    /// operands are f32, or f64 if this is f64.
    pub dtype: Dtype,
    /// Every input and every cotangent that is not absent, by name.
    pub inputs: &'a Tensors,
    /// Tile sizes, modes, threads.
    pub hints: Hints,
}

/// The gradients of a filtered backward pass of linear_cross_entropy, and what is certain of them.
#[derive(Debug, Clone, PartialEq)]
pub struct Filtered {
    /// The gradients, by name.
    pub outputs: Tensors,
    /// B_i ≥ ‖error of dh_i‖ (C37), `[T]`.
    pub dh: Vec<f64>,
    /// C_v ≥ ‖error of dw_v‖ (C38), `[V]`.
    pub dw: Vec<f64>,
    /// Tiles that were kept, and all of them.
    pub tiles: (usize, usize),
    /// Classes of a tile, which begins at a multiple of as many.
    pub classes: usize,
}

/// Why there are no outputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// The tier does not offer this, and why.
    Unsupported(String),
    /// The tier failed, panicked, wrote to its inputs, or returned something else than the
    /// outputs of the pass.
    Fault(String),
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        match error {
            Error::Unsupported { reason, .. } => Refusal::Unsupported(reason),
            error => Refusal::Fault(format!("failed: {error}")),
        }
    }
}

/// An implementation of the algorithms.
pub trait Tier: Sync {
    /// Its name in reports: `simd/avx512`, `reference`, ….
    fn name(&self) -> String;

    /// Offers a pass in a storage type, or gives the reason why it is not offered.
    fn offers(&self, algorithm: Algorithm, pass: Pass, dtype: Dtype) -> Result<(), String>;

    /// True if it takes a problem of a pass that it offers: a law that has a choice asks what is taken.
    fn takes(&self, _: &Problem, _: Pass, _: Dtype) -> bool {
        true
    }

    /// True if anybody would look for a pass here. Where not, reports do not list its absence.
    fn is_meant_for(&self, _: Algorithm, _: Pass) -> bool {
        true
    }

    /// With which arithmetic it claims to compute: the bounds follow from it.
    fn profile(&self, dtype: Dtype) -> Profile {
        Profile::strict(dtype)
    }

    /// Tells whether it returns an output of the passes that it offers; others are not judged.
    fn returns(&self, _output: &str) -> bool {
        true
    }

    /// True if it computes a term at a time, so that walks over whole functions are thinned for it.
    fn is_slow(&self) -> bool {
        false
    }

    /// True if it loses no subnormal number of f32 or bf16; others may flush them.
    fn keeps_subnormals(&self) -> bool {
        false
    }

    /// Why it can answer nothing any more until its process ends, if so.
    fn lost(&self) -> Option<String> {
        None
    }

    /// True if dh of shards of classes that are nodes of the tree has the bits of the whole, whatever nodes; where
    /// not, those that are quarters of the tree have, and others lie within the bound.
    fn sums_dh_along_the_tree(&self) -> bool {
        true
    }

    /// True if a NaN changes no bit of results that it does not reach; where not, those of attention and lazy
    /// attention in its group, the key head of its sequence, lie within the bound, of the latter beside a bias of −∞,
    /// too.
    fn gives_the_bits_beside_nan(&self) -> bool {
        true
    }

    /// True if it has a choice; laws about others are not asked.
    fn has(&self, _: Choice) -> bool {
        false
    }

    /// True if no bit depends on [`Hints::memory_budget`]; where not, results lie within the bound.
    fn any_budget_gives_the_bits(&self) -> bool {
        true
    }

    /// Answers a request for what it offers: every output of the pass, by name.
    fn run(&self, request: &Request<'_>) -> Result<Tensors, Refusal>;

    /// Answers a request for the backward pass of linear_cross_entropy with a filter; nothing where the tier
    /// has none.
    fn filtered(&self, _: &Request<'_>, _: Filter) -> Result<Option<Filtered>, Refusal> {
        Ok(None)
    }

    /// Answers requests one after the other in one workspace, new before the first of them; nothing where
    /// the tier keeps none.
    fn in_turn(&self, _: &[Request<'_>]) -> Result<Option<Vec<Tensors>>, Refusal> {
        Ok(None)
    }
}
