//! The forward passes of the softmax algorithms: one task per tile of queries.

use super::cut::Cut;
use super::needs::Needs;
use super::operands::Operands;
use super::packs::{Keys, Layout, Packing};
use super::rule::{Prepared, ScoreRule};
use super::tasks::{Task, Tasks};
use super::wave::each;
use crate::element::TensorMut;
use crate::mask::QueryHead;
use crate::pack::{ONE_JOB, Packed, Source};
use crate::plan::Plan;
use crate::tiles::query_rows;
use crate::waves::Waves;
use crate::workspace::Parts;
use crate::{Options, Workspace};
use etalon_problem::Error;
use ndarray::{ArrayViewMut3, Ix4};

/// Places of the results of a forward pass.
pub struct Places<'o> {
    /// o, or of attention_lse ∂lse/∂q.
    pub o: Option<TensorMut<'o, Ix4>>,
    /// Σ a P v, of lazy attention.
    pub pv: Option<TensorMut<'o, Ix4>>,
    pub lse: ArrayViewMut3<'o, f32>,
}

/// Parts in which the forward passes of the softmax algorithms differ.
pub trait Streamed: Sync {
    /// The memory of one thread.
    type Scratch<'m>: Send;

    fn operands(&self) -> &Operands<'_>;

    /// The cut and the packing of the operands.
    fn packing(&self, options: &Options) -> Result<Packing<'_>, Error>;

    /// The products of a pair of tiles.
    fn products(&self) -> usize;

    /// The memory of a thread, for sequences of at most `keys` keys.
    fn scratch<'m>(&self, parts: &mut Parts<'m>, cut: &Cut, keys: usize) -> Self::Scratch<'m>;

    /// Computes a tile of queries, of which some may not be finite, and writes it.
    fn tile(&self, task: &mut Task<'_>, tile: Tile<'_>, scratch: &mut Self::Scratch<'_>);
}

/// A tile of queries with its keys and values.
pub struct Tile<'a> {
    pub rule: ScoreRule<'a>,
    pub keys: &'a Keys<'a>,
    /// The queries, to be packed across.
    pub queries: Source<'a>,
    /// Their layout.
    layout: Layout,
}

impl Tile<'_> {
    /// Packs the queries, and says whether one is not finite.
    pub fn pack(&self, q: &mut Packed<'_>) -> bool {
        self.layout.across(&self.queries, q)
    }
}

/// Runs a forward pass.
pub fn sweep<P: Streamed>(
    workspace: &Workspace,
    pass: &P,
    Places { o, pv, lse }: Places<'_>,
    options: &Options,
) -> Result<(), Error> {
    let (operands, packing) = (pass.operands(), pass.packing(options)?);
    let (waves, needs, cut) = (waves(&packing), needs(pass, &packing), packing.cut);
    let lists = workspace.lists(needs.lists(&packing), "lists of tiles")?;
    let mut memory = workspace.room(needs.all(), "the memory of a forward pass")?;
    let parts = &mut Parts::of(&mut memory);
    let mut slots = packing.room(parts, &lists, needs.together)?;
    let scratch = (0..needs.workers).map(|_| pass.scratch(parts, &cut, packing.longest().1));
    let mut scratch = lists.collect(needs.workers, scratch, "the scratch of threads")?;
    let prepared = Prepared::new(operands, &lists)?;
    let (results, nothing) = ([o, pv], f32::NEG_INFINITY);
    let mut tasks = Tasks::of_queries(&lists, &packing, waves, results, Some(lse), nothing)?;
    for wave in waves.iter() {
        packing.pack(&mut slots, &wave);
        each(&mut scratch, tasks.wave(&wave).iter_mut(), |task, scratch| {
            let keys = &slots.keys[task.slot - wave.start];
            pass.tile(task, tile(operands, &packing, &prepared, keys, task), scratch);
        });
    }
    Ok(())
}

fn tile<'a>(
    operands: &'a Operands<'_>,
    packing: &'a Packing<'_>,
    prepared: &'a Prepared<'_>,
    keys: &'a Keys<'_>,
    task: &Task<'_>,
) -> Tile<'a> {
    let (head, rows) = (task.place.head, task.place.rows.clone());
    let sequence = &packing.sequences[task.place.number];
    let start = query_rows(sequence).start;
    let queries = Source {
        rows: operands.q.rows(sequence.batch, head, start + rows.start..start + rows.end),
        masked: None,
        job: ONE_JOB,
    };
    let of = QueryHead { sequence, head };
    let rule = ScoreRule::new(operands.scores, prepared, operands.bias, of);
    Tile { rule, keys, queries, layout: packing.layouts()[1] }
}

/// The plan of [`sweep`].
pub fn plan_of<P: Streamed>(pass: &P, options: &Options) -> Result<Plan, Error> {
    let packing = pass.packing(options)?;
    Ok(Plan { products: pass.products(), ..needs(pass, &packing).plan(&packing) })
}

fn needs<P: Streamed>(pass: &P, packing: &Packing<'_>) -> Needs {
    let keys = packing.longest().1;
    let scratch = Parts::count(|parts| pass.scratch(parts, &packing.cut, keys));
    Needs {
        together: waves(packing).size,
        workers: packing.workers(),
        slot: packing.slot(),
        scratch,
        thread: size_of::<P::Scratch<'_>>(),
        stats: 0,
        sums: 0,
        diagonals: 0,
        totals: 0,
        prepared: Prepared::bytes(pass.operands()),
    }
}

/// Tasks are tiles of queries.
fn waves(packing: &Packing<'_>) -> Waves {
    let bytes = packing.slot().saturating_mul(size_of::<f32>());
    Waves::new(packing.slots(), bytes, packing.tiles().0, rayon::current_num_threads())
}
