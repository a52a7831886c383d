//! The sweeps of the backward pass: which task writes which tile.

use super::backward::{Backward, Operands, Partials};
use super::gradient::{BiasTile, KeyTile, Pair, QueryTile, Scratch};
use crate::aligned::Aligned;
use crate::heads::{Cut, Place, Rule, all_queries, clear, cut_rows, key_tiles, outer, query_tiles};
use crate::parallel::for_each;
use crate::tile::STRIDE;
use crate::{Element, Options};
use etalon_problem::{Error, Sequence};
use ndarray::{ArrayViewMut1, ArrayViewMut2, ArrayViewMut4, Axis, s};
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
        let cut_keys = |gradient| key_tiles(gradient, self.sequences, e.key_heads, self.cut.keys);
        let (mut dk, mut dv) = (cut_keys(dk), cut_keys(dv));
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
                    let partial = groups.next().map(|partial| &mut partial[..]);
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

    /// A gradient with the shape of the queries, cut into tiles, the last tiles first; rows of no
    /// sequence are cleared.
    fn query_tiles<'o>(
        &self,
        mut gradient: ArrayViewMut4<'o, T>,
    ) -> Vec<(Place, ArrayViewMut2<'o, T>)> {
        clear(&mut gradient, all_queries(self.sequences), T::ZERO);
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
                for (i, dq) in rows.zip(dq.outer_iter_mut()) {
                    let at = ((head % share) * padded + i) * stride;
                    sum.fill(0.0);
                    for partial in run {
                        sum.iter_mut().zip(&partial[at..at + stride]).for_each(|(s, p)| *s += p);
                    }
                    write_row(dq, sum, scale);
                }
            },
        )
    }

    /// dbias, one task per tile of its rows.
    pub fn bias_sweep(&self, mut dbias: ArrayViewMut4<'_, T>) -> Result<(), Error> {
        dbias.fill(T::ZERO);
        let e = &self.pass.scores.extents;
        let tasks = bias_tiles(dbias, self.sequences, e.batch, e.query_heads, self.cut.queries);
        for_each(
            tasks,
            || Ok((self.scratch()?, Aligned::zeros(self.cut.queries * STRIDE, "a tile of dbias")?)),
            |BiasRows { numbers, heads, rows, mut result }, (scratch, sum)| {
                let pairs: Vec<Pair<'_>> = numbers
                    .iter()
                    .flat_map(|&number| heads.clone().map(move |head| self.pair(number, head)))
                    .collect();
                let keys = numbers.iter().map(|&number| self.sequences[number].keys).max();
                for cols in Cut::tiles(0..keys.unwrap_or(0), self.cut.keys) {
                    let (rows, cols_here) = (rows.clone(), cols.clone());
                    let tile = BiasTile { pairs: &pairs, rows, cols: cols_here, sum, scratch };
                    tile.run_at(self.options.level);
                    write(result.slice_mut(s![.., cols]), sum, STRIDE, 1.0);
                }
            },
        )
    }
}

/// Rows of a result in the shape of the bias, and what is summed into them.
pub(super) struct BiasRows<'o, A> {
    /// The sequences, by their numbers.
    pub numbers: Vec<usize>,
    /// The query heads.
    pub heads: Range<usize>,
    /// The rows, within the sequences.
    pub rows: Range<usize>,
    /// Where the sum goes: these rows, from the first key of the sequences on.
    pub result: ArrayViewMut2<'o, A>,
}

/// A result in the shape of the bias in tiles of rows.
pub(super) fn bias_tiles<'o, A>(
    result: ArrayViewMut4<'o, A>,
    sequences: &[Sequence],
    batch: usize,
    query_heads: usize,
    size: usize,
) -> Vec<BiasRows<'o, A>> {
    let one_for_all = result.len_of(Axis(0)) == 1 && batch > 1;
    let mut tasks = Vec::new();
    for (batch, result) in outer(result).into_iter().enumerate() {
        // One bias for a whole batch sums over its sequences, which all begin at row 0; otherwise
        // every sequence has rows of its own.
        let here = (0..sequences.len()).filter(|&number| sequences[number].batch == batch);
        let shared: Vec<Vec<usize>> = match one_for_all {
            true => vec![(0..sequences.len()).collect()],
            false => here.map(|number| vec![number]).collect(),
        };
        let tiles: Vec<(Vec<usize>, Range<usize>)> = shared
            .into_iter()
            .flat_map(|numbers| {
                let rows = numbers.iter().map(|&number| sequences[number].queries).max();
                Cut::tiles(0..rows.unwrap_or(0), size).map(move |rows| (numbers.clone(), rows))
            })
            .collect();
        let spans: Vec<Range<usize>> = tiles
            .iter()
            .map(|(numbers, rows)| {
                let start = sequences[numbers[0]].query_start;
                start + rows.start..start + rows.end
            })
            .collect();
        let heads = result.len_of(Axis(0));
        for (head, result) in outer(result).into_iter().enumerate() {
            let heads = if heads == 1 { 0..query_heads } else { head..head + 1 };
            for ((numbers, rows), piece) in tiles.iter().zip(cut_rows(result, &spans)) {
                let (_, result) = piece.split_at(Axis(1), sequences[numbers[0]].key_start);
                let (numbers, heads, rows) = (numbers.clone(), heads.clone(), rows.clone());
                tasks.push(BiasRows { numbers, heads, rows, result });
            }
        }
    }
    tasks
}

/// `out` = factor · the rows of a sum, which lie `stride` apart.
pub(super) fn write<T: Element>(
    mut out: ArrayViewMut2<'_, T>,
    sum: &[f32],
    stride: usize,
    factor: f32,
) {
    for (out, sum) in out.outer_iter_mut().zip(sum.chunks(stride.max(1))) {
        write_row(out, sum, factor);
    }
}

/// `out` = factor · the first elements of `sum`.
pub(super) fn write_row<T: Element>(mut out: ArrayViewMut1<'_, T>, sum: &[f32], factor: f32) {
    match out.as_slice_mut() {
        Some(out) => out.iter_mut().zip(sum).for_each(|(out, &x)| *out = T::from_f32(factor * x)),
        None => out.iter_mut().zip(sum).for_each(|(out, &x)| *out = T::from_f32(factor * x)),
    }
}
