//! The double backward pass of lazy attention: who writes which tile.
//!
//! Three sweeps over the scores (the numbers of products are those of one pair of tiles, every cotangent
//! given; those with a value only where a pair is active):
//!
//! * rows: the sums from which u, Δ and Δ̇ follow (E21), (E8), (E24): 6 products;
//! * rows again, from memory still warm: gq and gdout (E26), (E23): 10 products;
//! * columns: gk and gv (E27), (E28), and partial sums of gbias and gτ (E29), (E30): 10 products.
//!
//! Between them pass six numbers per row, lse, δ, u, z, τ/n and 1/n, so that memory is O(N). o is not
//! read.
//!
//! Every element has one writer and one order of summation: results are bitwise reproducible.

use super::diagonals::Diagonals;
use super::double_backward::packing;
use super::kernels::QueryTile;
use super::key_sweep::KeySweep;
use super::lazy_counts::write_counts;
use super::lazy_second::{LazySecond, Moments};
use super::operands::{Operands, blind, number};
use super::packs::Packing;
use super::pair::Pair;
use super::schedule::Schedule;
use super::scratch::Scratch;
use super::stats::{RowStats, Stats};
use super::tasks::Task;
use super::wave::{Memory, Places, Wave, Work, each};
use crate::plan::Plan;
use crate::{Options, Workspace};
use etalon_problem::Error;

/// Writes what has a place.
pub fn run(
    workspace: &Workspace,
    operands: &Operands<'_>,
    places: Places<'_>,
    options: &Options,
) -> Result<(), Error> {
    let packing = packing(operands, false, options)?;
    let schedule = schedule(operands, &packing, places.distances.is_some(), places.tau.is_some());
    Work { operands, packing, schedule, level: options.level }.run(
        workspace,
        places,
        |wave, Memory { stats, diagonals, scratch, .. }, queries, keys| {
            row_sweep(wave, scratch, queries, stats);
            let keys = diagonals.with_tasks(keys, wave.first);
            KeySweep { wave, body: LazySecond, stats, sums: &[] }.run(scratch, keys);
        },
        |_, _, _| 0.0, // there are no sinks
        LazySecond,
    )
}

/// The plan of [`run`], all results being wanted.
pub fn plan(operands: &Operands<'_>, options: &Options) -> Result<Plan, Error> {
    let packing = packing(operands, false, options)?;
    let schedule = schedule(operands, &packing, operands.distances.is_some(), true);
    let plan = schedule.needs(&packing, operands).plan(&packing);
    Ok(Plan { products: products(operands), ..plan })
}

fn schedule(operands: &Operands<'_>, packing: &Packing<'_>, gbias: bool, gtau: bool) -> Schedule {
    let diagonals = Diagonals::each(operands, gbias, gtau);
    let partials = Diagonals::slot(packing, diagonals).saturating_mul(size_of::<f32>());
    let (cut, numbers) = (packing.cut, Stats::LAZY);
    let waves = Schedule::waves(packing, (numbers, false), partials, usize::MAX);
    let (o_anew, fused, bias) = (false, false, false);
    Schedule { cut, second: true, numbers, diagonals, o_anew, fused, bias, waves }
}

/// The products of a pair of tiles, over all sweeps.
fn products(operands: &Operands<'_>) -> usize {
    let Operands { dout, ddq, ddk, ddv, cot_o, .. } = *operands;
    let [dout, ddq, ddk, ddv, cot_o] =
        [dout, ddq, ddk, ddv, cot_o].map(|operand| usize::from(operand.is_some()));
    // S and U, g and T.
    let weights = 1 + ddq + ddk + dout * (1 + ddv) + cot_o;
    let rows = weights + 1 + ddk + 1 + ddv;
    let columns = weights + 1 + ddq + dout + cot_o;
    weights + rows + columns
}

/// gdlse, gq and gdout, one task per tile of queries; the numbers of its rows stay in `stats`.
fn row_sweep(
    wave: Wave<'_>,
    scratch: &mut [Scratch<'_>],
    tasks: &mut [Task<'_>],
    stats: &mut RowStats<'_>,
) {
    let (cut, level) = (wave.work.schedule.cut, wave.work.level);
    each(scratch, stats.with_tasks(tasks, wave.first), |(task, part), scratch| {
        let rows = task.place.rows.clone();
        let pair = wave.pair(task.slot, task.member, Stats::NONE);
        part.fill(0.0);
        write_counts(wave, task, pair, scratch, Stats::counts(part, cut.queries));
        let stats = Stats::of(part, rows.start, cut.queries);
        let pair_so_far = Pair { stats, ..pair };
        QueryTile { body: Moments, pair: pair_so_far, rows: rows.clone(), scratch }.sweep(level);
        row_numbers(wave, task, scratch.sums.numbers, part);
        let stats = Stats::of(part, rows.start, cut.queries);
        task.write_numbers(stats.u); // (E21)
        if task.results.iter().any(Option::is_some) {
            let pair = Pair { stats, ..pair };
            QueryTile { body: LazySecond, pair, rows, scratch }.sweep(level);
            task.write(0, scratch.sums.wide, cut.stride(pair.dim), pair.rule.scale);
            task.write(1, scratch.sums.values, cut.stride(pair.value_dim), 1.0);
        }
    });
}

/// δ, u and z of the rows of a task, from their sums. A row that sees no key keeps zeros.
fn row_numbers(wave: Wave<'_>, task: &Task<'_>, sums: &[f32], part: &mut [f32]) {
    let Work { operands, schedule, .. } = wave.work;
    let size = schedule.cut.queries;
    for r in 0..task.place.rows.len() {
        let at = wave.row(&task.place, r);
        if blind(operands.lse, at) {
            continue;
        }
        let [u, delta, change] = [0, 1, 2].map(|of| sums[of * size + r]);
        let change = change - u * delta; // (E24)
        let delta = delta - number(operands.dlse, at);
        let z = change - number(operands.cot_lse, at);
        Stats::write(part, size, r, [delta, u, z]);
    }
}
