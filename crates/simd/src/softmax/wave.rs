//! The sweeps that passes of first and second order share, wave by wave.

use super::block::{Body, Pair};
use super::inputs::Inputs;
use super::kernels::BiasTile;
use super::packs::{Packing, Slot};
use super::rule::{ScoreRule, pairs_of};
use super::schedule::Schedule;
use super::scratch::Scratch;
use super::stats::{RowStats, Stats};
use super::tasks::{BiasTask, KeyTask, bias_tasks};
use crate::element::{Tensor, TensorMut};
use crate::mask::Sight as PreparedMask;
use crate::parallel::for_each;
use crate::tile::STRIDE;
use crate::tiles::{Place, tiles};
use crate::{Level, Options};
use etalon_problem::{Error, Sequence};
use ndarray::{ArrayViewMut1, Ix4, s};
use std::sync::Mutex;

/// What the waves of a pass have in common.
pub struct Work<'a> {
    pub inputs: Inputs<'a>,
    pub packing: Packing<'a>,
    pub schedule: Schedule,
    pub level: Level,
    /// In the shape of the bias; of the second order alone.
    ddbias: Option<Tensor<'a, Ix4>>,
    mask: PreparedMask<'a>,
    /// Scratches that no thread uses.
    idle: Mutex<Vec<Scratch>>,
}

/// The packed operands of one slot after the other, and the statistics of their rows.
pub struct Memory {
    pub slots: Vec<Slot>,
    /// Of each slot and query head.
    pub stats: Vec<Vec<RowStats>>,
}

impl<'a> Work<'a> {
    /// Prepares a pass. The scratch of one thread is allocated for trial: on an error nothing has been
    /// written yet.
    pub fn new(
        inputs: Inputs<'a>,
        ddbias: Option<Tensor<'a, Ix4>>,
        packing: Packing<'a>,
        schedule: Schedule,
        options: &Options,
    ) -> Result<Self, Error> {
        let mask = PreparedMask::new(&inputs.scores.mask)?;
        let idle = Mutex::new(vec![Scratch::new(&schedule, &inputs)?]);
        Ok(Work { inputs, packing, schedule, level: options.level, ddbias, mask, idle })
    }

    /// Memory for the slots of any wave.
    pub fn memory(&self) -> Result<Memory, Error> {
        let heads = 0..self.inputs.scores.group();
        let one = || RowStats::zeros(&self.packing, self.schedule.second);
        let stats = |_| heads.clone().map(|_| one()).collect();
        let slots = 0..self.schedule.waves.size;
        Ok(Memory {
            slots: slots.clone().map(|_| self.packing.slot()).collect::<Result<_, _>>()?,
            stats: slots.map(stats).collect::<Result<_, _>>()?,
        })
    }
}

/// One wave of a pass: some slots, packed.
#[derive(Clone, Copy)]
pub struct Wave<'a> {
    pub work: &'a Work<'a>,
    pub slots: &'a [Slot],
    /// The number of the first slot.
    pub first: usize,
}

impl<'a> Wave<'a> {
    /// Runs `body` on every task.
    pub fn for_each<A: Send>(
        &self,
        tasks: Vec<A>,
        body: impl Fn(A, &mut Scratch) + Sync,
    ) -> Result<(), Error> {
        let Work { inputs, schedule, idle, .. } = self.work;
        for_each(idle, tasks, || Scratch::new(schedule, inputs), body)
    }

