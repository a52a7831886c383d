//! The sweeps of the backward pass: which task writes which tile.

use super::backward::{Backward, Operands, Partials};
use super::gradient::{BiasTile, KeyTile, Pair, QueryTile, Scratch};
use crate::heads::{Cut, Place, Rule, cut_rows, key_rows, outer, query_tiles};
use crate::parallel::{for_each, zeros};
use crate::tile::STRIDE;
use crate::{Element, Options};
use etalon_problem::{Error, Sequence};
use ndarray::{ArrayViewMut2, ArrayViewMut4, Axis, s};
use std::ops::Range;

/// The sweeps of one backward pass.
pub(super) struct Sweep<'a, 'b, T> {
    pub pass: &'a Backward<'b, T>,
    pub sequences: &'a [Sequence],
    pub operands: &'a Operands,
    pub cut: Cut,
    pub options: &'a Options,
}

impl<T: Element> Sweep<'_, '_, T> {
    /// The distance between two rows of `dim` elements in a sum.
    fn stride(&self, dim: usize) -> usize {
        dim.next_multiple_of(self.cut.cols)
    }

    fn value_dim(&self) -> usize {
        self.pass.values.as_ref().map_or(0, |values| values.v.dim().3)
    }

    pub fn scratch(&self) -> Result<Scratch, Error> {
        Scratch::new(&self.cut, self.pass.scores.extents.dim, self.value_dim())
    }

