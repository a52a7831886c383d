//! The double backward pass and the tangents: who writes which tile.
//!
//! A tangent is one sweep over the scores, a double backward pass three (the numbers of products are
//! those of one pair of tiles, every cotangent but `cot_o` and `cot_lse` given):
//!
//! * rows: u and gdout (D4), (D5), which are the tangents of lse and o (J1), (J2): 5 products;
//! * rows again, from memory still warm: gq (D10): 7 products;
//! * columns: gk and gv (D11), (D12): 8 products.
//!
//! Between them pass four numbers per row, lse, δ, u and z, so that memory is O(N). Where o is
//! stored in less than f32, its rounding would be multiplied by u and dout: it is computed anew, for
//! one product more.
//!
//! Every element has one writer and one order of summation: results are bitwise reproducible.

use super::kernels::QueryTile;
use super::key_sweep::KeySweep;
use super::operands::{Operands, blind, number, sink_weight};
use super::packs::{Operand, Packing};
use super::pair::Pair;
use super::schedule::{SECOND_BF16, SECOND_ORDER, Schedule};
use super::scratch::Scratch;
use super::second::{Second, Tangent};
use super::stats::{RowStats, Stats};
use super::tasks::Task;
use super::wave::{Memory, Places, Wave, Work, each};
use crate::plan::Plan;
use crate::products::dot;
use crate::{Options, Workspace};
use etalon_problem::{Dtype, Error, Pass};

/// Writes what has a place; with places for `gdout` and `gdlse` alone, the tangents of o and lse.
pub fn run(
    workspace: &Workspace,
    operands: &Operands<'_>,
    places: Places<'_>,
    options: &Options,
) -> Result<(), Error> {
    let Places { queries: [gq, _], keys: [gk, gv], bias: gbias, .. } = &places;
    let tangent = [gq, gk, gv, gbias].into_iter().all(Option::is_none);
    let packing = packing(operands, tangent, options)?;
    let schedule = schedule(operands, &packing, gbias.is_some());
    Work { operands, packing, schedule, level: options.level }.run(
        workspace,
        places,
        |wave, Memory { stats, scratch, .. }, queries, keys| {
            row_sweep(wave, scratch, queries, stats);
            let keys = keys.iter_mut().map(|task| (task, Default::default()));
            let body = Second { capped: true };
            KeySweep { wave, body, stats, sums: &[] }.run(scratch, keys);
        },
        |stats, head, i| {
            let change = f64::from(operands.sink(head)[1]) - f64::from(stats.u[i]);
            change * f64::from(stats.delta[i]) + f64::from(stats.z[i]) // (D14)
        },
        Second { capped: false },
    )
}

/// The plan of [`run`], all results being wanted, or those of a tangent alone.
pub fn plan(operands: &Operands<'_>, tangent: bool, options: &Options) -> Result<Plan, Error> {
    let packing = packing(operands, tangent, options)?;
    let schedule = schedule(operands, &packing, operands.bias.is_some() && !tangent);
    let plan = schedule.needs(&packing, operands).plan(&packing);
    Ok(Plan { products: products(operands, tangent, schedule.bias), ..plan })
}

/// The operands of a pass of the second order, of attention or of lazy attention. `tangent`: the first
/// sweep alone, which sums q, k and their directions only across, and v along.
pub fn packing<'s>(
    operands: &Operands<'s>,
    tangent: bool,
    options: &Options,
) -> Result<Packing<'s>, Error> {
    let Operands { scores, sequences, q, k, v, dout, lse, ddq, ddk, ddv, cot_o, .. } = *operands;
    let (keys, queries) = if tangent {
        let [k, ddk, q, ddq] = [Some(k), ddk, Some(q), ddq].map(Operand::across);
        let [v, ddv] = [v, ddv].map(Operand::along);
        ([k, v, ddk, ddv], [q, Operand::NONE, ddq, Operand::NONE])
    } else {
        let (keys, queries) = ([Some(k), v, ddk, ddv], [Some(q), dout, ddq, cot_o]);
        (keys.map(Operand::both), queries.map(Operand::both))
    };
    let cut = operands.cut(Pass::DoubleBackward, options, [SECOND_ORDER, SECOND_BF16])?;
    Ok(Packing { scores, sequences, cut, keys, queries, lse })
}

