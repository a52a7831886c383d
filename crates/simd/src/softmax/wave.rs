//! The sweeps that passes of first and second order share, wave by wave.

use super::bf16_gradient::{Bf16BiasTile, turn};
use super::block::Body;
use super::diagonals::{Diagonals, write_totals};
use super::engine::run;
use super::kernels::BiasTile;
use super::needs::Needs;
use super::operands::{Operands, sink_weight};
use super::ordered_sum::OrderedSum;
use super::packs::{Keys, Packing, Queries, Slots};
use super::pair::Pair;
use super::rule::{Prepared, ScoreRule};
use super::schedule::Schedule;
use super::scratch::{Scratch, Sums};
use super::stats::{RowStats, Stats};
use super::tasks::{BiasTask, Task, Tasks, bias_tasks};
use crate::element::TensorMut;
use crate::mask::QueryHead;
use crate::parallel::share;
use crate::tile::STRIDE;
use crate::tiles::{Place, tiles};
use crate::workspace::{Lists, Parts};
use crate::{Level, Workspace};
use bumpalo::boxed::Box;
use etalon_problem::{Error, Sequence};
use ndarray::{ArrayViewMut1, ArrayViewMut2, ArrayViewMut3, Ix4, s};
use std::ops::Range;

/// A pass of first or second order, without its sweeps.
pub struct Work<'a> {
    pub operands: &'a Operands<'a>,
    pub packing: Packing<'a>,
    pub schedule: Schedule,
    pub level: Level,
}

/// Places of the results of a pass.
pub struct Places<'o> {
    /// dq, or gq and gdout.
    pub queries: [Option<TensorMut<'o, Ix4>>; 2],
    /// gdlse.
    pub numbers: Option<ArrayViewMut3<'o, f32>>,
    /// dk and dv, or gk and gv.
    pub keys: [Option<TensorMut<'o, Ix4>>; 2],
    /// dbias, where the sweep of the keys writes it.
    pub with_keys: Option<TensorMut<'o, Ix4>>,
    pub sinks: Option<ArrayViewMut1<'o, f32>>,
    /// dbias or gbias, where it has a sweep of its own.
    pub bias: Option<TensorMut<'o, Ix4>>,
    /// dbias `[Hq, W]` of lazy attention.
    pub distances: Option<ArrayViewMut2<'o, f32>>,
    /// dτ.
    pub tau: Option<ArrayViewMut1<'o, f32>>,
}

/// The memory of the sweeps, which one wave after the other uses.
pub struct Memory<'m, 'o> {
    pub stats: RowStats<'m>,
    pub diagonals: Diagonals<'m>,
    /// The sums of dq of the tiles of queries, in the order of slots, heads and rows.
    pub sums: Box<'m, [OrderedSum<'m, 'o>]>,
    /// Of every thread.
    pub scratch: Box<'m, [Scratch<'m>]>,
}

impl<'m> Memory<'m, '_> {
    fn new(
        parts: &mut Parts<'m>,
        lists: &'m Lists,
        needs: &Needs,
        Work { packing, schedule, operands, .. }: &Work<'_>,
    ) -> Result<Self, Error> {
        let Needs { together, workers, .. } = *needs;
        let stats = parts.room(needs.stats * together);
        let stats = RowStats::new(stats, together, packing, schedule.numbers);
        let diagonals = parts.room(needs.diagonals * together);
        let diagonals = Diagonals::new(diagonals, together, packing, schedule.diagonals);
        let count = if schedule.fused { packing.sums(together) } else { 0 };
        let sums = (0..count).map(|_| OrderedSum::new(parts.room(OrderedSum::len(packing))));
        let sums = lists.collect(count, sums, "the sums of dq")?;
        let scratch = (0..workers).map(|_| Scratch::new(parts, schedule, operands));
        let scratch = lists.collect(workers, scratch, "the scratch of threads")?;
        Ok(Memory { stats, diagonals, sums, scratch })
    }
}

