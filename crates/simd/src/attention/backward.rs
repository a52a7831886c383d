//! The backward pass: who writes which tile, and in which order sums are taken.
//!
//! * [`Mode::Separate`]: one task per tile of queries writes dq, one per tile of keys writes dk and
//!   dv. P is computed twice: 7 products per tile.
//! * [`Mode::FusedPartials`]: one task per group of key tiles writes dk, dv and a partial dq, so
//!   that P is computed once: 5 products per tile. The partials are f32 and are summed in the order
//!   of the groups. How many groups there are follows from the lengths and from the budget per
//!   head, never from the number of heads or threads.
//!
//! Every element has one writer and one order of summation: results are bitwise reproducible.

use super::{Cotangents, Gradients, GradientsMut, Inputs, Output};
use crate::attention::forward::filled;
use crate::attention::gradient::{BiasTile, KeyTile, Pair, Queries, QueryTile, Scratch};
use crate::heads::{
    Cut, Keys, Needs, Rule, cut_rows, either, key_rows, outer, query_rows, rows_of,
};
use crate::pack::Source;
use crate::parallel::{for_each, reserve, zeros};
use crate::tile::STRIDE;
use crate::{Element, Mode, Options};
use etalon_problem::{Attention, Error, Scores, Sequence};
use ndarray::{ArrayView1, ArrayView3, ArrayView4, ArrayViewMut2, ArrayViewMut4, Axis, s};
use rayon::prelude::*;
use std::ops::Range;

/// Key tiles in a group of [`Mode::FusedPartials`]: enough that writing a partial dq is little
/// beside computing it, few enough that a long sequence has work for every thread.
const GROUP: usize = 8;

/// dq, dk, dv and, where the problem has them, dsinks and dbias (B1)–(B9), from the outputs of the
/// forward pass.
pub fn backward<T: Element>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    out: &Output<T>,
    cotangents: &Cotangents<'_, T>,
    options: &Options,
) -> Result<Gradients<T>, Error> {
    inputs.check(problem)?;
    let scores = &problem.scores;
    let mut dq = filled(scores.q_shape(), T::ZERO, "dq")?;
    let mut dk = filled(scores.k_shape(), T::ZERO, "dk")?;
    let mut dv = filled(problem.v_shape(), T::ZERO, "dv")?;
    let heads = scores.extents.query_heads;
    let mut dsinks = scores.sinks.then(|| filled(heads, 0.0f32, "dsinks")).transpose()?;
    let mut dbias = scores.bias_shape().map(|shape| filled(shape, T::ZERO, "dbias")).transpose()?;
    let gradients = GradientsMut {
        dq: Some(dq.view_mut()),
        dk: Some(dk.view_mut()),
        dv: Some(dv.view_mut()),
        dsinks: dsinks.as_mut().map(|dsinks| dsinks.view_mut()),
        dbias: dbias.as_mut().map(|dbias| dbias.view_mut()),
    };
    backward_into(problem, inputs, out, cotangents, gradients, options)?;
    Ok(Gradients { dq, dk, dv, dsinks, dbias })
}

/// As [`backward`], into arrays of the caller, and only the gradients that are asked for: dv alone
/// needs no dP. On an error nothing has been written.
pub fn backward_into<T: Element>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    out: &Output<T>,
    cotangents: &Cotangents<'_, T>,
    gradients: GradientsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    inputs.check(problem)?;
    let scores = &problem.scores;
    Error::expect_shape("o", &problem.o_shape(), out.o.shape())?;
    Error::expect_shape("lse", &scores.row_shape(), out.lse.shape())?;
    Error::expect_shape("dout", &problem.o_shape(), cotangents.dout.shape())?;
    if let Some(dlse) = &cotangents.dlse {
        Error::expect_shape("dlse", &scores.row_shape(), dlse.shape())?;
    }
    if let Some(dv) = &gradients.dv {
        Error::expect_shape("dv", &problem.v_shape(), dv.shape())?;
    }
    check_gradients(scores, &gradients)?;
    Backward {
        scores,
        q: &inputs.q,
        k: &inputs.k,
        values: Some(Values { v: &inputs.v, o: out.o.view(), dout: &cotangents.dout }),
        lse: out.lse.view(),
        dlse: cotangents.dlse.as_ref(),
        sinks: inputs.sinks.as_ref(),
        bias: inputs.bias.as_ref(),
    }
    .run(gradients, options)
}

