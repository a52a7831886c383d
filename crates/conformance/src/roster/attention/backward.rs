//! The host's backward pass: row by row, with a partial sum of dq for each key tile.

use super::bugs;
use super::scores::{Heads, Query};
use crate::zoo::rows::{Results, Rows, add, dot, through_bf16};
use etalon_problem::Pass;

/// The gradients while they grow.
pub(crate) struct Gradients {
    dq: Rows,
    dk: Rows,
    dv: Rows,
    pub dbias: Rows,
    /// The gradient of the one number that each head has: its sink, or its τ.
    pub of_heads: Rows,
}

/// Stands in memory that nobody has written.
const UNWRITTEN: f32 = 1e30;

impl Gradients {
    pub fn new(heads: &Heads<'_>, bias: &[usize]) -> Self {
        let (scores, e) = (heads.scores, heads.scores.extents);
        let before = if heads.job.is(bugs::UNWRITTEN) { UNWRITTEN } else { 0.0 };
        Gradients {
            dq: Rows::filled(&scores.q_shape(), 0.0),
            dk: Rows::filled(&scores.k_shape(), before),
            dv: Rows::filled(&[e.batch, e.key_heads, e.keys, heads.v.shape[3]], before),
            dbias: Rows::filled(bias, 0.0),
            of_heads: Rows::filled(&[e.query_heads], 0.0),
        }
    }

    pub fn results(self, of_heads: &'static str) -> Results {
        let Gradients { dq, dk, dv, dbias, of_heads: sums } = self;
        Results::from([("dq", dq), ("dk", dk), ("dv", dv), ("dbias", dbias), (of_heads, sums)])
    }

    /// (B4) to (B6) for the pairs of a row, in the order of its keys.
    pub fn add(&mut self, heads: &Heads<'_>, query: Query, pairs: &[Pair]) {
        let (job, at) = (heads.job, query.at());
        // The mutant with constant weights is the only one that comes here for the second derivative.
        let second = job.pass == Pass::DoubleBackward;
        let [q, k] = if second { ["ddq", "ddk"] } else { ["q", "k"] }.map(|x| job.input(x));
        let (q, dout) = (q.row(at), job.input("dout").row(at));
        let last_of_group = (query.h + 1).is_multiple_of(heads.scores.group());
        let summed = !job.is(bugs::GROUP_NOT_SUMMED) || last_of_group;
        for tile in job.tiles(query.sequence.keys) {
            let place = |j| pairs.partition_point(|pair| pair.j < j);
            let lost = tile.start > 0 && tile.end == query.sequence.keys;
            let mut partial = vec![0.0; self.dq.shape[3]];
            for pair in &pairs[place(tile.start)..place(tile.end)] {
                let key = heads.key(query, pair.j);
                add(&mut partial, pair.ds, k.row(key));
                if summed {
                    add(written(self.dk.row_mut(key)), pair.ds, q);
                    let weight = pair.weight.into_iter();
                    weight.for_each(|x| add(written(self.dv.row_mut(key)), x, dout));
                }
            }
            if job.is(bugs::PARTIALS_IN_BF16) {
                partial.iter_mut().for_each(|x| *x = through_bf16(*x));
            }
            if !lost || !job.is(bugs::PARTIAL_LOST) {
                add(self.dq.row_mut(at), 1.0, &partial);
            }
        }
    }
}

/// A pair of a row: what it adds to dq, dk and dv.
pub(crate) struct Pair {
    pub j: usize,
    /// dS, scaled
    pub ds: f32,
    /// Its weight in o; without one its value is not read.
    pub weight: Option<f32>,
}

/// A row of an output, cleared if it still holds what was in memory before.
fn written(row: &mut [f32]) -> &mut [f32] {
    row.iter_mut().filter(|x| **x == UNWRITTEN).for_each(|x| *x = 0.0);
    row
}

pub(super) fn backward(heads: &Heads<'_>) -> Results {
    let mut out = Gradients::new(heads, &heads.scores.bias_shape().unwrap_or([0; 4]));
    for query in heads.queries() {
        let pairs = pairs(heads, query, &mut out);
        out.add(heads, query, &pairs);
    }
    out.results("dsinks")
}

/// (B1) to (B3), (B7) to (B9): the pairs of a row; adds to the gradients of the bias and the sinks.
fn pairs(heads: &Heads<'_>, query: Query, out: &mut Gradients) -> Vec<Pair> {
    let (job, at) = (heads.job, query.at());
    let [lse, o, dout] = ["lse", "o", "dout"].map(|name| job.input(name).row(at));
    // A row that sees nothing has o = 0 exactly, and its dout may be anything.
    let empty = o.iter().all(|x| *x == 0.0);
    let dlse = job.given("dlse").map_or(0.0, |dlse| dlse.row(at)[0]);
    let delta = if empty { 0.0 } else { dot(dout, o) } - dlse;
    let scores = heads.row(query, |j| heads.bias(query, j));
    if let Some(sinks) = job.given("sinks") {
        // All weight of a row that sees nothing is that of the sink, which may be ∞; −∞ is none.
        let sees = scores.iter().any(|score| score.seen);
        let sink = sinks.data[query.h];
        let alone = !sees && sink > f32::NEG_INFINITY;
        let pi = if alone { 1.0 } else { job.exp(sink, lse[0]) };
        let pi = if job.is(bugs::SINK_TERMS_IN_BF16) { through_bf16(pi) } else { pi };
        out.of_heads.data[query.h] -= pi * delta;
    }
    let mut pairs = Vec::new();
    for (j, score) in scores.into_iter().enumerate() {
        if !score.seen && !job.is(bugs::TIMES_ZERO) {
            continue;
        }
        let key = heads.key(query, j);
        let p = if score.seen { job.exp(score.s, lse[0]) } else { 0.0 };
        let ds = p * (dot(dout, heads.v.row(key)) - delta);
        if heads.scores.bias.is_some() {
            let shared = out.dbias.shared(at);
            out.dbias.row_mut(shared)[key[2]] += ds;
        }
        let weight = if job.is(bugs::WEIGHTS_IN_BF16) { through_bf16(p) } else { p };
        pairs.push(Pair { j, ds: heads.scale * score.slope * ds, weight: Some(weight) });
    }
    pairs
}