impl Work<'_> {
    /// Packs one wave after the other and runs its `sweeps` over the tasks of queries and of keys; then
    /// sums the gradients of the sinks, as [`Wave::sink_sums`] does with `change`, and that of the bias
    /// over the weights of `bias`.
    pub fn run<'o>(
        &self,
        workspace: &Workspace,
        places: Places<'o>,
        sweeps: impl Fn(Wave<'_>, &mut Memory<'_, 'o>, &mut [Task<'o>], &mut [Task<'o>]),
        change: impl Fn(&Stats<'_>, usize, usize) -> f64,
        bias: impl Body,
    ) -> Result<(), Error> {
        let Work { packing, operands, schedule: Schedule { waves, .. }, .. } = self;
        let needs = self.schedule.needs(packing, operands);
        let lists = workspace.lists(needs.lists(packing), "lists of tiles")?;
        let mut memory = workspace.room(needs.all(), "the memory of a pass")?;
        let parts = &mut Parts::of(&mut memory);
        let mut slots = packing.room(parts, &lists, needs.together)?;
        let mut memory = Memory::new(parts, &lists, &needs, self)?;
        let totals = lists.repeat(needs.totals, 0.0, "sums over sequences")?;
        let prepared = Prepared::new(operands, &lists)?;
        let Places { queries, numbers, keys, with_keys, sinks, bias: mut result, .. } = places;
        let alone = self.schedule.diagonals > 0;
        let mut keys = Tasks::of_keys(&lists, packing, *waves, keys, with_keys, alone)?;
        let mut queries = Tasks::of_queries(&lists, packing, *waves, queries, numbers, 0.0)?;
        for numbers in waves.iter() {
            let wave = Wave::pack(self, &prepared, &mut slots, &numbers);
            sweeps(wave, &mut memory, queries.wave(&numbers), keys.wave(&numbers));
            if sinks.is_some() {
                wave.sink_sums(totals, &memory.stats, &change);
            }
            if alone {
                memory.diagonals.add_to(totals, packing, &numbers);
            }
            if let Some(result) = result.take() {
                wave.bias_sweep(&mut memory.scratch, result, bias, &memory.stats);
            }
        }
        // Without any slot the result is 0.
        result.into_iter().for_each(|mut result| result.fill(0.0));
        if alone {
            write_totals(totals, self.schedule.diagonals, places.distances, places.tau);
        }
        let sinks = sinks.into_iter().flatten();
        sinks.zip(totals).for_each(|(sink, sum)| *sink = *sum as f32);
        Ok(())
    }
}

/// One wave of a pass: some slots, packed.
#[derive(Clone, Copy)]
pub struct Wave<'a> {
    pub work: &'a Work<'a>,
    prepared: &'a Prepared<'a>,
    pub keys: &'a [Keys<'a>],
    pub queries: &'a [Queries<'a>],
    /// The number of the first slot.
    pub first: usize,
}

impl<'a> Wave<'a> {
    fn pack(
        work: &'a Work<'a>,
        prepared: &'a Prepared<'a>,
        slots: &'a mut Slots<'_>,
        numbers: &Range<usize>,
    ) -> Self {
        work.packing.pack(slots, numbers);
        let Slots { keys, queries } = slots;
        let heads = numbers.len() * work.operands.scores.group();
        let (keys, queries) = (&keys[..numbers.len()], &queries[..heads]);
        Wave { work, prepared, keys, queries, first: numbers.start }
    }

