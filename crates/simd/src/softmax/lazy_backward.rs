//! The backward pass of lazy attention: who writes which tile.
//!
//! * One task per tile of queries counts the keys of its rows and finds Δ: from Σ a P v, if the forward
//!   pass wrote that, or by a sweep of 2 products.
//! * One task per tile of keys writes dk and dv, and partial sums of dbias and dτ: 4 products. With
//!   [`Mode::FusedPartials`] it adds its part of dq to sums in memory, which is one product more; with
//!   [`Mode::Separate`] the tiles of queries write dq in a sweep of their own, of 3 products.
//!
//! g and dv take a product only where a pair is active. Every tile that holds a visible pair adds to dq,
//! dk and dbias: there dS is −P (Δ − dlse) even if no pair is active.
//!
//! Every element has one order of summation, the same in both modes and for any number of threads.

use super::backward::packing;
use super::cut::Cut;
use super::diagonals::Diagonals;
use super::kernels::QueryTile;
use super::key_sweep::{KeySweep, begin_sums};
use super::lazy_counts::write_counts;
use super::lazy_gradient::{LazyGradient, Means};
use super::operands::{Operands, blind, number};
use super::ordered_sum::OrderedSum;
use super::packs::Packing;
use super::pair::Pair;
use super::schedule::Schedule;
use super::scratch::Scratch;
use super::stats::{RowStats, Stats};
use super::tasks::Task;
use super::wave::{Memory, Places, Wave, Work, each};
use crate::element::{Tensor, View};
use crate::plan::Plan;
use crate::products::dot;
use crate::{Mode, Options, Workspace};
use etalon_problem::Error;
use ndarray::Ix4;

/// Gradients that are wanted.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    dq: bool,
    dk: bool,
    dv: bool,
    dbias: bool,
    dtau: bool,
}

impl Wanted {
    /// dq, dk and dv.
    fn tensors(self) -> [bool; 3] {
        [self.dq, self.dk, self.dv]
    }

    /// True if Δ is needed.
    fn delta(self) -> bool {
        self.dq || self.dk || self.dbias
    }

    /// True if the sweep of the keys has a result beside dq.
    fn keys(self) -> bool {
        self.dk || self.dv || self.dbias || self.dtau
    }
}

/// Writes the gradients that have a place.
pub fn run(
    workspace: &Workspace,
    operands: &Operands<'_>,
    places: Places<'_>,
    options: &Options,
) -> Result<(), Error> {
    let [dk, dv] = places.keys.each_ref().map(Option::is_some);
    let (dbias, dtau) = (places.distances.is_some(), places.tau.is_some());
    let wanted = Wanted { dq: places.queries[0].is_some(), dk, dv, dbias, dtau };
    let packing = packing(operands, wanted.tensors(), options)?;
    let schedule = schedule(operands, &packing, wanted, options);
    let fused = schedule.fused;
    let body = LazyGradient { g: wanted.delta() || dtau };
    Work { operands, packing, schedule, level: options.level }.run(
        workspace,
        places,
        |wave, Memory { stats, diagonals, sums, scratch }, queries, keys| {
            row_numbers(wave, scratch, queries, stats, wanted.delta());
            if fused {
                begin_sums(wave, queries, sums);
            }
            let keys = diagonals.with_tasks(keys, wave.first);
            KeySweep { wave, body, stats, sums }.run(scratch, keys);
            if wanted.dq && !fused {
                query_sweep(wave, scratch, queries, stats);
            }
        },
        |_, _, _| 0.0, // there are no sinks
        body,
    )
}

/// The plan of [`run`], every gradient being wanted, with Σ a P v or without.
pub fn plan(operands: &Operands<'_>, pv: bool, options: &Options) -> Result<Plan, Error> {
    let dbias = operands.distances.is_some();
    let wanted = Wanted { dq: true, dk: true, dv: true, dbias, dtau: true };
    let packing = packing(operands, wanted.tensors(), options)?;
    let schedule = schedule(operands, &packing, wanted, options);
    let plan = schedule.needs(&packing, operands).plan(&packing);
    let means = if pv && !schedule.cut.bf16 { 0 } else { 2 };
    let (mode, dq) = if schedule.fused { (Mode::FusedPartials, 1) } else { (Mode::Separate, 3) };
    Ok(Plan { mode: Some(mode), products: 4 + dq + means, ..plan })
}

