//! The sweeps of the second order: which task writes which tile.

use super::kernels::{Known, Pair, Scratch};
use super::tiles::{BiasTile, ColumnTile, GradientTile, RowTile};
use super::{Course, Second, Statistics};
use crate::attention::sweeps::{BiasRows, bias_tiles, write};
use crate::heads::{
    Cut, Place, Rule, all_queries, clear, key_tiles, pairs_of, places, query_rows, query_tiles,
};
use crate::mask::Sight;
use crate::pack::read_row;
use crate::packs::{Packing, Slot};
use crate::parallel::for_each;
use crate::products::dot;
use crate::tile::STRIDE;
use crate::{Element, Options};
use etalon_problem::{Error, Scores, Sequence, Sequences};
use ndarray::{
    ArrayView3, ArrayView4, ArrayViewMut1, ArrayViewMut2, ArrayViewMut3, ArrayViewMut4, s,
};
use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Mutex;
use std::vec;

/// A tile of queries, and where its results go.
pub(super) struct RowTask<'o, T> {
    place: Place,
    gq: Option<ArrayViewMut2<'o, T>>,
    gdout: Option<ArrayViewMut2<'o, T>>,
    gdlse: Option<ArrayViewMut1<'o, f32>>,
}

/// A tile of keys of a slot, and where its results go.
pub(super) struct ColumnTask<'o, T> {
    slot: usize,
    cols: Range<usize>,
    gk: Option<ArrayViewMut2<'o, T>>,
    gv: Option<ArrayViewMut2<'o, T>>,
}

/// The tiles of queries of each wave; rows of no sequence are cleared.
pub(super) fn row_tasks<'o, T: Element>(
    scores: &Scores,
    sequences: &[Sequence],
    course: &Course,
    results: [Option<ArrayViewMut4<'o, T>>; 2],
    gdlse: Option<ArrayViewMut3<'o, f32>>,
) -> vec::IntoIter<Vec<RowTask<'o, T>>> {
    let (size, covered) = (course.cut.queries, all_queries(sequences));
    let [mut gq, mut gdout] = results.map(|result| {
        result.map(|mut result| {
            clear(&mut result, covered, T::ZERO);
            query_tiles(result, sequences, |_| size).into_iter()
        })
    });
    let mut gdlse = gdlse.map(|mut gdlse| {
        clear(&mut gdlse, covered, 0.0);
        query_tiles(gdlse, sequences, |_| size).into_iter()
    });
    let task = |place| RowTask {
        place,
        gq: gq.as_mut().and_then(Iterator::next),
        gdout: gdout.as_mut().and_then(Iterator::next),
        gdlse: gdlse.as_mut().and_then(Iterator::next),
    };
    let places = places(sequences, scores.extents.query_heads, |_| size);
    let mut tasks: Vec<RowTask<'o, T>> = places.into_iter().map(task).collect();
    // With a causal mask the last queries see most keys.
    tasks.sort_by_key(|task| Reverse(task.place.rows.start));
    course.waves.sort(tasks, |task| task.place.slot(scores)).into_iter()
}

/// The tiles of keys of each wave, if gk or gv is wanted.
pub(super) fn column_tasks<'o, T: Element>(
    scores: &Scores,
    sequences: &[Sequence],
    course: &Course,
    [gk, gv]: [Option<ArrayViewMut4<'o, T>>; 2],
) -> vec::IntoIter<Vec<ColumnTask<'o, T>>> {
    if gk.is_none() && gv.is_none() {
        return Vec::new().into_iter();
    }
    let (size, key_heads) = (course.cut.keys, scores.extents.key_heads);
    let [gk, gv] = [gk, gv].map(|result| key_tiles(result, sequences, key_heads, size));
    let mut tasks = Vec::new();
    for (slot, (gk, gv)) in gk.into_iter().zip(gv).enumerate() {
        let tiles = Cut::tiles(0..sequences[slot / key_heads].keys, size);
        let tiles = tiles.zip(gk.into_iter().zip(gv));
        tasks.extend(tiles.map(|(cols, (gk, gv))| ColumnTask { slot, cols, gk, gv }));
    }
    // With a causal mask the first keys are seen by most queries.
    tasks.sort_by_key(|task| task.cols.start);
    course.waves.sort(tasks, |task| task.slot).into_iter()
}

/// The part of [`Statistics`] that belongs to a tile of queries.
struct Learned<'a> {
    delta: &'a mut [f32],
    u: &'a mut [f32],
    z: &'a mut [f32],
}

impl Learned<'_> {
    fn known(&self, first: usize) -> Known<'_> {
        Known { first, delta: self.delta, u: self.u, z: self.z }
    }
}

impl Statistics {
    /// The parts of the tiles of `size` queries.
    fn tiles(&mut self, size: usize) -> Vec<Option<Learned<'_>>> {
        let Statistics { delta, u, z } = self;
        let parts = delta.chunks_mut(size).zip(u.chunks_mut(size)).zip(z.chunks_mut(size));
        parts.map(|((delta, u), z)| Some(Learned { delta, u, z })).collect()
    }
}

