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
use super::key_sweep::{KeySweep, ordered_sums};
use super::packs::{Operand, Packing};
use super::schedule::{FIRST_ORDER, Schedule};
use super::scratch::Scratch;
use super::stats::RowStats;
use super::tasks::{RowTask, key_tasks, row_tasks};
use super::wave::{Memory, Wave, Work, finish};
use crate::aligned::Aligned;
use crate::element::{Tensor, TensorMut, View};
use crate::plan::{Buffer, Plan};
use crate::products::dot;
use crate::tiles::query_rows;
use crate::{Mode, Options};
use etalon_problem::{BiasExtents, Error};
use ndarray::{ArrayView4, ArrayViewMut1, Ix3, Ix4, s};
use rayon::prelude::*;

/// Rows that one job takes the products dout·o of, at least.
const ROWS: usize = 256;

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
    pub fn run(&self, out: Gradients<'_>, options: &Options) -> Result<(), Error> {
        let Gradients { mut dq, dk, dv, dsinks, mut dbias } = out;
        let ready = self.gradient.and_then(|gradient| Some((gradient, dq.take()?)));
        let [with_dq, with_dk, with_dv, with_dbias] = [&dq, &dk, &dv, &dbias].map(Option::is_some);
        let wanted = Wanted { dq: with_dq, dk: with_dk, dv: with_dv, dbias: with_dbias };
        let packing = self.packing(wanted, options)?;
        let schedule = self.schedule(&packing, wanted, options);
        let work = Work::new(self.inputs, None, packing, schedule, options)?;
        let Schedule { waves, fused, bias, .. } = schedule;
        let Memory { mut slots, mut stats } = work.memory()?;
        let sum = || Aligned::zeros(self.sum(&work.packing, fused), "the sums of dq");
        let mut sums = (0..waves.size).map(|_| sum()).collect::<Result<Vec<_>, _>>()?;
        let with_keys = if bias { None } else { dbias.take() };
        // Without dk and dv no tile of keys needs ds for them.
        let body = Gradient { ds: wanted.dk || fused || with_keys.is_some(), capped: true };
        let mut rows = dq.map(|dq| row_tasks(&work.packing, waves, [Some(dq), None], None, 0.0));
        let mut keys = key_tasks(&work.packing, waves, [dk, dv], with_keys);
        let mut sinks = vec![0.0; self.inputs.scores.extents.query_heads];
        for wave in waves.iter() {
            let (slots, stats) = (&mut slots[..wave.len()], &mut stats[..wave.len()]);
            work.packing.pack(slots, wave.start);
            let wave = Wave { work: &work, slots, first: wave.start };
            self.deltas(wave, stats);
            if dsinks.is_some() {
                wave.sink_sums(&mut sinks, stats, |stats, _, i| f64::from(stats.delta[i])); // (B8)
            }
            let rows = rows.as_mut().and_then(Iterator::next).unwrap_or_default();
            let keys = keys.next().unwrap_or_default();
            if fused {
                let sums = Some(ordered_sums(wave, rows, &mut sums));
                KeySweep { wave, body, sums }.run(keys, stats)?;
            } else {
                KeySweep { wave, body, sums: None }.run(keys, stats)?;
                query_sweep(wave, rows, stats)?;
            }
            if let Some(dbias) = dbias.take() {
                wave.bias_sweep(dbias, Gradient { ds: true, capped: false }, stats)?;
            }
        }
        finish((dsinks, sinks), dbias);
        if let Some((gradient, dq)) = ready {
            self.scale_gradient(gradient, dq);
        }
        Ok(())
    }

    /// (L2) dq = dlse · ∂lse/∂q.
    fn scale_gradient(&self, gradient: ArrayView4<'_, f32>, mut dq: TensorMut<'_, Ix4>) {
        let (scores, gradient) = (self.inputs.scores, Tensor::from(gradient));
        dq.fill(0.0);
        let mut numbers = vec![0.0; scores.extents.dim];
        for sequence in scores.sequences() {
            for head in 0..scores.extents.query_heads {
                for row in query_rows(&sequence) {
                    let at = [sequence.batch, head, row];
                    if self.lse[at] == f32::NEG_INFINITY {
                        continue; // the row sees nothing, whatever its dlse
                    }
                    let dlse = self.dlse.map_or(0.0, |dlse| dlse[at]);
                    let [batch, head, row] = at;
                    gradient.slice(s![batch, head, row, ..]).read(&mut numbers);
                    dq.view_mut().slice(s![batch, head, row, ..]).write(&numbers, dlse);
                }
            }
        }
    }

    fn packing(
        &self,
        Wanted { dq, dk, dv, .. }: Wanted,
        options: &Options,
    ) -> Result<Packing<'_>, Error> {
        let Inputs { scores, q, k, v, .. } = self.inputs;
        let if_both = |both| if both { Operand::both } else { Operand::across };
        let keys = [if_both(dq)(Some(k)), Operand::across(v), Operand::NONE, Operand::NONE];
        let queries = [if_both(dk)(Some(q)), if_both(dv)(self.dout), Operand::NONE, Operand::NONE];
        Ok(Packing {
            scores,
            sequences: scores.sequences(),
            cut: Cut::new(scores, options, FIRST_ORDER)?,
            keys,
            queries: Some((queries, self.lse)),
        })
    }

    fn schedule(
        &self,
        packing: &Packing<'_>,
        Wanted { dq, dk, dv, dbias }: Wanted,
        options: &Options,
    ) -> Schedule {
        let bias = dbias && !(self.unshared_bias() && (dk || dv));
        let dq = dq && (dk || dv); // alone it is one sweep anyway
        let sums = |fused| self.sum(packing, fused).saturating_mul(size_of::<f32>());
        // Of the bias' own sweep, all slots are packed at once.
        let least = if bias { packing.slots() } else { 1 };
        let affordable = options.partials_budget / sums(true).max(1);
        let fused = match options.mode {
            Mode::Separate | Mode::ForwardGradient => false,
            Mode::FusedPartials => dq,
            Mode::Auto => dq && affordable >= least,
        };
        let most = if fused { affordable } else { usize::MAX };
        let waves = Schedule::waves(packing, (false, bias), sums(fused), most);
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
        let packing = self.packing(wanted, options)?;
        let schedule = self.schedule(&packing, wanted, options);
        let mut plan = schedule.plan(&packing, Scratch::new(&schedule, &self.inputs)?.bytes());
        if schedule.fused {
            let each = self.sum(&packing, true).saturating_mul(size_of::<f32>());
            plan.buffers.push(Buffer::parts("sums of dq", plan.together, each));
        }
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

    /// Elements of the sums of dq of a slot, in whole tiles of queries; none unless `fused`.
    fn sum(&self, packing: &Packing<'_>, fused: bool) -> usize {
        if !fused {
            return 0;
        }
        let (scores, rows) = (self.inputs.scores, packing.longest_padded());
        let stride = packing.cut.stride(scores.extents.dim);
        rows.saturating_mul(scores.group()).saturating_mul(stride)
    }

    /// (B1) δ of every row of a wave.
    fn deltas(&self, wave: Wave<'_>, stats: &mut [Vec<RowStats>]) {
        let scores = self.inputs.scores;
        let (key_heads, group) = (scores.extents.key_heads, scores.group());
        stats.par_iter_mut().enumerate().for_each(|(slot, stats)| {
            let slot = wave.first + slot;
            let (sequence, first) = (wave.sequence(slot), slot % key_heads * group);
            stats.par_iter_mut().enumerate().for_each(|(head, stats)| {
                let (rows, padding) = stats.delta.split_at_mut(sequence.queries);
                padding.fill(0.0);
                rows.par_iter_mut().enumerate().with_min_len(ROWS).for_each_init(
                    || [(); 2].map(|()| vec![0.0; self.inputs.value_dim()]),
                    |rows, (i, delta)| {
                        let at = [sequence.batch, first + head, sequence.query_start + i];
                        *delta = self.delta(at, rows);
                    },
                );
            });
        });
    }

    /// δ of a row; 0 if it sees no key at all: it counts for nothing, whatever stands in its operands.
    fn delta(&self, at: [usize; 3], rows: &mut [Vec<f32>; 2]) -> f32 {
        let lse = self.lse[at];
        if lse == f32::NEG_INFINITY {
            return 0.0;
        }
        let sink = self.inputs.sinks.map_or(f32::NEG_INFINITY, |sinks| sinks[at[1]]);
        self.dot(at, lse == sink, rows) - self.dlse.map_or(0.0, |dlse| dlse[at])
    }

    /// dout·o of a row. Where only the sink counts, o = 0 is a constant, whatever dout holds.
    fn dot(&self, at: [usize; 3], only_sink: bool, [o, dout]: &mut [Vec<f32>; 2]) -> f32 {
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
    tasks: Vec<RowTask<'_>>,
    stats: &[Vec<RowStats>],
) -> Result<(), Error> {
    let (scores, cut) = (wave.work.inputs.scores, wave.work.schedule.cut);
    let body = Gradient { ds: true, capped: true };
    wave.for_each(tasks, |RowTask { place, results: [dq, _], .. }, scratch| {
        let slot = place.slot(scores);
        let stats = stats[slot - wave.first][place.head % scores.group()].view();
        let pair = wave.pair_at(&place, stats);
        wave.work.level.run(QueryTile { body, pair, rows: place.rows, scratch });
        let stride = cut.stride(pair.dim);
        dq.into_iter()
            .for_each(|mut dq| dq.write_rows(&scratch.sums.wide, stride, pair.rule.scale));
    })
}