    fn pair(&self, number: usize, head: usize) -> Pair<'_> {
        let scores = self.pass.scores;
        let e = &scores.extents;
        Pair {
            rule: Rule::new(scores, self.pass.bias, &self.sequences[number], head),
            queries: &self.operands.queries[number * e.query_heads + head],
            keys: &self.operands.keys[number * e.key_heads + head / scores.group()],
            dim: e.dim,
            value_dim: self.value_dim(),
        }
    }

    /// The sequences of a batch element, with their numbers.
    fn of_batch(&self, batch: usize) -> impl Iterator<Item = (usize, &Sequence)> {
        self.sequences.iter().enumerate().filter(move |(_, sequence)| sequence.batch == batch)
    }

    /// (B8) dsink = −Σ π δ; a row that saw nothing but the sink has π = 1.
    pub fn dsink(&self, head: usize) -> f32 {
        let sink = self.pass.sinks.map_or(f32::NEG_INFINITY, |sinks| sinks[head]);
        let query_heads = self.pass.scores.extents.query_heads;
        let mut sum = 0.0f64;
        for (number, sequence) in self.sequences.iter().enumerate() {
            let queries = &self.operands.queries[number * query_heads + head];
            for i in 0..sequence.queries {
                let pi = (f64::from(sink) - f64::from(queries.lse[i])).exp();
                sum -= pi * f64::from(queries.delta[i]);
            }
        }
        sum as f32
    }

    /// dk, dv and the partials of dq, one task per group of key tiles.
    pub fn key_sweep(
        &self,
        dk: Option<ArrayViewMut4<'_, T>>,
        dv: Option<ArrayViewMut4<'_, T>>,
        partials: &mut [Partials],
        group: usize,
    ) -> Result<(), Error> {
        let e = &self.pass.scores.extents;
        let mut dk = self.key_tiles(dk);
        let mut dv = self.key_tiles(dv);
        let mut partials = partials.iter_mut();
        let mut tasks = Vec::new();
        for (number, sequence) in self.sequences.iter().enumerate() {
            for head in 0..e.key_heads {
                let slot = number * e.key_heads + head;
                let (mut dk, mut dv) = (dk[slot].drain(..), dv[slot].drain(..));
                let mut groups = partials.next().into_iter().flatten();
                let mut tiles: Vec<_> = Cut::tiles(0..sequence.keys, self.cut.keys)
                    .map(|cols| (cols, dk.next().flatten(), dv.next().flatten()))
                    .collect();
                while !tiles.is_empty() {
                    let rest = tiles.split_off(group.min(tiles.len()));
                    let here = std::mem::replace(&mut tiles, rest);
                    let partial = groups.next().map(|partial| partial.as_mut_slice());
                    tasks.push((number, head, here, partial));
                }
            }
        }
        // With a causal mask the first keys are seen by most queries.
        tasks.sort_by_key(|(_, _, tiles, _)| tiles.first().map_or(0, |(cols, ..)| cols.start));
        let share = self.pass.scores.group();
        for_each(
            tasks,
            || self.scratch(),
            |(number, head, tiles, mut partial), scratch| {
                let heads = head * share..(head + 1) * share;
                let pairs: Vec<Pair<'_>> = heads.map(|head| self.pair(number, head)).collect();
                let scale = self.pass.scores.scale() as f32;
                for (cols, dk, dv) in tiles {
                    let tile = KeyTile {
                        pairs: &pairs,
                        cols,
                        dk: dk.is_some(),
                        dv: dv.is_some(),
                        partial: partial.as_deref_mut(),
                        scratch,
                    };
                    tile.run_at(self.options.level);
                    dk.into_iter()
                        .for_each(|dk| write(dk, &scratch.wide, self.stride(e.dim), scale));
                    let stride = self.stride(self.value_dim());
                    dv.into_iter().for_each(|dv| write(dv, &scratch.values, stride, 1.0));
                }
            },
        )
    }

    /// A gradient with the shape of the keys, cut into tiles: those of sequence s and key head h
    /// are at s·Hk + h.
    fn key_tiles<'o>(
        &self,
        gradient: Option<ArrayViewMut4<'o, T>>,
    ) -> Vec<Vec<Option<ArrayViewMut2<'o, T>>>> {
        let key_heads = self.pass.scores.extents.key_heads;
        let tiles = |sequence: &Sequence| sequence.keys.div_ceil(self.cut.keys);
        let mut cut: Vec<Vec<Option<ArrayViewMut2<'o, T>>>> = self
            .sequences
            .iter()
            .flat_map(|sequence| {
                (0..key_heads).map(move |_| (0..tiles(sequence)).map(|_| None).collect())
            })
            .collect();
        let Some(mut gradient) = gradient else { return cut };
        gradient.fill(T::ZERO);
        for (batch, gradient) in outer(gradient).into_iter().enumerate() {
            let here: Vec<_> = self.of_batch(batch).collect();
            let spans: Vec<Range<usize>> = here
                .iter()
                .flat_map(|(_, sequence)| Cut::tiles(key_rows(sequence), self.cut.keys))
                .collect();
            for (head, gradient) in outer(gradient).into_iter().enumerate() {
                let mut pieces = cut_rows(gradient, &spans).into_iter();
                for &(number, sequence) in &here {
                    let tiles = pieces.by_ref().take(tiles(sequence));
                    cut[number * key_heads + head] = tiles.map(Some).collect();
                }
            }
        }
        cut
    }

    /// A gradient with the shape of the queries, cleared and cut into tiles, the last tiles first.
    fn query_tiles<'o>(
        &self,
        mut gradient: ArrayViewMut4<'o, T>,
    ) -> Vec<(Place, ArrayViewMut2<'o, T>)> {
        gradient.fill(T::ZERO);
        let mut tiles = query_tiles(gradient, self.sequences, self.cut.queries);
        tiles.sort_by_key(|(place, _)| std::cmp::Reverse(place.rows.start));
        tiles
    }

    /// dq, one task per tile of queries.
    pub fn query_sweep(&self, dq: ArrayViewMut4<'_, T>) -> Result<(), Error> {
        for_each(
            self.query_tiles(dq),
            || self.scratch(),
            |(Place { number, head, rows }, dq), scratch| {
                let pair = self.pair(number, head);
                QueryTile { pair, rows, scratch }.run_at(self.options.level);
                write(dq, &scratch.wide, self.stride(pair.dim), pair.rule.scale);
            },
        )
    }

    /// dq = σ · the sum of its partials, in the order of the groups.
    pub fn reduce(&self, dq: ArrayViewMut4<'_, T>, partials: &[Partials]) -> Result<(), Error> {
        let e = &self.pass.scores.extents;
        let stride = e.dim.next_multiple_of(self.cut.cols);
        let share = self.pass.scores.group();
        let scale = self.pass.scores.scale() as f32;
        for_each(
            self.query_tiles(dq),
            || Ok(vec![0.0f32; stride]),
            |(Place { number, head, rows }, mut dq), sum| {
                let run = &partials[number * e.key_heads + head / share];
                let padded = self.sequences[number].queries.next_multiple_of(self.cut.rows);
                for (i, mut dq) in rows.zip(dq.outer_iter_mut()) {
                    let at = ((head % share) * padded + i) * stride;
                    sum.fill(0.0);
                    for partial in run {
                        sum.iter_mut().zip(&partial[at..at + stride]).for_each(|(s, p)| *s += p);
                    }
                    dq.iter_mut().zip(&*sum).for_each(|(dq, s)| *dq = T::from_f32(scale * s));
                }
            },
        )
    }

    /// dbias, one task per tile of its rows.
    pub fn bias_sweep(&self, mut dbias: ArrayViewMut4<'_, T>) -> Result<(), Error> {
        dbias.fill(T::ZERO);
        let e = &self.pass.scores.extents;
        let batches = dbias.len_of(Axis(0));
        let mut tasks = Vec::new();
        for (batch, dbias) in outer(dbias).into_iter().enumerate() {
            // One bias for a whole batch sums over its sequences, which all begin at row 0;
            // otherwise every sequence has rows of its own.
            let shared: Vec<Vec<usize>> = match batches == 1 && e.batch > 1 {
                true => vec![(0..self.sequences.len()).collect()],
                false => self.of_batch(batch).map(|(number, _)| vec![number]).collect(),
            };
            let tiles: Vec<(Vec<usize>, Range<usize>)> = shared
                .into_iter()
                .flat_map(|numbers| {
                    let rows = numbers.iter().map(|&n| self.sequences[n].queries).max();
                    Cut::tiles(0..rows.unwrap_or(0), self.cut.queries)
                        .map(move |rows| (numbers.clone(), rows))
                })
                .collect();
            let spans: Vec<Range<usize>> = tiles
                .iter()
                .map(|(numbers, rows)| {
                    let start = self.sequences[numbers[0]].query_start;
                    start + rows.start..start + rows.end
                })
                .collect();
            let heads = dbias.len_of(Axis(0));
            for (head, dbias) in outer(dbias).into_iter().enumerate() {
                let heads = if heads == 1 { 0..e.query_heads } else { head..head + 1 };
                for ((numbers, rows), piece) in tiles.iter().zip(cut_rows(dbias, &spans)) {
                    let key_start = self.sequences[numbers[0]].key_start;
                    let (_, piece) = piece.split_at(Axis(1), key_start);
                    tasks.push((numbers.clone(), heads.clone(), rows.clone(), piece));
                }
            }
        }
        for_each(
            tasks,
            || Ok((self.scratch()?, zeros(self.cut.queries * STRIDE, "a tile of dbias")?)),
            |(numbers, heads, rows, mut dbias), (scratch, sum)| {
                let pairs: Vec<Pair<'_>> = numbers
                    .iter()
                    .flat_map(|&number| heads.clone().map(move |head| self.pair(number, head)))
                    .collect();
                let keys = numbers.iter().map(|&number| self.sequences[number].keys).max();
                for cols in Cut::tiles(0..keys.unwrap_or(0), self.cut.keys) {
                    let (rows, cols_here) = (rows.clone(), cols.clone());
                    let tile = BiasTile { pairs: &pairs, rows, cols: cols_here, sum, scratch };
                    tile.run_at(self.options.level);
                    write(dbias.slice_mut(s![.., cols]), sum, STRIDE, 1.0);
                }
            },
        )
    }
}

/// `out` = factor · the rows of a sum, which lie `stride` apart.
fn write<T: Element>(mut out: ArrayViewMut2<'_, T>, sum: &[f32], stride: usize, factor: f32) {
    for (mut out, sum) in out.outer_iter_mut().zip(sum.chunks(stride.max(1))) {
        out.iter_mut().zip(sum).for_each(|(out, &x)| *out = T::from_f32(factor * x));
    }
}
