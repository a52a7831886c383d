//! The host's backward pass: row by row, with partials of dq by tile.

use super::forward::Forward;
use super::{Job, Rows};
use crate::zoo::mutant::Mutant;
use etalon_problem::Sequence;
use std::collections::BTreeMap;

/// The gradients while they grow.
struct Gradients {
    dq: Rows,
    dk: Rows,
    dv: Rows,
    dbias: Vec<f32>,
    dtau: Vec<f32>,
}

/// A visible pair of a row.
struct Pair {
    j: usize,
    tile: usize,
    p: f32,
    e: f32,
    active: bool,
    /// g, of an active pair.
    g: f32,
}

impl Job<'_> {
    pub(super) fn backward(&self, forward: &Forward) -> BTreeMap<&'static str, Rows> {
        let scores = &self.problem.scores;
        let e = scores.extents;
        let width = self.problem.bias.map_or(0, |reach| reach.width);
        let mut out = Gradients {
            dq: Rows::filled(scores.q_shape(), 0.0),
            dk: Rows::filled(scores.k_shape(), 0.0),
            dv: Rows::filled(self.problem.v_shape(), 0.0),
            dbias: vec![0.0; e.query_heads * width],
            dtau: vec![0.0; e.query_heads],
        };
        for sequence in scores.sequences() {
            for h in 0..e.query_heads {
                for step in 0..sequence.queries {
                    let i = if self.style.backwards { sequence.queries - 1 - step } else { step };
                    self.row(forward, &sequence, (h, i), &mut out);
                }
            }
        }
        let Gradients { dq, dk, dv, dbias, dtau } = out;
        let (dbias, dtau) = (Rows::scalars(dbias), Rows::scalars(dtau));
        BTreeMap::from([("dq", dq), ("dk", dk), ("dv", dv), ("dbias", dbias), ("dtau", dtau)])
    }

    fn pairs(&self, forward: &Forward, sequence: &Sequence, (h, i): (usize, usize)) -> Vec<Pair> {
        let &Sequence { batch, query_start, key_start, .. } = sequence;
        let lse = forward.lse.row(batch, h, query_start + i)[0];
        let mut pairs = Vec::new();
        for (tile, keys) in self.tiles(sequence).into_iter().enumerate() {
            for j in keys {
                let s = self.score(sequence, h, i, j);
                if self.visible(sequence, h, i, j) && s != f32::NEG_INFINITY {
                    let p = self.exp(s - lse);
                    pairs.push(Pair { j, tile, p, e: 0.0, active: false, g: 0.0 });
                }
            }
        }
        let count = pairs.len();
        let of = if self.is(Mutant::DoutOfFirstHead) { 0 } else { h };
        let dout = self.dout.row(batch, of, query_start + i);
        for pair in &mut pairs {
            let offset = self.offset(h, i, pair.j, count, sequence.keys);
            (pair.e, pair.active) = self.raised(pair.p, offset);
            if pair.active || self.is(Mutant::DtauThroughTheKink) {
                let v = self.v.row(batch, h / self.group(), key_start + pair.j);
                pair.g = dout.iter().zip(v).map(|(a, b)| a * b).sum();
            }
        }
        pairs
    }

    /// (E8) of a row, or of a tile of it.
    fn delta(&self, forward: &Forward, pairs: &[Pair], tile: usize, o_at: [usize; 3]) -> f32 {
        let [b, h, i] = o_at;
        if self.is(Mutant::DeltaOfOutput) {
            let product = self.dout.row(b, h, i).iter().zip(forward.o.row(b, h, i));
            return product.map(|(a, b)| a * b).sum();
        }
        let own = |pair: &&Pair| !self.is(Mutant::DeltaPerTile) || pair.tile == tile;
        pairs.iter().filter(own).filter(|pair| pair.active).map(|pair| pair.p * pair.g).sum()
    }

    fn row(
        &self,
        forward: &Forward,
        sequence: &Sequence,
        (h, i): (usize, usize),
        out: &mut Gradients,
    ) {
        let &Sequence { batch, query_start, .. } = sequence;
        let pairs = self.pairs(forward, sequence, (h, i));
        let at = [batch, h, query_start + i];
        let dlse = self.dlse.as_ref().map_or(0.0, |dlse| dlse.row(batch, h, at[2])[0]);
        let counted = |pair: &&Pair| pair.active || self.is(Mutant::DtauThroughTheKink);
        let sum: f32 = pairs.iter().filter(counted).map(|pair| pair.g).sum();
        if !pairs.is_empty() {
            let count = if self.is(Mutant::DtauWithoutCount) { 1 } else { pairs.len() };
            out.dtau[h] += sum / count as f32; // (E14)
        }
        let tiles = self.tiles(sequence).len();
        let mut partials = vec![vec![0f32; self.q.row_len()]; tiles];
        for (tile, partial) in partials.iter_mut().enumerate() {
            let delta = self.delta(forward, &pairs, tile, at);
            let idle = !pairs.iter().any(|pair| pair.tile == tile && pair.active);
            if self.is(Mutant::InactiveTileSkipped) && idle {
                continue;
            }
            for pair in pairs.iter().filter(|pair| pair.tile == tile) {
                self.pair(pair, dlse - delta, sequence, (h, i), partial, out);
            }
        }
        let dq = out.dq.row_mut(batch, h, at[2]);
        for partial in &partials {
            dq.iter_mut().zip(partial).for_each(|(dq, x)| *dq += x);
        }
    }

    /// (E9) to (E13) of one pair; `rest` is dlse − Δ.
    fn pair(
        &self,
        pair: &Pair,
        rest: f32,
        sequence: &Sequence,
        (h, i): (usize, usize),
        partial: &mut [f32],
        out: &mut Gradients,
    ) {
        let &Sequence { batch, query_start, key_start, .. } = sequence;
        let (key_head, i_at, j_at) = (h / self.group(), query_start + i, key_start + pair.j);
        let g = if pair.active { pair.g } else { 0.0 };
        let dropped = self.is(Mutant::InactivePairSkipped) && !pair.active;
        let d_score = if dropped { 0.0 } else { pair.p * (g + rest) };
        let ds = self.problem.scores.scale() as f32 * d_score;
        let (q, k) = (self.q.row(batch, h, i_at), self.k.row(batch, key_head, j_at));
        partial.iter_mut().zip(k).for_each(|(dq, k)| *dq += ds * k);
        let dk = out.dk.row_mut(batch, key_head, j_at);
        dk.iter_mut().zip(q).for_each(|(dk, q)| *dk += ds * q);
        if pair.active {
            let dout = self.dout.row(batch, h, i_at);
            let dv = out.dv.row_mut(batch, key_head, j_at);
            dv.iter_mut().zip(dout).for_each(|(dv, x)| *dv += pair.e * x);
        }
        let Some(reach) = self.problem.bias else { return };
        let mut d = self.distance(sequence, i, pair.j);
        if self.is(Mutant::FarGradientInLastColumn) {
            d = d.or(Some(reach.width - 1));
        }
        let skipped = self.is(Mutant::DbiasOfActiveAlone) && !pair.active;
        if let (Some(d), false) = (d, skipped) {
            let scaled = if self.is(Mutant::DbiasScaled) { ds } else { d_score };
            out.dbias[h * reach.width + d] += scaled; // (E13)
        }
    }
}
