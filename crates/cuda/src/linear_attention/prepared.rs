//! A pass of linear_attention while its steps are drafted: its operands, its tables, its memory.

use super::tables::Tables;
use crate::options::Level;
use crate::parts::Parts;
use crate::pass;
use crate::room::{Layout, Room};
use crate::strided::StridedTensor;
use etalon_problem::{Decay, Error, LinearAttention, Pass, TokenSequences};
use std::ops::Deref;

/// A pass of a problem, laid out in memory.
#[derive(Debug)]
pub(super) struct Prepared<'a> {
    pub parts: Parts,
    pub problem: &'a LinearAttention,
    pub tables: Tables,
    /// The level whose kernels compute it.
    pub level: Level,
    /// True if somebody looks for numbers that are not finite.
    pub watches: bool,
    pub rooms: Rooms,
    pub walks: WalkRooms,
}

/// The steps of a pass.
pub(super) type Steps<'a> = pass::Steps<'a, Prepared<'a>>;

/// Scratch memory in which kernels leave numbers to one another.
#[derive(Debug, Default)]
pub(super) struct Rooms {
    /// Sums of log-decays and of their tangents within each chunk.
    pub gates: Option<Room>,
    pub slopes: Option<Room>,
    /// S before every chunk, D behind it, and their tangents.
    pub before: Option<Room>,
    pub behind: Option<Room>,
    pub before_tangent: Option<Room>,
    pub behind_tangent: Option<Room>,
    /// S and D as tensor cores read them, and whether a number is not finite.
    pub before_narrow: Option<Room>,
    pub behind_narrow: Option<Room>,
    pub found: Option<Room>,
    /// x and y of (R27), the parts of the gradient of σ, and the gradient of every gate.
    pub x: Option<Room>,
    pub y: Option<Room>,
    pub by_scale: Option<Room>,
    pub by_gate: Option<Room>,
}

/// Scratch memory of the kernels of sm90a.
#[derive(Debug, Default)]
pub(super) struct WalkRooms {
    /// The states that segments of long sequences begin with.
    pub between: Option<Room>,
    /// S before every chunk, rounded; the parts of dg_gamma; those of dσ.
    pub states: Option<Room>,
    pub gammas: Option<Room>,
    pub scales: Option<Room>,
    /// With a log-decay for each token: the decays of whole segments; x, y and <S, D> of dg.
    pub decays: Option<Room>,
    pub x_dots: Option<Room>,
    pub y_dots: Option<Room>,
    pub z_dots: Option<Room>,
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

impl AsRef<Parts> for Prepared<'_> {
    fn as_ref(&self) -> &Parts {
        &self.parts
    }
}

impl Steps<'_> {
    /// The address of a room, 0 where there is none.
    pub(super) fn room(&self, room: Option<Room>) -> u64 {
        room.map_or(0, |room| self.at(room))
    }

    /// An operand of four axes; none where it is not there.
    pub(super) fn tensor(&self, name: &str) -> StridedTensor {
        self.place(name).into()
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
        Needs {
            before: gates || scale || self.wants(&before),
            behind: gates || self.wants(&behind),
            gates,
            scale,
        }
    }

    /// True if tokens belong to no sequence: results there are 0.
    pub fn has_padding(&self) -> bool {
        self.problem.sequences != TokenSequences::Dense
    }

    /// Takes rooms for the kernels of the levels portable and sm80.
    pub fn reserve(&self, layout: &mut Layout) -> Result<Rooms, Error> {
        if self.pass == Pass::Step {
            return Ok(Rooms::default());
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
        let mut room = |wanted, shape: &[usize]| layout.array_if(wanted, 4, shape);
        Ok(Rooms {
            gates: room(tables && self.problem.decay != Decay::None, &planes)?,
            slopes: room(second && bends, &planes)?,
            before: room(tables && needs.before, &states)?,
            behind: room(tables && needs.behind, &states)?,
            before_tangent: room(second && needs.before, &states)?,
            behind_tangent: room(second && needs.behind, &states)?,
            before_narrow: room(narrow && needs.before, &halves)?,
            behind_narrow: room(narrow && needs.behind, &halves)?,
            found: room(self.level != Level::Portable && self.watches, &[1])?,
            x: room(tables && needs.gates, &of_queries)?,
            y: room(tables && needs.gates, &tokens)?,
            by_scale: room(tables && needs.scale, &of_queries)?,
            by_gate: room(tables && self.wants(&["dg_gamma", "gg_gamma"]), &tokens)?,
        })
    }
}

/// Planes of the tables of the gates: `Gates` of `linear_attention/problem.cuh`.
const PLANES: usize = 9;