    /// The sequence of a slot.
    pub fn sequence(&self, slot: usize) -> &'a Sequence {
        &self.work.packing.sequences[slot / self.work.inputs.scores.extents.key_heads]
    }

    /// A query head of a slot.
    pub fn pair(&self, slot: usize, head: usize, stats: Stats<'a>) -> Pair<'a> {
        let Work { inputs, ddbias, mask, .. } = self.work;
        let (scores, sequence) = (inputs.scores, self.sequence(slot));
        let Slot { keys, queries } = &self.slots[slot - self.first];
        let queries = &queries[head];
        let head = slot % scores.extents.key_heads * scores.group() + head;
        Pair {
            rule: ScoreRule::new(scores, mask, inputs.bias, sequence, head),
            ddbias: ddbias.map(|ddbias| pairs_of(ddbias, sequence, head)),
            queries,
            keys,
            stats,
            dim: scores.extents.dim,
            value_dim: inputs.value_dim(),
        }
    }

    /// The query heads of a slot.
    pub fn pairs(&self, slot: usize, stats: &'a [Vec<RowStats>]) -> Vec<Pair<'a>> {
        let stats = stats[slot - self.first].iter().enumerate();
        stats.map(|(head, stats)| self.pair(slot, head, stats.view())).collect()
    }

    /// The query head of a tile of queries.
    pub fn pair_at(&self, place: &Place, stats: Stats<'a>) -> Pair<'a> {
        let scores = self.work.inputs.scores;
        self.pair(place.slot(scores), place.head % scores.group(), stats)
    }

    /// The sweep of the keys, one task per tile of keys: `tile` grows its sums by what every query
    /// head adds.
    pub fn key_sweep(
        &self,
        tasks: Vec<KeyTask<'_>>,
        stats: &[Vec<RowStats>],
        tile: impl Fn(&mut KeyTask<'_>, &[Pair<'_>], &mut Scratch) + Sync,
    ) -> Result<(), Error> {
        let (cut, inputs) = (self.work.schedule.cut, &self.work.inputs);
        let strides = [inputs.scores.extents.dim, inputs.value_dim()].map(|dim| cut.stride(dim));
        self.for_each(tasks, |mut task, scratch| {
            scratch.sums.wide.fill(0.0);
            scratch.sums.values.fill(0.0);
            let pairs = self.pairs(task.slot, stats);
            tile(&mut task, &pairs, scratch);
            let [wide, values] = task.results;
            let scale = inputs.scores.scale() as f32;
            wide.into_iter()
                .for_each(|mut to| to.write_rows(&scratch.sums.wide, strides[0], scale));
            let sums = &scratch.sums.values;
            values.into_iter().for_each(|mut to| to.write_rows(sums, strides[1], 1.0));
        })
    }

    /// The gradient of the bias, one task per tile of its rows. The wave holds every slot.
    pub fn bias_sweep(
        &self,
        result: TensorMut<'_, Ix4>,
        body: impl Body,
        stats: &[Vec<RowStats>],
    ) -> Result<(), Error> {
        let Work { inputs, packing, .. } = self.work;
        let (key_heads, group) = (inputs.scores.extents.key_heads, inputs.scores.group());
        let pair = |number: usize, head: usize| {
            let (slot, head) = (number * key_heads + head / group, head % group);
            self.pair(slot, head, stats[slot - self.first][head].view())
        };
        let tasks = bias_tasks(result, packing);
        self.for_each(tasks, |BiasTask { numbers, heads, rows, mut result }, scratch| {
            let pairs = numbers.iter().flat_map(|&number| heads.clone().map(move |h| (number, h)));
            let pairs: Vec<Pair<'_>> = pairs.map(|(number, head)| pair(number, head)).collect();
            let keys = numbers.iter().map(|&number| packing.sequences[number].keys).max();
            for cols in tiles(0..keys.unwrap_or(0), packing.cut.keys) {
                let (rows, keys) = (rows.clone(), cols.clone());
                let tile = BiasTile { body, pairs: &pairs, rows, cols: keys, scratch };
                self.work.level.run(tile);
                let mut result = result.view_mut().slice(s![.., cols]);
                result.write_rows(&scratch.sums.bias, STRIDE, 1.0);
            }
        })
    }

    /// The gradient of the sinks, added to the sum of each head: −Σ π · `change`(statistics, head,
    /// row), (B8) or (D14). A row that sees nothing but the sink has π = 1.
    pub fn sink_sums(
        &self,
        sums: &mut [f64],
        stats: &[Vec<RowStats>],
        change: impl Fn(&Stats<'_>, usize, usize) -> f64,
    ) {
        let Some(sinks) = self.work.inputs.sinks else { return };
        for slot in self.first..self.first + self.slots.len() {
            for Pair { rule, queries, stats, .. } in self.pairs(slot, stats) {
                let sink = f64::from(sinks[rule.head]);
                let mut sum = 0.0f64;
                for (i, &lse) in queries.lse.iter().take(rule.sequence.queries).enumerate() {
                    sum -= (sink - f64::from(lse)).exp() * change(&stats, rule.head, i);
                }
                sums[rule.head] += sum;
            }
        }
    }
}

/// Writes what no wave has written: the sums of the sinks, and zeros where there are no slots at all.
pub fn finish(
    (sinks, sums): (Option<ArrayViewMut1<'_, f32>>, Vec<f64>),
    bias: Option<TensorMut<'_, Ix4>>,
) {
    bias.into_iter().for_each(|mut bias| bias.fill(0.0));
    if let Some(mut sinks) = sinks {
        sinks.iter_mut().zip(sums).for_each(|(sink, sum)| *sink = sum as f32);
    }
}