/// Fails unless the gradients of the scores' operands have their shapes.
pub(crate) fn check_gradients<T>(
    scores: &Scores,
    gradients: &GradientsMut<'_, T>,
) -> Result<(), Error> {
    if let Some(dq) = &gradients.dq {
        Error::expect_shape("dq", &scores.q_shape(), dq.shape())?;
    }
    if let Some(dk) = &gradients.dk {
        Error::expect_shape("dk", &scores.k_shape(), dk.shape())?;
    }
    if let Some(dsinks) = &gradients.dsinks {
        Error::expect_presence("dsinks", "sinks", scores.sinks, true)?;
        Error::expect_shape("dsinks", &[scores.extents.query_heads], dsinks.shape())?;
    }
    if let Some(dbias) = &gradients.dbias {
        Error::expect_presence("dbias", "bias", scores.bias.is_some(), true)?;
        if let Some(shape) = scores.bias_shape() {
            Error::expect_shape("dbias", &shape, dbias.shape())?;
        }
    }
    Ok(())
}

/// What attention has beyond attention_lse.
pub(crate) struct Values<'a, T> {
    pub v: &'a ArrayView4<'a, T>,
    pub o: ArrayView4<'a, T>,
    pub dout: &'a ArrayView4<'a, T>,
}

/// A backward pass of attention or of attention_lse, its operands checked.
pub(crate) struct Backward<'a, T> {
    pub scores: &'a Scores,
    pub q: &'a ArrayView4<'a, T>,
    pub k: &'a ArrayView4<'a, T>,
    pub values: Option<Values<'a, T>>,
    pub lse: ArrayView3<'a, f32>,
    pub dlse: Option<&'a ArrayView3<'a, f32>>,
    pub sinks: Option<&'a ArrayView1<'a, f32>>,
    pub bias: Option<&'a ArrayView4<'a, T>>,
}

/// The operands of all sequences and heads, packed.
struct Operands {
    /// Those of sequence s and query head h are at s·Hq + h.
    queries: Vec<Queries>,
    /// Those of sequence s and key head h are at s·Hk + h.
    keys: Vec<Keys>,
}

