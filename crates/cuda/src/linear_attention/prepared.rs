//! A pass of linear_attention while its steps are drafted: its operands, its tables, its memory.

use super::tables::Tables;
use crate::memory::{Layout, MemoryRange};
use crate::options::Level;
use crate::parts::Parts;
use crate::step;
use etalon_problem::{Decay, Error, LinearAttention, Pass, TokenSequences};
use std::ops::Deref;

/// A pass of a problem, laid out in memory.
#[derive(Debug)]
pub(super) struct Prepared<'a> {
    pub parts: Parts,
    pub problem: &'a LinearAttention,
    pub tables: Tables,
    pub level: Level,
    /// True if somebody looks for numbers that are not finite.
    pub watches: bool,
    pub ranges: Ranges,
    pub walks: WalkRanges,
}

/// The steps of a pass.
pub(super) type Steps<'a> = step::Steps<'a, Prepared<'a>>;

/// Scratch memory in which kernels leave numbers to one another.
#[derive(Debug, Default)]
pub(super) struct Ranges {
    /// Sums of log-decays and of their tangents within each chunk.
    pub gates: Option<MemoryRange>,
    pub slopes: Option<MemoryRange>,
    /// S before every chunk, D behind it, and their tangents.
    pub before: Option<MemoryRange>,
    pub behind: Option<MemoryRange>,
    pub before_tangent: Option<MemoryRange>,
    pub behind_tangent: Option<MemoryRange>,
    /// S and D as tensor cores read them, and whether a number is not finite.
    pub before_narrow: Option<MemoryRange>,
    pub behind_narrow: Option<MemoryRange>,
    pub found: Option<MemoryRange>,
    /// x and y of (R27), the parts of the gradient of σ, and the gradient of every gate.
    pub x: Option<MemoryRange>,
    pub y: Option<MemoryRange>,
    pub by_scale: Option<MemoryRange>,
    pub by_gate: Option<MemoryRange>,
}

/// Scratch memory of the kernels of sm90a.
#[derive(Debug, Default)]
pub(super) struct WalkRanges {
    /// The states that segments of long sequences begin with.
    pub between: Option<MemoryRange>,
    /// S before every chunk, rounded; the parts of dg_gamma; those of dσ.
    pub states: Option<MemoryRange>,
    pub gammas: Option<MemoryRange>,
    pub scales: Option<MemoryRange>,
    /// With a log-decay for each token: the decays of whole segments; x, y and <S, D> of dg.
    pub decays: Option<MemoryRange>,
    pub x_dots: Option<MemoryRange>,
    pub y_dots: Option<MemoryRange>,
    pub z_dots: Option<MemoryRange>,
}

/// Intermediate results that a pass needs.
pub(super) struct Needs {
    pub before: bool,
    pub behind: bool,
    pub gates: bool,
    pub scale: bool,
}

impl Deref for Prepared<'_> {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.parts
    }
}

impl Prepared<'_> {
    /// True if any of these is a result.
    pub fn wants(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.part(name).is_some_and(|part| part.wanted))
    }

    pub fn needs(&self) -> Needs {
        let gates = self.wants(&["dg", "dg_gamma", "gg", "gg_gamma"]);
        let scale = self.wants(&["dscale", "gscale"]);
        let before = ["o", "final_state", "dq", "gq", "gdout", "gdfinal_state"];
        let behind = ["dk", "dv", "dinitial_state", "gk", "gv", "ginitial_state"];
        Needs { before: gates || scale || self.wants(&before), behind: gates || self.wants(&behind), gates, scale }
    }

    /// True if tokens belong to no sequence: results there are 0.
    pub fn has_padding(&self) -> bool {
        self.problem.sequences != TokenSequences::Dense
    }

    /// Takes ranges for the kernels of the levels portable and sm80.
    pub fn reserve(&self, layout: &mut Layout) -> Result<Ranges, Error> {
        if self.pass == Pass::Step {
            return Ok(Ranges::default());
        }
        let (e, needs) = (&self.problem.extents, self.needs());
        let second = self.pass == Pass::DoubleBackward;
        let tokens = [e.batch, e.key_heads, e.tokens];
        let of_queries = [e.batch, e.query_heads, e.tokens];
        let states = [self.tables.chunks.rows.len(), e.key_heads, e.dim, self.problem.value_dim];
        let planes = [tokens[0], tokens[1], tokens[2], PLANES];
        // The kernels of sm90a keep states in registers.
        let tables = self.level != Level::Sm90a || self.watches;
        let bends = self.has("ddg") || self.has("ddg_gamma");
        let narrow = self.level == Level::Sm80;
        // Elements of two bytes.
        let halves = [states[0], states[1], (states[2] * states[3]).div_ceil(2)];
        let mut range = |wanted, shape: &[usize]| layout.array_if(wanted, 4, shape);
        Ok(Ranges {
            gates: range(tables && self.problem.decay != Decay::None, &planes)?,
            slopes: range(second && bends, &planes)?,
            before: range(tables && needs.before, &states)?,
            behind: range(tables && needs.behind, &states)?,
            before_tangent: range(second && needs.before, &states)?,
            behind_tangent: range(second && needs.behind, &states)?,
            before_narrow: range(narrow && needs.before, &halves)?,
            behind_narrow: range(narrow && needs.behind, &halves)?,
            found: range(self.level != Level::Portable && self.watches, &[1])?,
            x: range(tables && needs.gates, &of_queries)?,
            y: range(tables && needs.gates, &tokens)?,
            by_scale: range(tables && needs.scale, &of_queries)?,
            by_gate: range(tables && self.wants(&["dg_gamma", "gg_gamma"]), &tokens)?,
        })
    }
}

/// Planes of the tables of the gates: `Gates` of `linear_attention/problem.cuh`.
const PLANES: usize = 9;
