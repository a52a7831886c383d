//! The backward pass: who writes which tile, and in which order sums are taken.
//!
//! * [`Mode::Separate`]: one task per tile of queries writes dq, one per tile of keys writes dk and
//!   dv. P is computed twice: 7 products per tile.
//! * [`Mode::FusedPartials`]: one task per tile of keys writes dk and dv and adds its part of dq to
//!   sums in memory, so that P is computed once: 5 products per tile. The tiles of keys take turns at
//!   each sum, in ascending order (`ordered_sum.rs`).
//!
//! Every element has one order of summation, the same in both modes and for any number of threads:
//! results are bitwise reproducible.

use super::cut::Cut;
use super::gradient::Gradient;
use super::inputs::Inputs;
use super::kernels::QueryTile;
use super::key_sweep::{KeySweep, begin_sums};
use super::ordered_sum::OrderedSum;
use super::packs::{Known, Operand, Packing};
use super::schedule::{FIRST_ORDER, Schedule};
use super::scratch::Scratch;
use super::stats::RowStats;
use super::tasks::Task;
use super::wave::{Memory, Places, Wave, Work, each};
use crate::element::{Tensor, TensorMut, View};
use crate::plan::Plan;
use crate::products::dot;
use crate::tiles::query_rows;
use crate::{Mode, Options, Workspace};
use etalon_problem::{BiasExtents, Error, Sequence};
use ndarray::{ArrayView4, ArrayViewMut1, Ix3, Ix4, s};

/// A backward pass; its operands have been checked.
pub struct Backward<'a> {
    pub inputs: Inputs<'a>,
    /// o of the forward pass, `[B, Hq, N, E]`, where there are values.
    pub o: Option<Tensor<'a, Ix4>>,
    /// ∂lse/∂q of the forward pass, `[B, Hq, N, D]`; of attention_lse, where it was written: then dq
    /// needs no sweep.
    pub gradient: Option<View<'a, f32, Ix4>>,
    /// lse of the forward pass.
    pub lse: View<'a, f32, Ix3>,
    pub dout: Option<Tensor<'a, Ix4>>,
    pub dlse: Option<View<'a, f32, Ix3>>,
}

/// The gradients that are asked for, each with the shape of its input.
#[derive(Default)]
pub struct Gradients<'o> {
    pub dq: Option<TensorMut<'o, Ix4>>,
    pub dk: Option<TensorMut<'o, Ix4>>,
    pub dv: Option<TensorMut<'o, Ix4>>,
    pub dsinks: Option<ArrayViewMut1<'o, f32>>,
    pub dbias: Option<TensorMut<'o, Ix4>>,
}

/// Which gradients of tensors are wanted.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    dq: bool,
    dk: bool,
    dv: bool,
    dbias: bool,
}