impl<T: Element> Backward<'_, T> {
    /// Writes the gradients that are asked for.
    pub fn run(&self, out: GradientsMut<'_, T>, options: &Options) -> Result<(), Error> {
        let cut = Cut::new(self.scores, options)?;
        let sequences = self.scores.sequences();
        let GradientsMut { dq, dk, dv, dsinks, dbias } = out;
        let operands = Operands {
            queries: self.pack_queries(&sequences, &cut)?,
            keys: self.pack_keys(&sequences, &cut, dq.is_some())?,
        };
        let groups = self.groups(&cut, options);
        let mut partials = match (&dq, groups) {
            (Some(_), Some(groups)) => self.partials(&sequences, &cut, groups)?,
            _ => Vec::new(),
        };
        let sweep = Sweep { pass: self, sequences: &sequences, operands: &operands, cut, options };
        // Trial allocation: on an error nothing has been written yet.
        drop(sweep.scratch()?);
        if let Some(mut dsinks) = dsinks {
            dsinks.fill(0.0);
            (0..dsinks.len()).for_each(|head| dsinks[head] = sweep.dsink(head));
        }
        let fused = groups.filter(|_| dq.is_some());
        let width = fused.unwrap_or(1);
        if dk.is_some() || dv.is_some() || fused.is_some() {
            sweep.key_sweep(dk, dv, &mut partials, width)?;
        }
        match (dq, fused) {
            (Some(dq), Some(_)) => sweep.reduce(dq, &partials)?,
            (Some(dq), None) => sweep.query_sweep(dq)?,
            (None, _) => {}
        }
        if let Some(dbias) = dbias {
            sweep.bias_sweep(dbias)?;
        }
        Ok(())
    }

    /// Key tiles in a group if P is computed once, `None` if twice. Decided by the lengths and by
    /// the budget per head alone, so that it is the same whatever stands beside.
    fn groups(&self, cut: &Cut, options: &Options) -> Option<usize> {
        let e = &self.scores.extents;
        let tiles = e.keys.div_ceil(cut.keys).max(1);
        let partial = e.queries.max(1) * e.dim.next_multiple_of(cut.cols) * size_of::<f32>();
        let affordable = (options.partials_budget / partial).max(1);
        match options.mode {
            Mode::Separate | Mode::ForwardGradient => None,
            Mode::FusedPartials => Some(GROUP.max(tiles.div_ceil(affordable))),
            // Groups so large that one head could not occupy four threads do not pay.
            Mode::Auto if affordable >= tiles.div_ceil(GROUP).min(4) => {
                Some(GROUP.max(tiles.div_ceil(affordable)))
            }
            Mode::Auto => None,
        }
    }

    fn pack_queries(&self, sequences: &[Sequence], cut: &Cut) -> Result<Vec<Queries>, Error> {
        let query_heads = self.scores.extents.query_heads;
        let heads: Vec<_> =
            sequences.iter().flat_map(|s| (0..query_heads).map(move |head| (s, head))).collect();
        heads
            .into_par_iter()
            .map(|(sequence, head)| {
                let (lse, delta, dead) = self.statistics(sequence, head, cut)?;
                let dead = dead.as_deref();
                let rows = query_rows(sequence);
                let source = |operand| Source {
                    rows: rows_of(operand, sequence.batch, head, rows.clone()),
                    dead,
                };
                let q = source(self.q);
                let mut queries = Queries {
                    q_across: q.across(cut.rows)?,
                    q_along: q.along(cut.cols)?,
                    non_finite: q.non_finite(),
                    lse,
                    delta,
                    ..Queries::default()
                };
                if let Some(values) = &self.values {
                    let dout = source(values.dout);
                    queries.dout_across = dout.across(cut.rows)?;
                    queries.dout_along = dout.along(cut.cols)?;
                    queries.non_finite = either(queries.non_finite, dout.non_finite());
                }
                Ok(queries)
            })
            .collect()
    }

    fn pack_keys(
        &self,
        sequences: &[Sequence],
        cut: &Cut,
        k_along: bool,
    ) -> Result<Vec<Keys>, Error> {
        let needs = Needs { k_along, v_across: true, v_along: false };
        let v = self.values.as_ref().map(|values| values.v);
        Keys::pack(sequences, self.scores.extents.key_heads, cut, self.k, v, needs)
    }

    /// lse and δ of a head, padded to register blocks, and which rows saw no key at all: those
    /// count for nothing, whatever stands in their operands.
    #[allow(clippy::type_complexity)]
    fn statistics(
        &self,
        sequence: &Sequence,
        head: usize,
        cut: &Cut,
    ) -> Result<(Vec<f32>, Vec<f32>, Option<Vec<bool>>), Error> {
        let padded = sequence.queries.next_multiple_of(cut.rows);
        let (mut lse, mut delta) = (reserve(padded, "lse")?, reserve(padded, "delta")?);
        let mut dead = None;
        let sink = self.sinks.map_or(f32::NEG_INFINITY, |sinks| sinks[head]);
        for (i, row) in query_rows(sequence).enumerate() {
            let at = [sequence.batch, head, row];
            if self.lse[at] == f32::NEG_INFINITY {
                dead.get_or_insert_with(|| vec![false; sequence.queries])[i] = true;
                lse.push(f32::INFINITY);
                delta.push(0.0);
                continue;
            }
            lse.push(self.lse[at]);
            let dlse = self.dlse.map_or(0.0, |dlse| dlse[at]);
            delta.push(self.dot(at, self.lse[at] == sink) - dlse); // (B1)
        }
        lse.resize(padded, f32::INFINITY);
        delta.resize(padded, 0.0);
        Ok((lse, delta, dead))
    }

    /// dout·o of a row. Where only the sink counts, o = 0 is a constant, whatever dout holds.
    fn dot(&self, at: [usize; 3], only_sink: bool) -> f32 {
        let Some(values) = &self.values else { return 0.0 };
        let [batch, head, row] = at;
        let o = values.o.slice(s![batch, head, row, ..]);
        let dout = values.dout.slice(s![batch, head, row, ..]);
        if only_sink && o.iter().all(|o| o.to_f32() == 0.0) {
            return 0.0;
        }
        // Eight sums side by side: the compiler may not reorder one.
        let mut sums = [0.0f32; 8];
        for (e, (o, dout)) in o.iter().zip(dout).enumerate() {
            sums[e % 8] += o.to_f32() * dout.to_f32();
        }
        crate::lanes::halve(sums, |a, b| a + b)
    }

    /// The partials of dq: one buffer per group of key tiles of every sequence and key head, in
    /// this order.
    fn partials(
        &self,
        sequences: &[Sequence],
        cut: &Cut,
        group: usize,
    ) -> Result<Vec<Vec<f32>>, Error> {
        let e = &self.scores.extents;
        let stride = e.dim.next_multiple_of(cut.cols);
        let mut partials = Vec::new();
        for sequence in sequences {
            let groups = sequence.keys.div_ceil(cut.keys * group);
            let padded = sequence.queries.next_multiple_of(cut.rows);
            for _ in 0..groups * e.key_heads {
                let len = self.scores.group() * padded * stride;
                partials.push(zeros(len, "partials of dq")?);
            }
        }
        Ok(partials)
    }
}

/// The sweeps of one backward pass.
struct Sweep<'a, 'b, T> {
    pass: &'a Backward<'b, T>,
    sequences: &'a [Sequence],
    operands: &'a Operands,
    cut: Cut,
    options: &'a Options,
}