/// The sweeps of one wave.
pub(super) struct Sweep<'a, 'b, 'p, T> {
    pub pass: &'a Second<'b, T>,
    pub packing: &'a Packing<'p, T>,
    pub sight: &'a Sight<'p>,
    pub course: Course,
    pub options: &'a Options,
    /// The slots of the wave, packed.
    pub slots: &'a [Slot],
    /// The number of its first slot.
    pub first: usize,
    /// Scratches that no thread uses.
    pub idle: &'a Mutex<Vec<Scratch>>,
}

impl<T: Element> Sweep<'_, '_, '_, T> {
    /// The distance between two rows of `dim` elements in a sum.
    fn stride(&self, dim: usize) -> usize {
        dim.next_multiple_of(self.course.cut.cols)
    }

    fn for_each<A: Send>(
        &self,
        tasks: Vec<A>,
        body: impl Fn(A, &mut Scratch) + Sync,
    ) -> Result<(), Error> {
        for_each(self.idle, tasks, || self.pass.scratch(&self.course), body)
    }

    /// A query head of a slot.
    fn pair(&self, slot: usize, head: usize) -> Pair<'_> {
        let scores = self.pass.scores;
        let e = &scores.extents;
        let sequence = &self.packing.sequences[slot / e.key_heads];
        let Slot { keys, queries } = &self.slots[slot - self.first];
        let queries = &queries[head];
        let head = slot % e.key_heads * scores.group() + head;
        Pair {
            rule: Rule::new(scores, self.sight, self.pass.bias, sequence, head),
            ddbias: self.pass.direction.bias.map(|ddbias| pairs_of(ddbias, sequence, head)),
            queries,
            keys,
            dim: e.dim,
            value_dim: self.pass.value_dim(),
        }
    }

    /// A query head of a slot, and what its rows learned.
    fn known<'s>(
        &'s self,
        slot: usize,
        head: usize,
        statistics: &'s [Vec<Statistics>],
    ) -> (Pair<'s>, Known<'s>) {
        let Statistics { delta, u, z } = &statistics[slot - self.first][head];
        (self.pair(slot, head), Known { first: 0, delta, u, z })
    }

    /// u, gdout and gq, one task per tile of queries; δ, u and z stay in `statistics`.
    pub fn rows(
        &self,
        tasks: Vec<RowTask<'_, T>>,
        statistics: &mut [Vec<Statistics>],
    ) -> Result<(), Error> {
        let size = self.course.cut.queries;
        let (scores, share) = (self.pass.scores, self.pass.scores.group());
        let heads = statistics.iter_mut().flatten();
        let mut learned: Vec<_> = heads.map(|statistics| statistics.tiles(size)).collect();
        let tasks = tasks.into_iter().filter_map(|task| {
            let (slot, head) = (task.place.slot(scores) - self.first, task.place.head % share);
            let learned = learned[slot * share + head][task.place.rows.start / size].take()?;
            Some((task, learned))
        });
        self.for_each(tasks.collect(), |(task, mut learned), scratch| {
            let RowTask { place, gq, gdout, gdlse } = task;
            let pair = self.pair(place.slot(scores), place.head % share);
            let (rows, o_anew) = (place.rows.clone(), self.pass.o_anew());
            RowTile { pair, rows, o_anew, scratch }.run_at(self.options.level);
            // Rows that saw nothing learn nothing; here other heads learned before.
            let Learned { delta, u, z } = &mut learned;
            for numbers in [delta, u, z] {
                numbers.fill(0.0);
            }
            for r in 0..place.rows.len() {
                self.learn(&place, r, scratch, &mut learned);
            }
            if let Some(mut gdlse) = gdlse {
                gdlse.iter_mut().zip(&*learned.u).for_each(|(gdlse, &u)| *gdlse = u); // (D13)
            }
            if let Some(gdout) = gdout {
                write(gdout, &scratch.values, self.stride(pair.value_dim), 1.0);
            }
            let Some(gq) = gq else { return };
            let (known, rows) = (learned.known(place.rows.start), place.rows);
            GradientTile { pair, known, rows, scratch }.run_at(self.options.level);
            write(gq, &scratch.wide, self.stride(pair.dim), pair.rule.scale);
        })
    }

    /// u, gdout, δ and z of row `r` of a tile, from the sums in the scratch; gdout stays there.
    fn learn(&self, place: &Place, r: usize, scratch: &mut Scratch, learned: &mut Learned<'_>) {
        let sequence = &self.packing.sequences[place.number];
        let at = [sequence.batch, place.head, query_rows(sequence).start + place.rows.start + r];
        let lse = self.pass.lse[at];
        if lse == f32::NEG_INFINITY {
            return; // the row saw nothing, whatever its cotangents
        }
        let (sink, ddsink) = self.sink(place.head);
        let pi = (f64::from(sink) - f64::from(lse)).exp() as f32;
        let u = scratch.u[r] + if pi == 0.0 { 0.0 } else { pi * ddsink }; // (D4)
        let number = |x: Option<&ArrayView3<'_, f32>>| x.map_or(0.0, |x| x[at]);
        let (mut delta, mut z) = (-number(self.pass.dlse), -number(self.pass.cot_lse));
        if let Some(values) = &self.pass.values {
            let stride = self.stride(self.pass.value_dim());
            let here = r * stride..r * stride + self.pass.value_dim();
            let row = |operand: &ArrayView4<'_, T>| {
                let [batch, head, row] = at;
                let mut numbers = vec![0.0; self.pass.value_dim()];
                read_row(operand.slice(s![batch, head, row, ..]), &mut numbers);
                numbers
            };
            let stored = if self.pass.o_anew() { Vec::new() } else { row(&values.o) };
            let o = if self.pass.o_anew() { &scratch.o[here.clone()] } else { &stored };
            let gdout = &mut scratch.values[here];
            gdout.iter_mut().zip(o).for_each(|(gdout, o)| *gdout -= u * o); // (D5)
            // Where only the sink counts, both are constants, whatever dout and cot_o hold.
            let constant = lse == sink && o.iter().chain(&*gdout).all(|&x| x == 0.0);
            if !constant {
                if let Some(dout) = values.dout.map(row) {
                    delta += dot(&dout, o); // (B1)
                    z += dot(&dout, gdout); // (D6)
                }
                if let Some(cot_o) = values.cot_o.map(row) {
                    z += dot(&cot_o, o);
                }
            }
        }
        (learned.delta[r], learned.u[r], learned.z[r]) = (delta, u, z);
    }

    /// The sink of a head, and how it moves.
    fn sink(&self, head: usize) -> (f32, f32) {
        let sink = self.pass.sinks.map_or(f32::NEG_INFINITY, |sinks| sinks[head]);
        (sink, self.pass.direction.sinks.map_or(0.0, |ddsinks| ddsinks[head]))
    }

    /// (D14), added to the sum of each head; a row that saw nothing but the sink has π = 1.
    pub fn gsinks(&self, sums: &mut [f64], statistics: &[Vec<Statistics>]) {
        for slot in self.first..self.first + self.slots.len() {
            for head in 0..self.pass.scores.group() {
                let (Pair { rule, queries, .. }, Known { delta, u, z, .. }) =
                    self.known(slot, head, statistics);
                let (sink, ddsink) = self.sink(rule.head);
                let mut sum = 0.0f64;
                for i in 0..rule.sequence.queries {
                    let pi = (f64::from(sink) - f64::from(queries.lse[i])).exp();
                    let moved = f64::from(ddsink) - f64::from(u[i]);
                    sum -= pi * (moved * f64::from(delta[i]) + f64::from(z[i]));
                }
                sums[rule.head] += sum;
            }
        }
    }

    /// gk and gv, one task per tile of keys.
    pub fn columns(
        &self,
        tasks: Vec<ColumnTask<'_, T>>,
        statistics: &[Vec<Statistics>],
    ) -> Result<(), Error> {
        let e = &self.pass.scores.extents;
        self.for_each(tasks, |ColumnTask { slot, cols, gk, gv }, scratch| {
            let heads = 0..self.pass.scores.group();
            let pairs: Vec<_> = heads.map(|head| self.known(slot, head, statistics)).collect();
            ColumnTile { pairs: &pairs, cols, scratch }.run_at(self.options.level);
            let scale = self.pass.scores.scale() as f32;
            let (wide, values) = (self.stride(e.dim), self.stride(self.pass.value_dim()));
            gk.into_iter().for_each(|gk| write(gk, &scratch.wide, wide, scale));
            gv.into_iter().for_each(|gv| write(gv, &scratch.values, values, 1.0));
        })
    }

    /// gbias, one task per tile of its rows. The wave holds every slot.
    pub fn biases(
        &self,
        mut gbias: ArrayViewMut4<'_, T>,
        statistics: &[Vec<Statistics>],
    ) -> Result<(), Error> {
        if self.pass.scores.sequences != Sequences::Dense {
            gbias.fill(T::ZERO); // what belongs to no sequence
        }
        let e = &self.pass.scores.extents;
        let (cut, sequences) = (self.course.cut, self.packing.sequences);
        let share = self.pass.scores.group();
        let tasks = bias_tiles(gbias, sequences, e.batch, e.query_heads, cut.queries);
        self.for_each(tasks, |BiasRows { numbers, heads, rows, mut result }, scratch| {
            let known = |number: usize, head: usize| {
                self.known(number * e.key_heads + head / share, head % share, statistics)
            };
            let pairs: Vec<_> = numbers
                .iter()
                .flat_map(|&number| heads.clone().map(move |head| known(number, head)))
                .collect();
            let keys = numbers.iter().map(|&number| sequences[number].keys).max();
            for cols in Cut::tiles(0..keys.unwrap_or(0), cut.keys) {
                let tile =
                    BiasTile { pairs: &pairs, rows: rows.clone(), cols: cols.clone(), scratch };
                tile.run_at(self.options.level);
                write(result.slice_mut(s![.., cols]), &scratch.bias, STRIDE, 1.0);
            }
        })
    }
}
