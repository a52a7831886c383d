//! A pass of linear_cross_entropy: its operands, its memory, its kernels.

use crate::cross_entropy::filter::Filtering;
use crate::cross_entropy::hopper::Hopper;
use crate::cross_entropy::plan::{Asked, Plan, Walked};
use crate::cross_entropy::tokens::{COMMON, TOKEN, counted};
use crate::gpu::Kernels;
use crate::options::Options;
use crate::parts::{Holds, Parts};
use crate::room::{Layout, Room};
use crate::variant::Variant;
use crate::workspace::Held;
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Dtype, Error, LinearCrossEntropy, Pass, Table, Views};
use std::borrow::Cow;
use std::sync::Arc;

/// A pass whose memory is laid out and whose kernels are loaded.
#[derive(Debug)]
pub(crate) struct Prepared<'a> {
    pub parts: Parts,
    pub problem: Cow<'a, LinearCrossEntropy>,
    /// Whether some tokens may be ignored.
    pub ignores: bool,
    pub asked: Asked,
    pub plan: Plan,
    pub rooms: Rooms,
    pub kernels: Arc<Kernels>,
    /// The kernels of the level sm90a, which take the place of those that multiply.
    pub hopper: Option<Hopper>,
    /// What is left out of dh and dw.
    pub filter: Option<Filtering>,
    pub scratch_bytes: usize,
}

/// Where things lie in scratch memory.
#[derive(Debug)]
pub(crate) struct Rooms {
    pub tokens: Room,
    pub common: Room,
    pub z: Room,
    pub motion: Room,
    pub picked: Room,
    pub nodes: Room,
    pub pulls: Room,
    pub terms: Room,
    pub hidden: Room,
    pub head: Room,
    pub head_bias: Room,
}

/// Bytes of `Pull` of `cross_entropy.cuh`.
fn pull(second: bool) -> usize {
    if second { 56 } else { 28 }
}

impl Rooms {
    fn new(plan: &Plan, asked: Asked, tokens: usize, layout: &mut Layout) -> Result<Rooms, Error> {
        let pulls = if asked.gradients() { pull(asked.second) } else { 0 };
        Ok(Rooms {
            tokens: layout.room(TOKEN * tokens)?,
            common: layout.room(COMMON)?,
            z: layout.room(plan.plane)?,
            motion: layout.room(if asked.second { plan.plane } else { 0 })?,
            picked: layout.room(8 * tokens)?,
            nodes: layout.room(plan.nodes)?,
            pulls: layout.room(pulls * tokens)?,
            terms: layout.room(16 * tokens)?,
            hidden: layout.room(plan.hidden)?,
            head: layout.room(plan.head)?,
            head_bias: layout.room(plan.head_bias)?,
        })
    }
}

impl<'a> Prepared<'a> {
    /// Lays the memory of a pass out that has passed [`Table::check_call`], and loads its kernels. `inputs`: those
    /// in the memory of the host, of which targets and weights are looked at here; on a device nobody can look.
    /// `shard`: what is walked of the shard that the table is of.
    pub fn new(
        held: Arc<Held>,
        (problem, shard): (&'a LinearCrossEntropy, Option<Walked>),
        (pass, storage): (Pass, Dtype),
        table: &Table,
        holds: Holds<'_>,
        inputs: Option<&Views<'_>>,
        options: &Options,
    ) -> Result<Prepared<'a>, Error> {
        let counted = inputs.map(|inputs| counted(problem, inputs)).transpose()?;
        let ignores = counted.is_none_or(|counted| counted < problem.tokens);
        let mut layout = Layout::default();
        let mut parts = Parts::new(held, (pass, storage), table, holds, |_| false, &mut layout)?;
        let gradients = match pass {
            Pass::DoubleBackward => ["gh", "gw", "gbias"],
            _ => ["dh", "dw", "dbias"],
        };
        let [dh, dw, dbias] = gradients.map(|name| parts.has(name));
        let asked = Asked {
            dh,
            dw,
            dbias,
            wide: problem.wide_gradients || storage == Dtype::F32,
            second: pass == Pass::DoubleBackward,
            ..Asked::default()
        };
        // What fills the rows of dh of ignored tokens, if they need not begin and end with whole words.
        parts.load_moves(inputs.is_none() && ignores && storage != Dtype::F32)?;
        let hopper = choose(&parts, problem, options)?;
        let side_by_side = parts.device().multiprocessors / 2;
        let asked = Asked { tensor: hopper.is_some(), side_by_side, ..asked };
        let sizes = (problem.tokens, problem.dim, problem.vocab);
        let plan = match shard {
            Some(walked) => Plan::of_shard(sizes, asked, options.memory_budget, walked)?,
            None => Plan::new(sizes, asked, options.memory_budget)?,
        };
        let rooms = Rooms::new(&plan, asked, problem.tokens, &mut layout)?;
        let scratch = |hopper: Hopper| hopper.with_scratch(sizes, &plan, ignores, &mut layout);
        let hopper = hopper.map(scratch).transpose()?;
        let device = parts.device();
        let variant = Variant::cross_entropy(storage, asked.second);
        let kernels = device.kernels(variant, &device.architecture())?;
        let scratch_bytes = layout.bytes();
        let problem = Cow::Borrowed(problem);
        let filter = None;
        Ok(Prepared {
            parts,
            problem,
            ignores,
            asked,
            plan,
            rooms,
            kernels,
            hopper,
            filter,
            scratch_bytes,
        })
    }
}

impl Prepared<'_> {
    /// The same with a filter, of kernels without tensor cores.
    pub fn filtered(self, filter: Filter) -> Result<Self, Error> {
        let mut layout = Layout::default();
        layout.room(self.scratch_bytes)?; // that of the pass comes first
        let filter = Filtering::new(filter, &self.problem, &self.plan, &mut layout)?;
        Ok(Prepared { filter: Some(filter), scratch_bytes: layout.bytes(), ..self })
    }
}

impl AsRef<Parts> for Prepared<'_> {
    fn as_ref(&self) -> &Parts {
        &self.parts
    }
}

/// The kernels of the level sm90a, if they compute the pass. Fails where the level that is asked for cannot.
fn choose(
    parts: &Parts,
    problem: &LinearCrossEntropy,
    options: &Options,
) -> Result<Option<Hopper>, Error> {
    let refused = options.precision.refuses_tensor_cores();
    let refused = refused.or_else(|| Hopper::refuses(parts, problem));
    let takes = options.level.takes_tensor_cores(refused)?;
    takes.then(|| Hopper::new(parts)).transpose()
}