impl<T: Element> Sweep<'_, '_, T> {
    /// The distance between two rows of `dim` elements in a sum.
    fn stride(&self, dim: usize) -> usize {
        dim.next_multiple_of(self.cut.cols)
    }

    fn value_dim(&self) -> usize {
        self.pass.values.as_ref().map_or(0, |values| values.v.dim().3)
    }

    fn scratch(&self) -> Result<Scratch, Error> {
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
    fn dsink(&self, head: usize) -> f32 {
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
    fn key_sweep(
        &self,
        dk: Option<ArrayViewMut4<'_, T>>,
        dv: Option<ArrayViewMut4<'_, T>>,
        partials: &mut [Vec<f32>],
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
                let mut tiles: Vec<_> = Cut::tiles(0..sequence.keys, self.cut.keys)
                    .map(|cols| (cols, dk.next().flatten(), dv.next().flatten()))
                    .collect();
                while !tiles.is_empty() {
                    let rest = tiles.split_off(group.min(tiles.len()));
                    let here = std::mem::replace(&mut tiles, rest);
                    let partial = partials.next().map(|partial| partial.as_mut_slice());
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
                    self.options.level.run(KeyTile {
                        pairs: &pairs,
                        cols,
                        dk: dk.is_some(),
                        dv: dv.is_some(),
                        partial: partial.as_deref_mut(),
                        scratch,
                    });
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

    /// A gradient with the shape of the queries, cut into tiles, as (sequence, head, tile, rows).
    #[allow(clippy::type_complexity)]
    fn query_tiles<'o>(
        &self,
        mut gradient: ArrayViewMut4<'o, T>,
    ) -> Vec<(usize, usize, Range<usize>, ArrayViewMut2<'o, T>)> {
        gradient.fill(T::ZERO);
        let mut tasks = Vec::new();
        for (batch, gradient) in outer(gradient).into_iter().enumerate() {
            let tiles: Vec<(usize, &Sequence, Range<usize>)> = self
                .of_batch(batch)
                .flat_map(|(number, sequence)| {
                    let tiles = Cut::tiles(0..sequence.queries, self.cut.queries);
                    tiles.map(move |rows| (number, sequence, rows))
                })
                .collect();
            let spans: Vec<Range<usize>> = tiles
                .iter()
                .map(|(_, s, rows)| s.query_start + rows.start..s.query_start + rows.end)
                .collect();
            for (head, gradient) in outer(gradient).into_iter().enumerate() {
                let pieces = cut_rows(gradient, &spans);
                for ((number, _, rows), piece) in tiles.iter().zip(pieces) {
                    tasks.push((*number, head, rows.clone(), piece));
                }
            }
        }
        tasks.sort_by_key(|(_, _, rows, _)| std::cmp::Reverse(rows.start));
        tasks
    }

    /// dq, one task per tile of queries.
    fn query_sweep(&self, dq: ArrayViewMut4<'_, T>) -> Result<(), Error> {
        for_each(
            self.query_tiles(dq),
            || self.scratch(),
            |(number, head, rows, dq), scratch| {
                let pair = self.pair(number, head);
                self.options.level.run(QueryTile { pair, rows, scratch });
                write(dq, &scratch.wide, self.stride(pair.dim), pair.rule.scale);
            },
        )
    }

    /// dq = σ · the sum of its partials, in the order of the groups.
    fn reduce(&self, dq: ArrayViewMut4<'_, T>, partials: &[Vec<f32>]) -> Result<(), Error> {
        let e = &self.pass.scores.extents;
        let stride = e.dim.next_multiple_of(self.cut.cols);
        let share = self.pass.scores.group();
        // The partials of every sequence and key head lie side by side: where each run begins.
        let total: usize = self.sequences.iter().filter(|s| s.keys > 0).count() * e.key_heads;
        let mut runs = Vec::with_capacity(total);
        let mut start = 0;
        let group = self.pass.groups(&self.cut, self.options).unwrap_or(1);
        for sequence in self.sequences {
            let groups = sequence.keys.div_ceil(self.cut.keys * group);
            for _ in 0..e.key_heads {
                runs.push(start..start + groups);
                start += groups;
            }
        }
        let scale = self.pass.scores.scale() as f32;
        for_each(
            self.query_tiles(dq),
            || Ok(vec![0.0f32; stride]),
            |(number, head, rows, mut dq), sum| {
                let run = &partials[runs[number * e.key_heads + head / share].clone()];
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
    fn bias_sweep(&self, mut dbias: ArrayViewMut4<'_, T>) -> Result<(), Error> {
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
                    self.options.level.run(tile);
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