    /// The sequence of a slot.
    pub fn sequence(&self, slot: usize) -> &'a Sequence {
        &self.work.packing.sequences[slot / self.work.operands.scores.extents.key_heads]
    }

    /// Row `r` of a tile of queries in the tensors: batch element, head and row.
    pub fn row(&self, place: &Place, r: usize) -> [usize; 3] {
        let sequence = &self.work.packing.sequences[place.number];
        [sequence.batch, place.head, sequence.query_start + place.rows.start + r]
    }

    /// The number of a query head of a slot, counted from the first of the wave.
    pub fn head(&self, slot: usize, member: usize) -> usize {
        (slot - self.first) * self.work.operands.scores.group() + member
    }

    /// A query head of a slot.
    pub fn pair(&self, slot: usize, member: usize, stats: Stats<'a>) -> Pair<'a> {
        let Operands { scores, bias, ddbias, ddtau, .. } = *self.work.operands;
        let head = slot % scores.extents.key_heads * scores.group() + member;
        let of = QueryHead { sequence: self.sequence(slot), head };
        Pair {
            rule: ScoreRule::new(scores, self.prepared, bias, of),
            ddbias: self.prepared.direction(ddbias, of),
            ddtau: ddtau.map_or(0.0, |ddtau| ddtau[head]),
            queries: &self.queries[self.head(slot, member)],
            keys: &self.keys[slot - self.first],
            stats,
            dim: scores.extents.dim,
            value_dim: self.work.operands.value_dim(),
        }
    }

    /// The sweep of the keys, one task per tile of keys: `tile` grows its sums by what every query
    /// head adds, and the numbers that go with the task.
    pub fn key_sweep<'k, 'r: 'k>(
        &self,
        scratch: &mut [Scratch<'_>],
        tasks: impl Iterator<Item = (&'k mut Task<'r>, &'k mut [f32])> + Send,
        tile: impl Fn(&mut Task<'_>, &mut [f32], &mut Scratch<'_>) + Sync,
    ) {
        let (cut, operands) = (self.work.schedule.cut, self.work.operands);
        let strides =
            [operands.scores.extents.dim, operands.value_dim()].map(|dim| cut.stride(dim));
        let scale = operands.scores.scale() as f32;
        each(scratch, tasks, |(task, numbers), scratch| {
            scratch.sums.wide.fill(0.0);
            scratch.sums.values.fill(0.0);
            tile(task, numbers, scratch);
            let Sums { wide, values, turned, .. } = &mut scratch.sums;
            let sums = [(&**wide, scale), (&**values, 1.0)];
            for (number, ((sum, factor), stride)) in sums.into_iter().zip(strides).enumerate() {
                if cut.bf16 {
                    turn(sum, stride, task.place.rows.len(), turned);
                }
                let sum = if cut.bf16 { &**turned } else { sum };
                task.write(number, sum, stride, factor);
            }
        });
    }

    /// The gradient of the bias, one task per tile of its rows. The wave holds every slot.
    fn bias_sweep<B: Body>(
        &self,
        scratch: &mut [Scratch<'_>],
        result: TensorMut<'_, Ix4>,
        body: B,
        stats: &RowStats<'_>,
    ) {
        let Work { operands, packing, .. } = self.work;
        let (key_heads, group) = (operands.scores.extents.key_heads, operands.scores.group());
        let whole = packing.whole();
        let tasks = bias_tasks(result, packing, &whole);
        each(scratch, tasks, |BiasTask { numbers, heads, rows, result }, scratch| {
            let start = packing.sequences[numbers.start].key_start;
            let mut result = result.outer(0);
            let pairs = numbers.clone().flat_map(|number| {
                let heads = heads.clone();
                heads.map(move |head| (number * key_heads + head / group, head % group))
            });
            let pairs = pairs.map(|(slot, member)| {
                self.pair(slot, member, stats.tile(self.head(slot, member), rows.start))
            });
            let keys = numbers.clone().map(|number| packing.sequences[number].keys).max();
            for cols in tiles(0..keys.unwrap_or(0), packing.cut.keys) {
                let (rows, pairs) = (rows.clone(), pairs.clone());
                let (keys, level) = (cols.clone(), self.work.level);
                if packing.cut.bf16 && B::HAS_TILES {
                    let tile = Bf16BiasTile { pairs, rows, cols: keys, scratch };
                    level.run_tiles(tile).unwrap_or_default();
                } else {
                    let tile = BiasTile { body, pairs, rows, cols: keys, scratch };
                    run(level, packing.cut.bf16, tile);
                }
                let here = start + cols.start..start + cols.end;
                result.view_mut().slice(s![.., here]).write_rows(scratch.sums.bias, STRIDE, 1.0);
            }
        });
    }

    /// The gradient of the sinks, added to the sum of each head: −Σ π · `change`(statistics, head,
    /// row), (B8) or (D14), with the row counted from the first of the statistics. A row that sees
    /// nothing but the sink has π = 1.
    fn sink_sums(
        &self,
        sums: &mut [f64],
        stats: &RowStats<'_>,
        change: impl Fn(&Stats<'_>, usize, usize) -> f64,
    ) {
        let Work { operands, packing, .. } = self.work;
        let Some(sinks) = operands.sinks else { return };
        for slot in self.first..self.first + self.keys.len() {
            for member in 0..operands.scores.group() {
                let Pair { rule, queries, .. } = self.pair(slot, member, Stats::NONE);
                let QueryHead { sequence, head } = rule.of;
                let sink = sinks[head];
                let mut sum = 0.0f64;
                for rows in tiles(0..sequence.queries, packing.cut.queries) {
                    let stats = stats.tile(self.head(slot, member), rows.start);
                    for (i, &lse) in queries.lse[rows].iter().enumerate() {
                        sum -= sink_weight(sink, lse) * change(&stats, head, i);
                    }
                }
                sums[head] += sum;
            }
        }
    }
}

/// Runs `body` on every task, on as many threads as have a scratch.
pub fn each<S: Send, T: Send>(
    scratch: &mut [S],
    tasks: impl Iterator<Item = T> + Send,
    body: impl Fn(T, &mut S) + Sync,
) {
    share(scratch.iter_mut(), |scratch| scratch, tasks, |task, scratch| body(task, scratch));
}
