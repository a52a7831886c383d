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

use super::forward::filled;
use super::gradient::Queries;
use super::second::check_moving;
use super::sweeps::Sweep;
use super::{Cotangents, Gradients, GradientsMut, Inputs, Output};
use crate::aligned::Aligned;
use crate::heads::{Cut, KeyOperands, Keys, Needs, either, query_rows, rows_of};
use crate::pack::{Source, read_row};
use crate::parallel::reserve;
use crate::products::dot;
use crate::{Element, Mode, Options};
use etalon_problem::{Attention, Error, Scores, Sequence};
use ndarray::{ArrayView1, ArrayView3, ArrayView4, s};
use rayon::prelude::*;

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
    out.check(problem)?;
    cotangents.check(problem)?;
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
    let shapes = [
        gradients.dq.as_ref().map(|x| x.shape()),
        gradients.dk.as_ref().map(|x| x.shape()),
        gradients.dsinks.as_ref().map(|x| x.shape()),
        gradients.dbias.as_ref().map(|x| x.shape()),
    ];
    check_moving(scores, ["dq", "dk", "dsinks", "dbias"], shapes)
}

/// What attention has beyond attention_lse.
pub(crate) struct Values<'a, T> {
    pub v: &'a ArrayView4<'a, T>,
    pub o: ArrayView4<'a, T>,
    pub dout: &'a ArrayView4<'a, T>,
}

/// The partials of dq of one sequence and key head: one for each group of its key tiles.
pub(super) type Partials = Vec<Aligned>;

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

/// What the rows of one head bring from the forward pass.
struct Statistics {
    /// lse, padded to register blocks.
    lse: Vec<f32>,
    /// δ, padded to register blocks.
    delta: Vec<f32>,
    /// Which rows saw no key at all, if any did.
    dead: Option<Vec<bool>>,
}

/// The operands of all sequences and heads, packed.
pub(super) struct Operands {
    /// Those of sequence s and query head h are at s·Hq + h.
    pub queries: Vec<Queries>,
    /// Those of sequence s and key head h are at s·Hk + h.
    pub keys: Vec<Keys>,
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
                let Statistics { lse, delta, dead } = self.statistics(sequence, head, cut)?;
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
        let operands = KeyOperands { k: self.k, v, needs };
        operands.pack(sequences, self.scores.extents.key_heads, cut)
    }

    /// lse and δ of a head, padded to register blocks, and which rows saw no key at all: those
    /// count for nothing, whatever stands in their operands.
    fn statistics(&self, sequence: &Sequence, head: usize, cut: &Cut) -> Result<Statistics, Error> {
        let padded = sequence.queries.next_multiple_of(cut.rows);
        let (mut lse, mut delta) = (reserve(padded, "lse")?, reserve(padded, "delta")?);
        let mut dead = None;
        let sink = self.sinks.map_or(f32::NEG_INFINITY, |sinks| sinks[head]);
        let width = self.values.as_ref().map_or(0, |values| values.v.dim().3);
        let mut rows = [vec![0.0; width], vec![0.0; width]];
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
            delta.push(self.dot(at, self.lse[at] == sink, &mut rows) - dlse); // (B1)
        }
        lse.resize(padded, f32::INFINITY);
        delta.resize(padded, 0.0);
        Ok(Statistics { lse, delta, dead })
    }

    /// dout·o of a row. Where only the sink counts, o = 0 is a constant, whatever dout holds.
    fn dot(&self, at: [usize; 3], only_sink: bool, [o, dout]: &mut [Vec<f32>; 2]) -> f32 {
        let Some(values) = &self.values else { return 0.0 };
        let [batch, head, row] = at;
        read_row(values.o.slice(s![batch, head, row, ..]), o);
        if only_sink && o.iter().all(|&o| o == 0.0) {
            return 0.0;
        }
        read_row(values.dout.slice(s![batch, head, row, ..]), dout);
        dot(o, dout)
    }

    /// The partials of dq of every sequence and key head, in this order.
    fn partials(
        &self,
        sequences: &[Sequence],
        cut: &Cut,
        group: usize,
    ) -> Result<Vec<Partials>, Error> {
        let e = &self.scores.extents;
        let stride = e.dim.next_multiple_of(cut.cols);
        let mut partials = Vec::new();
        for sequence in sequences {
            let groups = sequence.keys.div_ceil(cut.keys * group);
            let len = self.scores.group() * sequence.queries.next_multiple_of(cut.rows) * stride;
            for _ in 0..e.key_heads {
                let buffers = (0..groups).map(|_| Aligned::zeros(len, "partials of dq"));
                partials.push(buffers.collect::<Result<Partials, Error>>()?);
            }
        }
        Ok(partials)
    }
}
