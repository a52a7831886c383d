//! A pass of linear_attention while its steps are drafted: its operands, its tables, its memory.

use super::args::{LinearArgs, WalkArgs};
use super::tables::Tables;
use crate::memory::Layout;
use crate::options::Level;
use crate::parts::Parts;
use crate::step::{self, Region};
use etalon_problem::{Decay, LinearAttention, Pass, Result};

pub(super) struct Prepared<'a> {
    pub parts: Parts,
    pub problem: &'a LinearAttention,
    pub tables: Tables,
    pub level: Level,
    /// True if somebody looks for numbers that are not finite.
    pub watches: bool,
    pub needs: Needs,
    /// The addresses of scratch memory: S before every chunk (`states`) and D behind it (`other`), the parts of the
    /// gradient of σ (`dots`), the gradient of every gate (`dg`).
    pub memory: LinearArgs,
    /// The same for the kernels of sm90a.
    pub walks: WalkArgs,
}

pub(super) type Steps<'a> = step::Steps<'a, Prepared<'a>>;

pub(super) struct Needs {
    pub before: bool,
    pub behind: bool,
    pub gates: bool,
    pub scale: bool,
}

impl Needs {
    pub fn of(parts: &Parts) -> Needs {
        let wants = |names: &[&str]| parts.list.iter().any(|x| x.wanted && names.contains(&x.operand.name));
        let gates = wants(&["dg", "dg_gamma", "gg", "gg_gamma"]);
        let scale = wants(&["dscale", "gscale"]);
        let before = wants(&["o", "final_state", "dq", "gq", "gdout", "gdfinal_state"]);
        let behind = wants(&["dk", "dv", "dinitial_state", "gk", "gv", "ginitial_state"]);
        Needs { before: gates || scale || before, behind: gates || behind, gates, scale }
    }
}

crate::read_as::read_as!(Prepared<'_>, parts: Parts);

impl Prepared<'_> {
    pub fn wants(&self, name: &str) -> bool {
        self.part(name).is_some_and(|part| part.wanted)
    }

    pub fn reserve(&self, layout: &mut Layout) -> Result<LinearArgs> {
        if self.pass == Pass::Step {
            return Ok(LinearArgs::default());
        }
        let (e, needs) = (&self.problem.extents, &self.needs);
        let second = self.pass == Pass::DoubleBackward;
        let tokens = [e.batch, e.key_heads, e.tokens];
        let of_queries = [e.batch, e.query_heads, e.tokens];
        let planes = [e.batch, e.key_heads, e.tokens, PLANES];
        let states = [self.tables.chunks.rows.len(), e.key_heads, e.dim, self.problem.value_dim];
        // Elements of two bytes.
        let halves = [states[0], states[1], (states[2] * states[3]).div_ceil(2)];
        // The kernels of sm90a keep states in registers.
        let tables = self.level != Level::Sm90a || self.watches;
        let bends = self.has("ddg") || self.has("ddg_gamma");
        let narrow = self.level == Level::Sm80;
        let mut range = |wanted, shape: &[usize]| range_if(layout, wanted, shape);
        Ok(LinearArgs {
            gates: range(tables && self.problem.decay != Decay::None, &planes)?.into(),
            slopes: range(second && bends, &planes)?.into(),
            states: range(tables && needs.before, &states)?.into(),
            other: range(tables && needs.behind, &states)?.into(),
            states1: range(second && needs.before, &states)?.into(),
            other1: range(second && needs.behind, &states)?.into(),
            narrow: range(narrow && needs.before, &halves)?.into(),
            other_narrow: range(narrow && needs.behind, &halves)?.into(),
            found: range(self.level != Level::Portable && self.watches, &[1])?.into(),
            x_dots: range(tables && needs.gates, &of_queries)?.into(),
            y_dots: range(tables && needs.gates, &tokens)?.into(),
            dots: range(tables && needs.scale, &of_queries)?.into(),
            dg: range(tables && (self.wants("dg_gamma") || self.wants("gg_gamma")), &tokens)?.into(),
            ..LinearArgs::default()
        })
    }
}

/// The address of scratch memory for numbers of four bytes; 0 where they are not wanted.
pub(super) fn range_if(layout: &mut Layout, wanted: bool, shape: &[usize]) -> Result<u64> {
    let range = layout.array_if(wanted, 4, shape)?;
    Ok(range.map_or(0, |range| range.address(Region::Scratch.symbol())))
}

/// Planes of the tables of the gates: `Gates` of `linear_attention/problem.cuh`.
const PLANES: usize = 9;
