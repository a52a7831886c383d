//! The forward pass: one task per tile of queries.

use super::cut::Cut;
use super::forward_tile::{ForwardScratch, ForwardTile};
use super::needs::Needs;
use super::operands::Operands;
use super::packs::{Keys, Operand, Packing};
use super::rule::ScoreRule;
use super::schedule::FIRST_ORDER;
use super::tasks::{Task, Tasks};
use super::wave::each;
use crate::element::TensorMut;
use crate::mask::{QueryHead, Sight as PreparedMask};
use crate::pack::{ONE_JOB, Source};
use crate::plan::Plan;
use crate::tiles::query_rows;
use crate::waves::Waves;
use crate::workspace::Parts;
use crate::{Level, Options, Workspace};
use etalon_problem::Error;
use ndarray::{ArrayViewMut3, Ix4};

/// Writes o, or with `derivative` ∂lse/∂q in its place, and lse.
pub fn run(
    workspace: &Workspace,
    operands: &Operands<'_>,
    (o, lse): (Option<TensorMut<'_, Ix4>>, ArrayViewMut3<'_, f32>),
    derivative: bool,
    options: &Options,
) -> Result<(), Error> {
    let pass = Forward { operands, derivative, level: options.level };
    let packing = pass.packing(options)?;
    let (waves, needs, cut) = (waves(&packing), pass.needs(&packing), packing.cut);
    let lists = workspace.lists(needs.lists(&packing), "lists of tiles")?;
    let mut memory = workspace.room(needs.all(), "the memory of a forward pass")?;
    let parts = &mut Parts::of(&mut memory);
    let mut slots = packing.room(parts, &lists, needs.together)?;
    let scratch = (0..needs.workers).map(|_| pass.scratch(parts, &cut));
    let mut scratch = lists.collect(needs.workers, scratch, "the scratch of threads")?;
    let mask = PreparedMask::new(&operands.scores.mask, &lists)?;
    let (results, nothing) = ([o, None], f32::NEG_INFINITY);
    let mut tasks = Tasks::of_queries(&lists, &packing, waves, results, Some(lse), nothing)?;
    for wave in waves.iter() {
        packing.pack(&mut slots, &wave);
        each(&mut scratch, tasks.wave(&wave).iter_mut(), |task, scratch| {
            pass.tile(task, &packing, &mask, &slots.keys[task.slot - wave.start], scratch);
        });
    }
    Ok(())
}

/// How [`run`] will work.
pub fn plan(operands: &Operands<'_>, derivative: bool, options: &Options) -> Result<Plan, Error> {
    let pass = Forward { operands, derivative, level: options.level };
    let packing = pass.packing(options)?;
    let products = if pass.width() == 0 { 1 } else { 2 };
    Ok(Plan { products, ..pass.needs(&packing).plan(&packing) })
}

/// A forward pass.
struct Forward<'a> {
    operands: &'a Operands<'a>,
    /// Whether ∂lse/∂q is wanted in place of o.
    derivative: bool,
    level: Level,
}

impl<'a> Forward<'a> {
    /// Columns of the result.
    fn width(&self) -> usize {
        let operands = self.operands;
        if self.derivative { operands.scores.extents.dim } else { operands.value_dim() }
    }

    fn scratch<'m>(&self, parts: &mut Parts<'m>, cut: &Cut) -> ForwardScratch<'m> {
        ForwardScratch::new(parts, cut, self.operands.scores.extents.dim, self.width())
    }

    fn packing(&self, options: &Options) -> Result<Packing<'a>, Error> {
        let Operands { scores, sequences, k, v, .. } = *self.operands;
        let cut = Cut::new(scores, options, FIRST_ORDER)?;
        let k = if self.derivative { Operand::both(Some(k)) } else { Operand::across(Some(k)) };
        let keys = [k, Operand::along(v), Operand::NONE, Operand::NONE];
        Ok(Packing { scores, sequences, cut, keys, queries: [Operand::NONE; 4], lse: None })
    }

    fn needs(&self, packing: &Packing<'_>) -> Needs {
        let scratch = Parts::count(|parts| self.scratch(parts, &packing.cut));
        Needs {
            together: waves(packing).size,
            workers: packing.workers(),
            slot: packing.slot(),
            scratch,
            thread: size_of::<ForwardScratch<'_>>(),
            stats: 0,
            sums: 0,
        }
    }

    fn tile(
        &self,
        task: &mut Task<'_>,
        packing: &Packing<'_>,
        mask: &PreparedMask<'_>,
        keys: &Keys<'_>,
        scratch: &mut ForwardScratch<'_>,
    ) {
        let Operands { scores, q, bias, sinks, .. } = *self.operands;
        let (head, rows) = (task.place.head, task.place.rows.clone());
        let sequence = &packing.sequences[task.place.number];
        let start = query_rows(sequence).start;
        let source = Source {
            rows: q.rows(sequence.batch, head, start + rows.start..start + rows.end),
            masked: None,
            job: ONE_JOB,
        };
        let has_nonfinite = source.is_non_finite();
        source.across_into(packing.cut.rows, &mut scratch.q);
        let tile = ForwardTile {
            rule: ScoreRule::new(scores, mask, bias, QueryHead { sequence, head }),
            keys,
            derivative: self.derivative,
            has_nonfinite,
            rows,
            dim: scores.extents.dim,
            width: self.width(),
            sink: sinks.map(|sinks| sinks[head]),
            scratch: &mut *scratch,
        };
        self.level.run(tile);
        task.write_numbers(scratch.m);
        task.write(0, scratch.o, scratch.stride, 1.0);
    }
}

/// Tasks are tiles of queries.
fn waves(packing: &Packing<'_>) -> Waves {
    let bytes = packing.slot().saturating_mul(size_of::<f32>());
    Waves::new(packing.slots(), bytes, packing.tiles().0, rayon::current_num_threads())
}
