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

use super::bf16_gradient::Bf16QueryTile;
use super::gradient::Gradient;
use super::kernels::QueryTile;
use super::key_sweep::{KeySweep, begin_sums};
use super::operands::{Operands, blind, number};
use super::ordered_sum::OrderedSum;
use super::packs::{Operand, Packing};
use super::schedule::{BF16, FIRST_ORDER, Schedule};
use super::scratch::Scratch;
use super::stats::RowStats;
use super::tasks::Task;
use super::wave::{Memory, Places, Wave, Work, each};
use crate::element::{Tensor, TensorMut};
use crate::plan::Plan;
use crate::products::dot;
use crate::tiles::query_rows;
use crate::{Mode, Options, Workspace};
use etalon_problem::{BiasExtents, Error, Pass};
use ndarray::{Ix4, s};

/// Gradients of tensors that are wanted.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    dq: bool,
    dk: bool,
    dv: bool,
    dbias: bool,
}

/// Writes the gradients that have a place.
pub fn run(
    workspace: &Workspace,
    operands: &Operands<'_>,
    mut places: Places<'_>,
    options: &Options,
) -> Result<(), Error> {
    let forward_gradient =
        operands.gradient.and_then(|of| Some((Tensor::from(of), places.queries[0].take()?)));
    let [dk, dv] = places.keys.each_ref().map(Option::is_some);
    let (dq, dbias) = (places.queries[0].is_some(), places.bias.is_some());
    let wanted = Wanted { dq, dk, dv, dbias };
    let packing = packing(operands, [dq, dk, dv], options)?;
    let schedule = schedule(operands, &packing, wanted, options);
    let row = if forward_gradient.is_some() { operands.scores.extents.dim } else { 0 };
    let mut row = workspace.room(row, "a row")?;
    let fused = schedule.fused;
    if !schedule.bias {
        places.with_keys = places.bias.take();
    }
    // Without dk and dv no tile of keys needs ds for them.
    let body = Gradient { ds: dk || fused || places.with_keys.is_some(), capped: true };
    Work { operands, packing, schedule, level: options.level }.run(
        workspace,
        places,
        |wave, Memory { stats, sums, scratch, .. }, queries, keys| {
            deltas(operands, wave, scratch, queries, stats);
            if fused {
                begin_sums(wave, queries, sums);
            }
            let keys = keys.iter_mut().map(|task| (task, Default::default()));
            KeySweep { wave, body, stats, sums }.run(scratch, keys);
            if dq && !fused {
                query_sweep(wave, scratch, queries, stats);
            }
        },
        |stats, _, i| f64::from(stats.delta[i]), // (B8)
        Gradient { ds: true, capped: false },
    )?;
    if let Some((gradient, dq)) = forward_gradient {
        scale_gradient(operands, gradient, dq, &mut row);
    }
    Ok(())
}

/// The plan of [`run`], dq being wanted or not, and dbias if there is a bias.
pub fn plan(operands: &Operands<'_>, dq: bool, options: &Options) -> Result<Plan, Error> {
    let (dv, dbias) = (operands.v.is_some(), operands.bias.is_some());
    let wanted = Wanted { dq, dk: true, dv, dbias };
    let packing = packing(operands, [dq, true, dv], options)?;
    let schedule = schedule(operands, &packing, wanted, options);
    let plan = schedule.needs(&packing, operands).plan(&packing);
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

/// (L2) dq = dlse · ∂lse/∂q.
fn scale_gradient(
    operands: &Operands<'_>,
    gradient: Tensor<'_, Ix4>,
    mut dq: TensorMut<'_, Ix4>,
    numbers: &mut [f32],
) {
    dq.fill(0.0);
    for sequence in operands.sequences {
        for head in 0..operands.scores.extents.query_heads {
            for row in query_rows(sequence) {
                let at = [sequence.batch, head, row];
                if blind(operands.lse, at) {
                    continue;
                }
                gradient.read_row(at, numbers);
                let mut dq = dq.view_mut().slice(s![sequence.batch, head, row, ..]);
                dq.write(numbers, number(operands.dlse, at));
            }
        }
    }
}

/// The operands of a backward pass with these gradients, of attention or of lazy attention, in bf16 where the options
/// let it.
pub fn packing<'s>(
    operands: &Operands<'s>,
    [dq, dk, dv]: [bool; 3],
    options: &Options,
) -> Result<Packing<'s>, Error> {
    let Operands { scores, sequences, q, k, v, dout, lse, .. } = *operands;
    let if_both = |both| if both { Operand::both } else { Operand::across };
    let keys = [if_both(dq)(Some(k)), Operand::across(v), Operand::NONE, Operand::NONE];
    let queries = [if_both(dk)(Some(q)), if_both(dv)(dout), Operand::NONE, Operand::NONE];
    let cut = operands.cut(Pass::Backward, options, [FIRST_ORDER, BF16])?;
    Ok(Packing { scores, sequences, cut, keys, queries, lse })
}

fn schedule(
    operands: &Operands<'_>,
    packing: &Packing<'_>,
    Wanted { dq, dk, dv, dbias }: Wanted,
    options: &Options,
) -> Schedule {
    let bias = dbias && !(unshared_bias(operands) && (dk || dv));
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
    let waves = Schedule::waves(packing, (1, bias), sums, most);
    let (cut, numbers) = (packing.cut, 1);
    Schedule { cut, second: false, numbers, diagonals: 0, o_anew: false, fused, bias, waves }
}

/// True if dbias is dS itself, as the sweeps have it: no heads or sequences share the bias, and no softcap
/// makes ds something else.
fn unshared_bias(operands: &Operands<'_>) -> bool {
    let (scores, e) = (operands.scores, &operands.scores.extents);
    let own = |bias: BiasExtents| bias.batch == e.batch && bias.heads == e.query_heads;
    scores.softcap.is_none() && scores.bias.is_some_and(own)
}

/// (B1) δ of every row of a wave.
fn deltas(
    operands: &Operands<'_>,
    wave: Wave<'_>,
    scratch: &mut [Scratch<'_>],
    tasks: &mut [Task<'_>],
    stats: &mut RowStats<'_>,
) {
    each(scratch, stats.with_tasks(tasks, wave.first), |(task, deltas), scratch| {
        deltas.fill(0.0);
        for (r, delta) in deltas.iter_mut().enumerate().take(task.place.rows.len()) {
            *delta = self::delta(operands, wave.row(&task.place, r), &mut scratch.rows);
        }
    });
}

/// δ of a row; 0 if it sees no key at all.
fn delta(operands: &Operands<'_>, at: [usize; 3], [o, dout]: &mut [&mut [f32]; 2]) -> f32 {
    let Operands { lse, dlse, .. } = *operands;
    if blind(lse, at) {
        return 0.0;
    }
    let mut product = 0.0;
    if let (Some(stored), Some(cotangent)) = (operands.o, operands.dout) {
        stored.read_row(at, o);
        // A row with lse = sink and o = 0 has only the sink: o is a constant, whatever dout holds.
        let only_sink = number(lse, at) == operands.sink(at[1])[0];
        if !only_sink || o.iter().any(|&o| o != 0.0) {
            cotangent.read_row(at, dout);
            product = dot(o, dout);
        }
    }
    product - number(dlse, at)
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
        let level = wave.work.level;
        match scratch.cut.bf16 {
            true => level.run_tiles(Bf16QueryTile { pair, rows, scratch }).unwrap_or_default(),
            false => QueryTile { body, pair, rows, scratch }.sweep(level),
        }
        task.write(0, scratch.sums.wide, scratch.cut.stride(pair.dim), pair.rule.scale);
    });
}
