//! The sweeps of the second order: which task writes which tile.

use super::Second;
use super::kernels::{Known, Pair, Scratch};
use super::operands::{Operands, Statistics};
use super::tiles::{BiasTile, ColumnTile, GradientTile, RowTile};
use crate::aligned::Aligned;
use crate::attention::sweeps::{BiasRows, bias_tiles, write};
use crate::heads::{
    Cut, Place, Rule, all_queries, clear, key_tiles, pairs_of, query_rows, query_tiles,
};
use crate::pack::read_row;
use crate::parallel::for_each;
use crate::products::dot;
use crate::tile::STRIDE;
use crate::{Element, Options};
use etalon_problem::{Dtype, Error, Sequence};
use ndarray::{
    ArrayView3, ArrayView4, ArrayViewMut1, ArrayViewMut2, ArrayViewMut3, ArrayViewMut4, s,
};

/// The sweeps of one pass.
pub(super) struct Sweep<'a, 'b, T> {
    pub pass: &'a Second<'b, T>,
    pub sequences: &'a [Sequence],
    pub operands: &'a Operands,
    pub cut: Cut,
    pub options: &'a Options,
}

/// A tile of queries, and where its results go.
struct RowTask<'a, T> {
    place: Place,
    gq: Option<ArrayViewMut2<'a, T>>,
    gdout: Option<ArrayViewMut2<'a, T>>,
    gdlse: Option<ArrayViewMut1<'a, f32>>,
    learned: Learned<'a>,
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

impl<T: Element> Sweep<'_, '_, T> {
    fn value_dim(&self) -> usize {
        self.pass.values.as_ref().map_or(0, |values| values.v.dim().3)
    }

    /// The distance between two rows of `dim` elements in a sum.
    fn stride(&self, dim: usize) -> usize {
        dim.next_multiple_of(self.cut.cols)
    }

    fn o_anew(&self) -> bool {
        T::DTYPE != Dtype::F32
    }

    pub fn scratch(&self) -> Result<Scratch, Error> {
        Scratch::new(&self.cut, self.pass.scores.extents.dim, self.value_dim(), self.o_anew())
    }