impl Backward<'_> {
    /// Writes the gradients that are asked for.
    pub fn run(
        &self,
        workspace: &Workspace,
        out: Gradients<'_>,
        options: &Options,
    ) -> Result<(), Error> {
        let Gradients { mut dq, dk, dv, dsinks, dbias } = out;
        let ready = self.gradient.and_then(|gradient| Some((gradient, dq.take()?)));
        let [with_dq, with_dk, with_dv, with_dbias] = [&dq, &dk, &dv, &dbias].map(Option::is_some);
        let wanted = Wanted { dq: with_dq, dk: with_dk, dv: with_dv, dbias: with_dbias };
        let (inputs, level) = (self.inputs, options.level);
        let known = Known::of(workspace, inputs.scores)?;
        let packing = self.packing(&known.list, wanted, options)?;
        let schedule = self.schedule(&packing, wanted, options);
        let row = if ready.is_some() { inputs.scores.extents.dim } else { 0 };
        let mut row = workspace.room(row, "a row")?;
        let Schedule { fused, bias, .. } = schedule;
        let (bias, with_keys) = if bias { (dbias, None) } else { (None, dbias) };
        // Without dk and dv no tile of keys needs ds for them.
        let body = Gradient { ds: wanted.dk || fused || with_keys.is_some(), capped: true };
        let (queries, keys) = ([dq, None], [dk, dv]);
        let places = Places { queries, numbers: None, keys, with_keys, sinks: dsinks, bias };
        Work { inputs, packing, schedule, level, ddbias: None }.run(
            workspace,
            places,
            |wave, Memory { stats, sums, scratch }, queries, keys| {
                self.deltas(wave, scratch, stats);
                if fused {
                    begin_sums(wave, queries, sums);
                }
                KeySweep { wave, body, stats, sums }.run(scratch, keys);
                if wanted.dq && !fused {
                    query_sweep(wave, scratch, queries, stats);
                }
            },
            |stats, _, i| f64::from(stats.delta[i]), // (B8)
            Gradient { ds: true, capped: false },
        )?;
        if let Some((gradient, dq)) = ready {
            self.scale_gradient(&known.list, gradient, dq, &mut row);
        }
        Ok(())
    }

    /// (L2) dq = dlse · ∂lse/∂q.
    fn scale_gradient(
        &self,
        sequences: &[Sequence],
        gradient: ArrayView4<'_, f32>,
        mut dq: TensorMut<'_, Ix4>,
        numbers: &mut [f32],
    ) {
        let (scores, gradient) = (self.inputs.scores, Tensor::from(gradient));
        dq.fill(0.0);
        for sequence in sequences {
            for head in 0..scores.extents.query_heads {
                for row in query_rows(sequence) {
                    let at = [sequence.batch, head, row];
                    if self.lse[at] == f32::NEG_INFINITY {
                        continue; // the row sees nothing, whatever its dlse
                    }
                    let dlse = self.dlse.map_or(0.0, |dlse| dlse[at]);
                    let [batch, head, row] = at;
                    gradient.slice(s![batch, head, row, ..]).read(numbers);
                    dq.view_mut().slice(s![batch, head, row, ..]).write(numbers, dlse);
                }
            }
        }
    }

    fn packing<'s>(
        &'s self,
        sequences: &'s [Sequence],
        Wanted { dq, dk, dv, .. }: Wanted,
        options: &Options,
    ) -> Result<Packing<'s>, Error> {
        let Inputs { scores, q, k, v, .. } = self.inputs;
        let if_both = |both| if both { Operand::both } else { Operand::across };
        let keys = [if_both(dq)(Some(k)), Operand::across(v), Operand::NONE, Operand::NONE];
        let queries = [if_both(dk)(Some(q)), if_both(dv)(self.dout), Operand::NONE, Operand::NONE];
        let cut = Cut::new(scores, options, FIRST_ORDER)?;
        Ok(Packing { scores, sequences, cut, keys, queries: Some((queries, self.lse)) })
    }

    fn schedule(
        &self,
        packing: &Packing<'_>,
        Wanted { dq, dk, dv, dbias }: Wanted,
        options: &Options,
    ) -> Schedule {
        let bias = dbias && !(self.unshared_bias() && (dk || dv));
        let dq = dq && (dk || dv); // alone it is one sweep anyway
        let sums = OrderedSum::slot(packing).saturating_mul(size_of::<f32>());
        // Of the bias' own sweep, all slots are packed at once.
        let least = if bias { packing.slots() } else { 1 };
        let affordable = options.partials_budget / sums.max(1);
        let fused = match options.mode {
            Mode::Separate | Mode::ForwardGradient => false,
            Mode::FusedPartials => dq,
            Mode::Auto => dq && affordable >= least,
        };
        let (sums, most) = if fused { (sums, affordable) } else { (0, usize::MAX) };
        let waves = Schedule::waves(packing, (false, bias), sums, most);
        Schedule { cut: packing.cut, second: false, o_anew: false, fused, bias, waves }
    }

    /// Whether dbias is dS itself, as the sweeps have it: no heads or sequences share the bias, and no
    /// softcap makes ds something else.
    fn unshared_bias(&self) -> bool {
        let (scores, e) = (self.inputs.scores, &self.inputs.scores.extents);
        let own = |bias: BiasExtents| bias.batch == e.batch && bias.heads == e.query_heads;
        scores.softcap.is_none() && scores.bias.is_some_and(own)
    }

    /// How [`Backward::run`] will work, dq being wanted or not, and dbias if there is a bias.
    pub fn plan(&self, dq: bool, options: &Options) -> Result<Plan, Error> {
        let (dv, dbias) = (self.inputs.v.is_some(), self.inputs.bias.is_some());
        let wanted = Wanted { dq, dk: true, dv, dbias };
        let sequences = self.inputs.scores.sequences();
        let packing = self.packing(&sequences, wanted, options)?;
        let schedule = self.schedule(&packing, wanted, options);
        let plan = schedule.needs(&packing, &self.inputs).plan(&packing);
        // S and, with values, dP; dk and, with values, dv.
        let each = if dv { 2 } else { 1 };
        let dq = match (dq, schedule.fused) {
            (false, _) => 0,
            (true, true) => 1,
            (true, false) => each + 1,
        };
        let dbias = if schedule.bias { each } else { 0 };
        let mode = if schedule.fused { Mode::FusedPartials } else { Mode::Separate };
        Ok(Plan { mode: Some(mode), products: 2 * each + dq + dbias, ..plan })
    }

    /// (B1) δ of every row of a wave.
    fn deltas(&self, wave: Wave<'_>, scratch: &mut [Scratch<'_>], stats: &mut RowStats<'_>) {
        let scores = self.inputs.scores;
        let (key_heads, group) = (scores.extents.key_heads, scores.group());
        each(scratch, stats.parts(), |(head, start, deltas), scratch| {
            let slot = wave.first + head / group;
            if head >= wave.queries.len() {
                return; // the last wave has fewer slots
            }
            let (sequence, head) = (wave.sequence(slot), slot % key_heads * group + head % group);
            let rows = start..sequence.queries.max(start);
            deltas.fill(0.0);
            for (delta, row) in deltas.iter_mut().zip(rows) {
                let at = [sequence.batch, head, sequence.query_start + row];
                *delta = self.delta(at, &mut scratch.rows);
            }
        });
    }

    /// δ of a row; 0 if it sees no key at all: it counts for nothing, whatever stands in its operands.
    fn delta(&self, at: [usize; 3], rows: &mut [&mut [f32]; 2]) -> f32 {
        let lse = self.lse[at];
        if lse == f32::NEG_INFINITY {
            return 0.0;
        }
        let sink = self.inputs.sinks.map_or(f32::NEG_INFINITY, |sinks| sinks[at[1]]);
        self.dot(at, lse == sink, rows) - self.dlse.map_or(0.0, |dlse| dlse[at])
    }

    /// dout·o of a row. Where only the sink counts, o = 0 is a constant, whatever dout holds.
    fn dot(&self, at: [usize; 3], only_sink: bool, [o, dout]: &mut [&mut [f32]; 2]) -> f32 {
        let (Some(stored), Some(cotangent)) = (self.o, self.dout) else { return 0.0 };
        let [batch, head, row] = at;
        stored.slice(s![batch, head, row, ..]).read(o);
        if only_sink && o.iter().all(|&o| o == 0.0) {
            return 0.0;
        }
        cotangent.slice(s![batch, head, row, ..]).read(dout);
        dot(o, dout)
    }
}

/// dq, one task per tile of queries.
fn query_sweep(
    wave: Wave<'_>,
    scratch: &mut [Scratch<'_>],
    tasks: &mut [Task<'_>],
    stats: &RowStats<'_>,
) {
    let body = Gradient { ds: true, capped: true };
    each(scratch, tasks.iter_mut(), |task, scratch| {
        let rows = task.place.rows.clone();
        let stats = stats.tile(wave.head(task.slot, task.member), rows.start);
        let pair = wave.pair(task.slot, task.member, stats);
        wave.work.level.run(QueryTile { body, pair, rows, scratch });
        task.write(0, scratch.sums.wide, scratch.cut.stride(pair.dim), pair.rule.scale);
    });
}
