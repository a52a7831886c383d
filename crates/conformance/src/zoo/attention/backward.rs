//! The host's backward pass: for each key tile the rows, with partials of dq by tile.

use super::forward::Forward;
use super::{Job, Rows};
use crate::zoo::host::through_bf16;
use crate::zoo::mutant::Mutant;
use etalon_problem::{Pass, Sequence};
use std::collections::BTreeMap;

/// The gradients while they grow.
struct Gradients {
    dq: Rows,
    dk: Rows,
    dv: Rows,
    dsinks: Vec<f32>,
    dbias: Rows,
}

/// What the backward pass knows of a row.
struct Row<'a> {
    dout: &'a [f32],
    lse: f32,
    delta: f32,
}

impl Job {
    pub(super) fn backward(&self, forward: &Forward) -> BTreeMap<&'static str, Rows> {
        let scores = self.scores();
        let e = scores.extents;
        let bias = scores.bias_shape().unwrap_or([0; 4]);
        let unwritten = if self.is(Mutant::Unwritten) { 1e30 } else { 0.0 };
        let mut out = Gradients {
            dq: Rows::filled(scores.q_shape(), 0.0),
            dk: Rows::filled(scores.k_shape(), unwritten),
            dv: Rows::filled([e.batch, e.key_heads, e.keys, self.value_dim], unwritten),
            dsinks: vec![0.0; e.query_heads],
            dbias: Rows::filled(bias, 0.0),
        };
        for sequence in self.sequences(Pass::Backward) {
            let group = scores.group().max(1);
            for place in 0..e.query_heads {
                // The order within a group is fixed, unless this is the mutant that races.
                let turn = if self.is(Mutant::Race) { self.run } else { 0 };
                let h = place / group * group + (place + turn) % group;
                self.head(forward, &sequence, h, &mut out);
            }
        }
        let dsinks = Rows::scalars(out.dsinks);
        BTreeMap::from([
            ("dq", out.dq),
            ("dk", out.dk),
            ("dv", out.dv),
            ("dsinks", dsinks),
            ("dbias", out.dbias),
        ])
    }

    fn head(&self, forward: &Forward, sequence: &Sequence, h: usize, out: &mut Gradients) {
        let tiles = self.tiles(sequence);
        let mut partials = vec![vec![vec![0f32; self.q.row_len()]; sequence.queries]; tiles.len()];
        let key_head = self.key_head(h);
        if self.is(Mutant::GroupNotSummed) {
            for j in sequence.key_start..sequence.key_start + sequence.keys {
                out.dk.row_mut(sequence.batch, key_head, j).fill(0.0);
                out.dv.row_mut(sequence.batch, key_head, j).fill(0.0);
            }
        }
        for step in 0..sequence.queries {
            let i = if self.style.backwards { sequence.queries - 1 - step } else { step };
            let row = self.backward_row(forward, sequence, h, i);
            self.sink(&row, h, out);
            for (tile, partial) in tiles.iter().zip(&mut partials) {
                for j in tile.clone() {
                    self.pair(&row, sequence, (h, i, j), &mut partial[i], out);
                }
            }
        }
        let kept = match self.is(Mutant::PartialLost) && tiles.len() > 1 {
            true => tiles.len() - 1,
            false => tiles.len(),
        };
        for partial in &partials[..kept] {
            for (i, row) in partial.iter().enumerate() {
                let dq = out.dq.row_mut(sequence.batch, h, sequence.query_start + i);
                for (dq, x) in dq.iter_mut().zip(row) {
                    *dq += if self.is(Mutant::PartialsInBf16) { through_bf16(*x) } else { *x };
                }
            }
        }
    }

    /// (B1).
    fn backward_row<'a>(
        &'a self,
        forward: &Forward,
        sequence: &Sequence,
        h: usize,
        i: usize,
    ) -> Row<'a> {
        let (b, i) = (sequence.batch, sequence.query_start + i);
        let heads = self.scores().extents.query_heads;
        let of = if self.is(Mutant::LseOfNextHead) { (h + 1) % heads } else { h };
        let lse = forward.lse.row(b, of, i)[0];
        let dout = self.dout.as_ref().map_or(&[][..], |dout| dout.row(b, h, i));
        let dlse = self.dlse.as_ref().filter(|_| !self.is(Mutant::DlseIgnored));
        let o = forward.o.row(b, h, i);
        // A row that sees nothing has o = 0 exactly, and its dout may be anything.
        let empty = o.iter().all(|x| *x == 0.0);
        let dot: f32 = match empty || self.is(Mutant::DeltaOmitted) {
            true => 0.0,
            false => {
                dout.iter().zip(o).map(|(a, b)| a * self.dtype.round(f64::from(*b)) as f32).sum()
            }
        };
        let delta = dot - dlse.map_or(0.0, |dlse| dlse.row(b, h, i)[0]);
        Row { dout, lse, delta }
    }

    /// (B8).
    fn sink(&self, row: &Row<'_>, h: usize, out: &mut Gradients) {
        if let Some(sinks) = self.sinks.as_ref().filter(|_| !self.is(Mutant::NoGradientOfSinks)) {
            let pi = self.exp(sinks[h] - row.lse);
            let pi = if self.is(Mutant::SinkTermsInBf16) { through_bf16(pi) } else { pi };
            out.dsinks[h] -= pi * row.delta;
        }
    }

    /// (B2) to (B7), (B9) of one pair.
    fn pair(
        &self,
        row: &Row<'_>,
        sequence: &Sequence,
        (h, i, j): (usize, usize, usize),
        partial: &mut [f32],
        out: &mut Gradients,
    ) {
        let &Sequence { batch, query_start, key_start, .. } = sequence;
        let (key_head, i_at, j_at) = (self.key_head(h), query_start + i, key_start + j);
        let score = self.score(sequence, h, i, j);
        let seen = self.visible(sequence, h, i, j, Pass::Backward) && score.s != f32::NEG_INFINITY;
        if !seen && !self.is(Mutant::TimesZero) {
            return;
        }
        let p = if seen { self.exp(score.s - row.lse) } else { 0.0 };
        let mut dp = 0.0;
        if self.value_dim > 0 {
            let v = self.v.row(batch, key_head, j_at);
            dp = row.dout.iter().zip(v).map(|(a, b)| a * b).sum();
            let weight = if self.is(Mutant::WeightsInBf16) { through_bf16(p) } else { p };
            let tail = match self.is(Mutant::ValueTailDropped) {
                true => self.value_dim / 8 * 8,
                false => self.value_dim,
            };
            let dv = written(out.dv.row_mut(batch, key_head, j_at));
            dv.iter_mut().zip(row.dout).take(tail).for_each(|(dv, x)| *dv += weight * x);
        }
        let d_score = p * (dp - row.delta);
        if self.bias.is_some() && !self.is(Mutant::NoGradientOfBias) {
            out.dbias.shared_row_mut(batch, h, i_at)[j_at] += d_score;
        }
        let scale = if self.is(Mutant::GradientsUnscaled) { 1.0 } else { self.scale() };
        let ds = scale * score.slope * d_score;
        let (q, k) = match &self.direction {
            Some([ddq, ddk]) => (ddq.row(batch, h, i_at), ddk.row(batch, key_head, j_at)),
            None => (self.q.row(batch, h, i_at), self.k.row(batch, key_head, j_at)),
        };
        partial.iter_mut().zip(k).for_each(|(dq, k)| *dq += ds * k);
        let dk = written(out.dk.row_mut(batch, key_head, j_at));
        dk.iter_mut().zip(q).for_each(|(dk, q)| *dk += ds * q);
    }
}

/// A row of an output, cleared if it still holds what was in memory before.
fn written(row: &mut [f32]) -> &mut [f32] {
    row.iter_mut().filter(|x| **x == 1e30).for_each(|x| *x = 0.0);
    row
}