    fn pair(&self, number: usize, head: usize) -> Pair<'_> {
        let (scores, sequence) = (self.pass.scores, &self.sequences[number]);
        let e = &scores.extents;
        Pair {
            rule: Rule::new(scores, self.pass.bias, sequence, head),
            ddbias: self.pass.direction.bias.map(|ddbias| pairs_of(ddbias, sequence, head)),
            queries: &self.operands.queries[number * e.query_heads + head],
            keys: &self.operands.keys[number * e.key_heads + head / scores.group()],
            dim: e.dim,
            value_dim: self.value_dim(),
        }
    }

    /// u, gdout and gq, one task per tile of queries; δ, u and z stay in `statistics`.
    pub fn rows(
        &self,
        gq: Option<ArrayViewMut4<'_, T>>,
        gdout: Option<ArrayViewMut4<'_, T>>,
        gdlse: Option<ArrayViewMut3<'_, f32>>,
        statistics: &mut [Statistics],
    ) -> Result<(), Error> {
        let tasks = self.row_tasks(gq, gdout, gdlse, statistics);
        for_each(
            tasks,
            || self.scratch(),
            |task, scratch| {
                let RowTask { place, gq, gdout, gdlse, mut learned } = task;
                let pair = self.pair(place.number, place.head);
                let (rows, o_anew) = (place.rows.clone(), self.o_anew());
                RowTile { pair, rows, o_anew, scratch }.run_at(self.options.level);
                for r in 0..place.rows.len() {
                    self.learn(&place, r, scratch, &mut learned);
                }
                if let Some(mut gdlse) = gdlse {
                    gdlse.iter_mut().zip(&*learned.u).for_each(|(gdlse, &u)| *gdlse = u); // (D13)
                }
                if let Some(gdout) = gdout {
                    write(gdout, &scratch.values, self.stride(self.value_dim()), 1.0);
                }
                let Some(gq) = gq else { return };
                let (known, rows) = (learned.known(place.rows.start), place.rows);
                GradientTile { pair, known, rows, scratch }.run_at(self.options.level);
                write(gq, &scratch.wide, self.stride(pair.dim), pair.rule.scale);
            },
        )
    }

    fn row_tasks<'t>(
        &self,
        gq: Option<ArrayViewMut4<'t, T>>,
        gdout: Option<ArrayViewMut4<'t, T>>,
        gdlse: Option<ArrayViewMut3<'t, f32>>,
        statistics: &'t mut [Statistics],
    ) -> Vec<RowTask<'t, T>> {
        let size = self.cut.queries;
        let cut = |mut result: ArrayViewMut4<'t, T>| {
            clear(&mut result, all_queries(self.sequences), T::ZERO);
            query_tiles(result, self.sequences, size).into_iter().map(|(_, tile)| tile)
        };
        let (mut gq, mut gdout) = (gq.map(cut), gdout.map(cut));
        let mut gdlse = gdlse.map(|mut gdlse| {
            clear(&mut gdlse, all_queries(self.sequences), 0.0);
            query_tiles(gdlse, self.sequences, size).into_iter().map(|(_, tile)| tile)
        });
        let query_heads = self.pass.scores.extents.query_heads;
        // In the order of `query_tiles`: by batch element, head, sequence and tile.
        let mut slots: Vec<(usize, &mut Statistics)> = statistics.iter_mut().enumerate().collect();
        slots.sort_by_key(|(slot, _)| {
            let (number, head) = (slot / query_heads, slot % query_heads);
            (self.sequences[number].batch, head, number)
        });
        let mut tasks = Vec::new();
        for (slot, statistics) in slots {
            let (number, head) = (slot / query_heads, slot % query_heads);
            let Statistics { delta, u, z } = statistics;
            let parts = delta.chunks_mut(size).zip(u.chunks_mut(size)).zip(z.chunks_mut(size));
            let tiles = Cut::tiles(0..self.sequences[number].queries, size);
            for (rows, ((delta, u), z)) in tiles.zip(parts) {
                tasks.push(RowTask {
                    place: Place { number, head, rows },
                    gq: gq.as_mut().and_then(Iterator::next),
                    gdout: gdout.as_mut().and_then(Iterator::next),
                    gdlse: gdlse.as_mut().and_then(Iterator::next),
                    learned: Learned { delta, u, z },
                });
            }
        }
        // With a causal mask the last queries see most keys.
        tasks.sort_by_key(|task| std::cmp::Reverse(task.place.rows.start));
        tasks
    }

    /// u, gdout, δ and z of row `r` of a tile, from the sums in the scratch; gdout stays there.
    fn learn(&self, place: &Place, r: usize, scratch: &mut Scratch, learned: &mut Learned<'_>) {
        let sequence = &self.sequences[place.number];
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
            let stride = self.stride(self.value_dim());
            let here = r * stride..r * stride + self.value_dim();
            let row = |operand: &ArrayView4<'_, T>| {
                let [batch, head, row] = at;
                let mut numbers = vec![0.0; self.value_dim()];
                read_row(operand.slice(s![batch, head, row, ..]), &mut numbers);
                numbers
            };
            let stored = if self.o_anew() { Vec::new() } else { row(&values.o) };
            let o = if self.o_anew() { &scratch.o[here.clone()] } else { &stored };
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

    /// (D14); a row that saw nothing but the sink has π = 1.
    pub fn gsink(&self, head: usize, statistics: &[Statistics]) -> f32 {
        let (sink, ddsink) = self.sink(head);
        let query_heads = self.pass.scores.extents.query_heads;
        let mut sum = 0.0f64;
        for (number, sequence) in self.sequences.iter().enumerate() {
            let slot = number * query_heads + head;
            let Statistics { delta, u, z } = &statistics[slot];
            let lse = &self.operands.queries[slot].lse;
            for i in 0..sequence.queries {
                let pi = (f64::from(sink) - f64::from(lse[i])).exp();
                let moved = f64::from(ddsink) - f64::from(u[i]);
                sum -= pi * (moved * f64::from(delta[i]) + f64::from(z[i]));
            }
        }
        sum as f32
    }

    /// gk and gv, one task per tile of keys.
    pub fn columns(
        &self,
        gk: Option<ArrayViewMut4<'_, T>>,
        gv: Option<ArrayViewMut4<'_, T>>,
        statistics: &[Statistics],
    ) -> Result<(), Error> {
        let e = &self.pass.scores.extents;
        let cut = |result| key_tiles(result, self.sequences, e.key_heads, self.cut.keys);
        let mut tasks = Vec::new();
        for (slot, (gk, gv)) in cut(gk).into_iter().zip(cut(gv)).enumerate() {
            let (number, head) = (slot / e.key_heads, slot % e.key_heads);
            let tiles = Cut::tiles(0..self.sequences[number].keys, self.cut.keys);
            for (cols, (gk, gv)) in tiles.zip(gk.into_iter().zip(gv)) {
                tasks.push((number, head, cols, gk, gv));
            }
        }
        // With a causal mask the first keys are seen by most queries.
        tasks.sort_by_key(|(_, _, cols, ..)| cols.start);
        let share = self.pass.scores.group();
        for_each(
            tasks,
            || self.scratch(),
            |(number, head, cols, gk, gv), scratch| {
                let heads = head * share..(head + 1) * share;
                let pairs: Vec<_> =
                    heads.map(|head| self.known(number, head, statistics)).collect();
                ColumnTile { pairs: &pairs, cols, scratch }.run_at(self.options.level);
                let scale = self.pass.scores.scale() as f32;
                let (wide, values) = (self.stride(e.dim), self.stride(self.value_dim()));
                gk.into_iter().for_each(|gk| write(gk, &scratch.wide, wide, scale));
                gv.into_iter().for_each(|gv| write(gv, &scratch.values, values, 1.0));
            },
        )
    }

    /// A head, and what its rows learned.
    fn known<'s>(
        &'s self,
        number: usize,
        head: usize,
        statistics: &'s [Statistics],
    ) -> (Pair<'s>, Known<'s>) {
        let Statistics { delta, u, z } =
            &statistics[number * self.pass.scores.extents.query_heads + head];
        (self.pair(number, head), Known { first: 0, delta, u, z })
    }

    /// gbias, one task per tile of its rows.
    pub fn biases(
        &self,
        mut gbias: ArrayViewMut4<'_, T>,
        statistics: &[Statistics],
    ) -> Result<(), Error> {
        gbias.fill(T::ZERO);
        let e = &self.pass.scores.extents;
        let tasks = bias_tiles(gbias, self.sequences, e.batch, e.query_heads, self.cut.queries);
        for_each(
            tasks,
            || Ok((self.scratch()?, Aligned::zeros(self.cut.queries * STRIDE, "a tile of gbias")?)),
            |BiasRows { numbers, heads, rows, mut result }, (scratch, sum)| {
                let known =
                    |number| heads.clone().map(move |head| self.known(number, head, statistics));
                let pairs: Vec<_> = numbers.iter().copied().flat_map(known).collect();
                let keys = numbers.iter().map(|&number| self.sequences[number].keys).max();
                for cols in Cut::tiles(0..keys.unwrap_or(0), self.cut.keys) {
                    let (rows, here) = (rows.clone(), cols.clone());
                    let tile = BiasTile { pairs: &pairs, rows, cols: here, sum, scratch };
                    tile.run_at(self.options.level);
                    write(result.slice_mut(s![.., cols]), sum, STRIDE, 1.0);
                }
            },
        )
    }
}