fn schedule(
    operands: &Operands<'_>,
    packing: &Packing<'_>,
    wanted: Wanted,
    options: &Options,
) -> Schedule {
    let diagonals = Diagonals::each(operands, wanted.dbias, wanted.dtau);
    let (dq, numbers) = (wanted.dq && wanted.keys(), Stats::LAZY); // alone dq is one sweep anyway
    let sums = OrderedSum::slot(packing).saturating_mul(size_of::<f32>());
    let affordable = options.partials_budget / sums.max(1);
    let fused = match options.mode {
        Mode::Separate => false,
        Mode::FusedPartials => dq,
        Mode::Auto | Mode::ForwardGradient => dq && affordable >= 1,
    };
    let partials = Diagonals::slot(packing, diagonals).saturating_mul(size_of::<f32>());
    let (sums, most) = if fused { (sums, affordable) } else { (0, usize::MAX) };
    let waves = Schedule::waves(packing, (numbers, false), sums.saturating_add(partials), most);
    let cut = packing.cut;
    Schedule { cut, second: false, numbers, diagonals, o_anew: false, fused, bias: false, waves }
}

/// τ/n and 1/n of every row of a wave, and with `delta` also Δ − dlse. A row that sees no key keeps zeros.
fn row_numbers(
    wave: Wave<'_>,
    scratch: &mut [Scratch<'_>],
    tasks: &mut [Task<'_>],
    stats: &mut RowStats<'_>,
    delta: bool,
) {
    let Work { operands, level, schedule: Schedule { cut, .. }, .. } = *wave.work;
    each(scratch, stats.with_tasks(tasks, wave.first), |(task, part), scratch| {
        let rows = task.place.rows.clone();
        let pair = wave.pair(task.slot, task.member, Stats::NONE);
        part.fill(0.0);
        write_counts(wave, task, pair, scratch, Stats::counts(part, cut.queries));
        if !delta {
            return;
        }
        let pv = pv(operands, &cut);
        if pv.is_none() {
            let pair = Pair { stats: Stats::of(part, rows.start, cut.queries), ..pair };
            QueryTile { body: Means, pair, rows: rows.clone(), scratch }.sweep(level);
        }
        for (r, to) in part.iter_mut().enumerate().take(rows.len()) {
            let at = wave.row(&task.place, r);
            if !blind(operands.lse, at) {
                *to = self::delta(pv, operands, at, r, scratch) - number(operands.dlse, at);
            }
        }
    });
}

/// Σ a P v, where Δ is taken from it: not in bf16, whose scores are summed in another order than those of a forward
/// pass in f32, so that a pair at the kink may be active in the one alone.
fn pv<'a>(operands: &Operands<'a>, cut: &Cut) -> Option<View<'a, f32, Ix4>> {
    operands.pv.filter(|_| !cut.bf16)
}

/// Δ of row `r` of a tile, (E8): from Σ a P v, or what the sweep has left.
fn delta(
    pv: Option<View<'_, f32, Ix4>>,
    operands: &Operands<'_>,
    at: [usize; 3],
    r: usize,
    scratch: &mut Scratch<'_>,
) -> f32 {
    let (Some(pv), Some(cotangent)) = (pv, operands.dout) else {
        return scratch.sums.numbers[r];
    };
    let [row, dout] = &mut scratch.rows;
    Tensor::from(pv).read_row(at, row);
    if row.iter().all(|&x| x == 0.0) {
        return 0.0; // an inactive row, whatever dout holds
    }
    cotangent.read_row(at, dout);
    dot(row, dout)
}

/// dq, one task per tile of queries.
fn query_sweep(
    wave: Wave<'_>,
    scratch: &mut [Scratch<'_>],
    tasks: &mut [Task<'_>],
    stats: &RowStats<'_>,
) {
    let body = LazyGradient { g: true };
    each(scratch, tasks.iter_mut(), |task, scratch| {
        let rows = task.place.rows.clone();
        let stats = stats.tile(wave.head(task.slot, task.member), rows.start);
        let pair = wave.pair(task.slot, task.member, stats);
        QueryTile { body, pair, rows, scratch }.sweep(wave.work.level);
        task.write(0, scratch.sums.wide, scratch.cut.stride(pair.dim), pair.rule.scale);
    });
}
