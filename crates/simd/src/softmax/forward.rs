//! The forward pass: one task per tile of queries.

use super::cut::Cut;
use super::forward_tile::{ForwardScratch, ForwardTile};
use super::inputs::Inputs;
use super::packs::{Keys, Known, Operand, Packing};
use super::rule::ScoreRule;
use super::schedule::{FIRST_ORDER, Needs};
use super::tasks::{Task, Tasks};
use super::wave::each;
use crate::element::TensorMut;
use crate::mask::Sight as PreparedMask;
use crate::pack::{ONE_JOB, Source};
use crate::plan::Plan;
use crate::tiles::query_rows;
use crate::waves::Waves;
use crate::workspace::Parts;
use crate::{Options, Workspace};
use etalon_problem::{Error, Sequence};
use ndarray::{ArrayViewMut3, Ix4};

/// A forward pass; its operands have been checked.
pub struct Forward<'a> {
    pub inputs: Inputs<'a>,
    /// Whether ∂lse/∂q is wanted in place of o.
    pub gradient: bool,
}

impl Forward<'_> {
    /// Writes o, or ∂lse/∂q, and lse.
    pub fn run(
        &self,
        workspace: &Workspace,
        o: Option<TensorMut<'_, Ix4>>,
        lse: ArrayViewMut3<'_, f32>,
        options: &Options,
    ) -> Result<(), Error> {
        let known = Known::of(workspace, self.inputs.scores)?;
        let packing = self.packing(&known.list, options)?;
        let (waves, needs, cut) = (waves(&packing), self.needs(&packing), packing.cut);
        let lists = workspace.lists(needs.lists(&packing), "lists of tiles")?;
        let mut memory = workspace.room(needs.all(), "the memory of a forward pass")?;
        let parts = &mut Parts::of(&mut memory);
        let mut slots = packing.room(parts, &lists, needs.together)?;
        let scratch = (0..needs.workers).map(|_| self.scratch(parts, &cut));
        let mut scratch = lists.collect(needs.workers, scratch, "the scratch of threads")?;
        let mask = PreparedMask::new(&self.inputs.scores.mask, &lists)?;
        let (results, nothing) = ([o, None], f32::NEG_INFINITY);
        let mut tasks = Tasks::of_queries(&lists, &packing, waves, results, Some(lse), nothing)?;
        for wave in waves.iter() {
            packing.pack(&mut slots, &wave);
            each(&mut scratch, tasks.wave(&wave).iter_mut(), |task, scratch| {
                let keys = &slots.keys[task.slot - wave.start];
                self.tile(task, &packing, &mask, keys, scratch, options);
            });
        }
        Ok(())
    }

    /// Columns of the result.
    fn width(&self) -> usize {
        if self.gradient { self.inputs.scores.extents.dim } else { self.inputs.value_dim() }
    }

    fn scratch<'m>(&self, parts: &mut Parts<'m>, cut: &Cut) -> ForwardScratch<'m> {
        ForwardScratch::new(parts, cut, self.inputs.scores.extents.dim, self.width())
    }

    fn packing<'s>(
        &'s self,
        sequences: &'s [Sequence],
        options: &Options,
    ) -> Result<Packing<'s>, Error> {
        let Inputs { scores, k, v, .. } = self.inputs;
        let cut = Cut::new(scores, options, FIRST_ORDER)?;
        let k = if self.gradient { Operand::both(Some(k)) } else { Operand::across(Some(k)) };
        let keys = [k, Operand::along(v), Operand::NONE, Operand::NONE];
        Ok(Packing { scores, sequences, cut, keys, queries: None })
    }

    fn needs(&self, packing: &Packing<'_>) -> Needs {
        let cut = &packing.cut;
        Needs {
            together: waves(packing).size,
            workers: packing.workers(),
            slot: packing.slot(),
            scratch: Parts::count(|parts| self.scratch(parts, cut)),
            thread: size_of::<ForwardScratch<'_>>(),
            stats: 0,
            sums: 0,
        }
    }

    /// How [`Forward::run`] will work.
    pub fn plan(&self, options: &Options) -> Result<Plan, Error> {
        let sequences = self.inputs.scores.sequences();
        let packing = self.packing(&sequences, options)?;
        let products = if self.width() == 0 { 1 } else { 2 };
        Ok(Plan { products, ..self.needs(&packing).plan(&packing) })
    }

    fn tile(
        &self,
        task: &mut Task<'_>,
        packing: &Packing<'_>,
        mask: &PreparedMask<'_>,
        keys: &Keys<'_>,
        scratch: &mut ForwardScratch<'_>,
        options: &Options,
    ) {
        let Inputs { scores, q, bias, .. } = self.inputs;
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
            rule: ScoreRule::new(scores, mask, bias, sequence, head),
            keys,
            derivative: self.gradient,
            has_nonfinite,
            rows,
            dim: scores.extents.dim,
            width: self.width(),
            sink: self.inputs.sinks.map(|sinks| sinks[head]),
            scratch: &mut *scratch,
        };
        options.level.run(tile);
        task.write_numbers(scratch.m);
        task.write(0, scratch.o, scratch.stride, 1.0);
    }
}

/// Tasks are tiles of queries.
fn waves(packing: &Packing<'_>) -> Waves {
    let bytes = packing.slot().saturating_mul(size_of::<f32>());
    Waves::new(packing.slots(), bytes, packing.tiles().0, rayon::current_num_threads())
}
