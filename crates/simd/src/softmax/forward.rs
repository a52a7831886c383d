//! The forward pass: one task per tile of queries.

use super::cut::Cut;
use super::forward_tile::{ForwardScratch, ForwardTile};
use super::inputs::Inputs;
use super::packs::{Keys, Operand, Packing};
use super::rule::ScoreRule;
use super::schedule::FIRST_ORDER;
use super::tasks::{RowTask, row_tasks};
use crate::Options;
use crate::element::TensorMut;
use crate::mask::Sight as PreparedMask;
use crate::pack::{ONE_JOB, Source};
use crate::parallel::for_each;
use crate::plan::Plan;
use crate::tiles::query_rows;
use crate::waves::Waves;
use etalon_problem::Error;
use ndarray::{ArrayViewMut3, Ix4};
use std::sync::Mutex;

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
        o: Option<TensorMut<'_, Ix4>>,
        lse: ArrayViewMut3<'_, f32>,
        options: &Options,
    ) -> Result<(), Error> {
        let packing = self.packing(options)?;
        let (scores, cut, width) = (self.inputs.scores, packing.cut, self.width());
        let mask = PreparedMask::new(&scores.mask)?;
        let waves = waves(&packing);
        let mut slots = (0..waves.size).map(|_| packing.slot()).collect::<Result<Vec<_>, _>>()?;
        let scratch = || ForwardScratch::new(&cut, scores.extents.dim, width);
        // Trial allocation: on an error nothing has been written yet.
        let idle = Mutex::new(vec![scratch()?]);
        let tasks = row_tasks(&packing, waves, [o, None], Some(lse), f32::NEG_INFINITY);
        for (wave, tasks) in waves.iter().zip(tasks) {
            packing.pack(&mut slots[..wave.len()], wave.start);
            for_each(&idle, tasks, scratch, |task, scratch| {
                let keys = &slots[task.place.slot(scores) - wave.start].keys;
                self.tile(task, &packing, &mask, keys, scratch, options);
            })?;
        }
        Ok(())
    }

    /// Columns of the result.
    fn width(&self) -> usize {
        if self.gradient { self.inputs.scores.extents.dim } else { self.inputs.value_dim() }
    }

    fn packing(&self, options: &Options) -> Result<Packing<'_>, Error> {
        let Inputs { scores, k, v, .. } = self.inputs;
        let cut = Cut::new(scores, options, FIRST_ORDER)?;
        let k = if self.gradient { Operand::both(Some(k)) } else { Operand::across(Some(k)) };
        let keys = [k, Operand::along(v), Operand::NONE, Operand::NONE];
        Ok(Packing { scores, sequences: scores.sequences(), cut, keys, queries: None })
    }

    /// How [`Forward::run`] will work.
    pub fn plan(&self, options: &Options) -> Result<Plan, Error> {
        let packing = self.packing(options)?;
        let together = waves(&packing).size;
        let dim = self.inputs.scores.extents.dim;
        let scratch = ForwardScratch::new(&packing.cut, dim, self.width())?.bytes();
        Ok(Plan {
            blocking: packing.cut.blocking(),
            mode: None,
            products: if self.width() == 0 { 1 } else { 2 },
            interval: None,
            together,
            buffers: packing.buffers(together, scratch),
        })
    }

    fn tile(
        &self,
        task: RowTask<'_>,
        packing: &Packing<'_>,
        mask: &PreparedMask<'_>,
        keys: &Keys,
        scratch: &mut ForwardScratch,
        options: &Options,
    ) {
        let Inputs { scores, q, bias, .. } = self.inputs;
        let head = task.place.head;
        let sequence = &packing.sequences[task.place.number];
        let rows = &task.place.rows;
        let start = query_rows(sequence).start;
        let source = Source {
            rows: q.rows(sequence.batch, head, start + rows.start..start + rows.end),
            masked: None,
            job: ONE_JOB,
        };
        let has_nonfinite = source.non_finite().is_some();
        source.across_into(packing.cut.rows, &mut scratch.q);
        let tile = ForwardTile {
            rule: ScoreRule::new(scores, mask, bias, sequence, head),
            keys,
            derivative: self.gradient,
            has_nonfinite,
            rows: rows.clone(),
            dim: scores.extents.dim,
            width: self.width(),
            sink: self.inputs.sinks.map(|sinks| sinks[head]),
            scratch: &mut *scratch,
        };
        options.level.run(tile);
        let [o, _] = task.results;
        task.numbers.into_iter().for_each(|mut lse| lse.write(&scratch.m, 1.0));
        o.into_iter().for_each(|mut o| o.write_rows(&scratch.o, scratch.stride, 1.0));
    }
}

/// Tasks are tiles of queries.
fn waves(packing: &Packing<'_>) -> Waves {
    let threads = rayon::current_num_threads();
    Waves::new(packing.slots(), packing.bytes(), packing.tiles().0, threads)
}
