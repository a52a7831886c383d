//! A pass of linear_attention: its operands, its tables, its memory, its kernels.

use super::Job;
use super::hopper_modules::Hopper;
use super::tables::Tables;
use crate::gpu::Kernels;
use crate::parts::Parts;
use crate::room::{Layout, Room, memory};
use crate::variant::{Variant, linear_threads};
use crate::workspace::Held;
use etalon_problem::{Decay, Dtype, Error, LinearAttention, Pass, TokenSequences};
use std::borrow::Cow;
use std::ops::Deref;
use std::sync::Arc;

/// A pass of a problem: what its kernels are told, for any operands of the same shapes and strides.
#[derive(Debug)]
pub(crate) struct Prepared<'a> {
    pub(super) parts: Parts,
    pub(super) problem: Cow<'a, LinearAttention>,
    pub(super) tables: Tables,
    pub(super) rooms: Rooms,
    pub(super) first: Modules,
    pub(super) second: Option<Modules>,
    /// Kernels of the level sm80, which take the place of those of `first`.
    pub(super) tensor: Option<TensorModules>,
    /// Kernels of the level sm90a, in which those of `first` add up parts.
    pub(super) hopper: Option<Hopper>,
    /// Whether somebody looks for numbers that are not finite.
    pub(super) watches: bool,
}

/// Kernels on tensor cores, with the variants that they are: of factors as wide as D and results as wide as E,
/// and the other way round.
#[derive(Debug)]
pub(super) struct TensorModules {
    pub by_value: (Arc<Kernels>, Variant),
    pub by_dim: (Arc<Kernels>, Variant),
}

/// Kernels whose accumulators are as wide as D, and as E.
#[derive(Debug)]
pub(super) struct Modules {
    pub by_dim: Arc<Kernels>,
    pub by_value: Arc<Kernels>,
    /// Threads of a block of either.
    pub threads: [u32; 2],
}

/// What kernels hand to one another, in scratch memory.
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

/// What a pass computes on its way to its results.
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

impl Job<'_> {
    /// The address of a room, 0 where there is none.
    pub(super) fn room(&self, room: Option<Room>) -> u64 {
        room.map_or(0, |room| self.at(room))
    }
}

impl Prepared<'_> {
    /// Whether any of these is a result.
    pub(super) fn wants(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.part(name).is_some_and(|part| part.wanted))
    }

    pub(super) fn needs(&self) -> Needs {
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

    /// Whether tokens belong to no sequence: results there are 0.
    pub(super) fn has_padding(&self) -> bool {
        self.problem.sequences != TokenSequences::Dense
    }

    pub(super) fn reserve(&self, layout: &mut Layout) -> Result<Rooms, Error> {
        if self.pass == Pass::Step {
            return Ok(Rooms::default());
        }
        let (e, needs) = (&self.problem.extents, self.needs());
        let second = self.pass == Pass::DoubleBackward;
        let tokens = [e.batch, e.key_heads, e.tokens];
        let of_queries = [e.batch, e.query_heads, e.tokens];
        let states = [self.tables.chunks.len(), e.key_heads, e.dim, self.problem.value_dim];
        let planes = [tokens[0], tokens[1], tokens[2], PLANES];
        // Those of sm90a keep states in registers.
        let tables = self.hopper.is_none() || self.watches;
        let bends = self.has("ddg") || self.has("ddg_gamma");
        let narrow = self.tensor.is_some();
        // Elements of two bytes.
        let halves = [states[0], states[1], (states[2] * states[3]).div_ceil(2)];
        let mut room = |wanted: bool, shape: &[usize]| {
            if !wanted {
                return Ok(None);
            }
            let bytes = shape.iter().try_fold(4usize, |n, &extent| n.checked_mul(extent));
            layout.room(bytes.ok_or_else(|| memory(usize::MAX))?).map(Some)
        };
        Ok(Rooms {
            gates: room(tables && self.problem.decay != Decay::None, &planes)?,
            slopes: room(second && bends, &planes)?,
            before: room(tables && needs.before, &states)?,
            behind: room(tables && needs.behind, &states)?,
            before_tangent: room(second && needs.before, &states)?,
            behind_tangent: room(second && needs.behind, &states)?,
            before_narrow: room(narrow && needs.before, &halves)?,
            behind_narrow: room(narrow && needs.behind, &halves)?,
            found: room((narrow || self.hopper.is_some()) && self.watches, &[1])?,
            x: room(tables && needs.gates, &of_queries)?,
            y: room(tables && needs.gates, &tokens)?,
            by_scale: room(tables && needs.scale, &of_queries)?,
            by_gate: room(tables && self.wants(&["dg_gamma", "gg_gamma"]), &tokens)?,
        })
    }
}

/// Planes of the tables of the gates: `Gates` of `linear.cuh`.
const PLANES: usize = 9;

impl Modules {
    pub(super) fn load(
        held: &Held,
        problem: &LinearAttention,
        storage: Dtype,
        second: bool,
    ) -> Result<Modules, Error> {
        let (device, architecture) = (&held.device, held.device.architecture());
        let load = |columns: usize| {
            device.kernels(Variant::linear(storage, columns, second), &architecture)
        };
        let columns = [problem.extents.dim, problem.value_dim];
        let threads = columns.map(|columns| linear_threads(columns, second));
        Ok(Modules { by_dim: load(columns[0])?, by_value: load(columns[1])?, threads })
    }
}

impl TensorModules {
    pub(super) fn load(
        held: &Held,
        problem: &LinearAttention,
        storage: Dtype,
        whole: bool,
    ) -> Result<TensorModules, Error> {
        let (device, architecture) = (&held.device, held.device.architecture());
        let load = |columns: [usize; 2]| {
            let variant = Variant::linear_tensor(storage, columns, whole);
            Ok((device.kernels(variant.clone(), &architecture)?, variant))
        };
        let (dim, value_dim) = (problem.extents.dim, problem.value_dim);
        Ok(TensorModules { by_value: load([dim, value_dim])?, by_dim: load([value_dim, dim])? })
    }
}