fn schedule(operands: &Operands<'_>, packing: &Packing<'_>, bias: bool) -> Schedule {
    let waves = Schedule::waves(packing, (3, bias), 0, usize::MAX);
    let (cut, o_anew) = (packing.cut, o_anew(operands));
    let (numbers, diagonals) = (3, 0);
    Schedule { cut, second: true, numbers, diagonals, o_anew, fused: false, bias, waves }
}

/// True if o is computed anew: its rounding would be multiplied by u and dout.
fn o_anew(operands: &Operands<'_>) -> bool {
    operands.o.is_some_and(|o| o.dtype() != Dtype::F32)
}

/// The products of a pair of tiles, over all sweeps.
fn products(operands: &Operands<'_>, tangent: bool, gbias: bool) -> usize {
    let Operands { v, dout, ddq, ddk, ddv, cot_o, .. } = *operands;
    let [v, dout, ddq, ddk, ddv, cot_o] =
        [v, dout, ddq, ddk, ddv, cot_o].map(|operand| usize::from(operand.is_some()));
    // S and U; then u and gdout, o perhaps anew; then dP and T, which the other sweeps need.
    let scores = 1 + ddq + ddk;
    let first = scores + v + ddv + if o_anew(operands) { v } else { 0 };
    let weights = scores + dout * (v + ddv) + cot_o * v;
    let rows = weights + 1 + ddk;
    let columns = weights + 1 + ddq + dout + cot_o;
    match tangent {
        true => first,
        false => first + rows + columns + if gbias { weights } else { 0 },
    }
}

/// u, gdout and gq, one task per tile of queries; δ, u and z stay in `stats`.
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
        QueryTile { body: Tangent, pair, rows: rows.clone(), scratch }.sweep(level);
        part.fill(0.0);
        for r in 0..rows.len() {
            let numbers = row_stats(wave.work, wave.row(&task.place, r), r, scratch);
            Stats::write(part, cut.queries, r, numbers);
        }
        let stats = Stats::of(part, rows.start, cut.queries);
        task.write_numbers(stats.u); // (D13)
        task.write(1, scratch.sums.values, cut.stride(pair.value_dim), 1.0);
        if task.results[0].is_some() {
            let (body, pair) = (Second { capped: true }, Pair { stats, ..pair });
            QueryTile { body, pair, rows, scratch }.sweep(level);
            task.write(0, scratch.sums.wide, cut.stride(pair.dim), pair.rule.scale);
        }
    });
}

/// δ, u and z of row `r` of a tile, from the sums in the scratch; gdout stays there. A row that sees
/// no key keeps zeros.
fn row_stats(work: &Work<'_>, at: [usize; 3], r: usize, scratch: &mut Scratch<'_>) -> [f32; 3] {
    let Operands { dlse, cot_lse, .. } = *work.operands;
    if blind(work.operands.lse, at) {
        return [0.0; 3];
    }
    let lse = number(work.operands.lse, at);
    let [sink, ddsink] = work.operands.sink(at[1]);
    let pi = sink_weight(sink, lse) as f32;
    let u = scratch.sums.numbers[r] + if pi == 0.0 { 0.0 } else { pi * ddsink }; // (D4)
    let (mut delta, mut z) = (-number(dlse, at), -number(cot_lse, at));
    if let Some(o) = work.operands.o {
        let value_dim = work.operands.value_dim();
        let stride = work.schedule.cut.stride(value_dim);
        let here = r * stride..r * stride + value_dim;
        let [stored, row] = &mut scratch.rows;
        let o = if work.schedule.o_anew {
            &scratch.sums.o[here.clone()]
        } else {
            o.read_row(at, stored);
            stored
        };
        let gdout = &mut scratch.sums.values[here];
        gdout.iter_mut().zip(o).for_each(|(gdout, o)| *gdout -= u * o); // (D5)
        // A row with lse = sink, o = 0 and gdout = 0 has only the sink: both are constants, whatever dout
        // and cot_o hold.
        let constant = lse == sink && o.iter().chain(&*gdout).all(|&x| x == 0.0);
        if !constant {
            if let Some(dout) = work.operands.dout {
                dout.read_row(at, row);
                delta += dot(row, o); // (B1)
                z += dot(row, gdout); // (D6)
            }
            if let Some(cot_o) = work.operands.cot_o {
                cot_o.read_row(at, row);
                z += dot(row, o);
            }
        }
    }
    [delta, u, z]
}
