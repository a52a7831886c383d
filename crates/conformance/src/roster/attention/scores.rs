//! Scores: what the hosts of attention, attention_lse and lazy_attention share.

use super::bugs;
use crate::zoo::job::Job;
use crate::zoo::rows::{Rows, dot, off_by};
use etalon_problem::{Scores, Sequence, Sequences};

/// A query of a head of a sequence; `i` counts within the sequence.
#[derive(Clone, Copy)]
pub(crate) struct Query {
    pub sequence: Sequence,
    pub h: usize,
    pub i: usize,
}

impl Query {
    /// Its row in q, o and lse.
    pub fn at(&self) -> [usize; 3] {
        [self.sequence.batch, self.h, self.sequence.query_start + self.i]
    }
}

/// The score of a pair after softcap and bias, and the softcap's derivative.
#[derive(Clone, Copy)]
pub(crate) struct Score {
    pub s: f32,
    pub slope: f32,
    /// True if the pair counts: the mask allows it, and its score is not −∞.
    pub seen: bool,
}

/// The queries and keys of a request.
pub(crate) struct Heads<'a> {
    pub job: &'a Job,
    pub scores: &'a Scores,
    pub scale: f32,
    pub q: &'a Rows,
    pub k: &'a Rows,
    pub v: &'a Rows,
    bias: Option<&'a Rows>,
}

impl<'a> Heads<'a> {
    pub fn new(job: &'a Job, scores: &'a Scores) -> Self {
        let [q, k, v] = ["q", "k", "v"].map(|name| job.input(name));
        Heads { job, scores, scale: scores.scale() as f32, q, k, v, bias: job.given("bias") }
    }

    /// Every query, in the order of the sums over queries.
    pub fn queries(&self) -> Vec<Query> {
        let group = self.scores.group().max(1);
        let turn = if self.job.is(bugs::RACE) { self.job.run } else { 0 };
        let mut list = Vec::new();
        for mut sequence in self.scores.sequences() {
            let packed = matches!(self.scores.sequences, Sequences::Packed { .. });
            if self.job.is(bugs::PACKED_LEAK) && packed {
                let end = sequence.key_start + sequence.keys;
                sequence.keys += usize::from(end < self.scores.extents.keys);
            }
            for place in 0..self.scores.extents.query_heads {
                let h = place / group * group + (place + turn) % group;
                list.extend(self.job.order(sequence.queries).map(|i| Query { sequence, h, i }));
            }
        }
        list
    }

    fn key_head(&self, h: usize) -> usize {
        match self.job.is(bugs::HEAD_MODULO) {
            true => h % self.scores.extents.key_heads,
            false => h / self.scores.group(),
        }
    }

    /// The row of key `j` in k and v.
    pub fn key(&self, query: Query, j: usize) -> [usize; 3] {
        let Query { sequence, h, .. } = query;
        [sequence.batch, self.key_head(h), sequence.key_start + j]
    }

    /// The element of the bias that belongs to a pair; 0 without a bias.
    pub fn bias(&self, query: Query, j: usize) -> f32 {
        let Some(bias) = self.bias else { return 0.0 };
        bias.row(bias.shared(query.at()))[query.sequence.key_start + j]
    }

    fn allows(&self, Query { sequence, h, i }: Query, j: usize) -> bool {
        let shift = self.job.is(bugs::ONE_ROW_SHIFTED) && i == sequence.queries / 2 && j > 0;
        self.scores.mask.allows(&sequence, h, i, if shift { j - 1 } else { j })
    }

    /// (F1), (F2): the scores of a query and every key of its sequence.
    pub fn row(&self, query: Query, bias: impl Fn(usize) -> f32) -> Vec<Score> {
        let job = self.job;
        let q = self.q.row(query.at());
        let cap = self.scores.softcap.map(|cap| cap as f32);
        let score = |j: usize| {
            let allowed = self.allows(query, j);
            if !allowed && !job.is(bugs::MAXIMUM_OF_INVISIBLE) {
                return Score { s: f32::NEG_INFINITY, slope: 1.0, seen: false };
            }
            let (s, bias) = (self.scale * dot(q, self.k.row(self.key(query, j))), bias(j));
            let (s, slope) = match cap {
                None => (s + bias, 1.0),
                Some(cap) => {
                    let off = if job.is(bugs::TANH_OFF) { off_by(32.0) } else { 1.0 };
                    let bent = (s / cap).tanh() * off;
                    let slope =
                        if job.is(bugs::NO_SOFTCAP_DERIVATIVE) { 1.0 } else { 1.0 - bent * bent };
                    let without = job.is(bugs::BIAS_CAPPED_WITHOUT_SINKS)
                        && self.scores.softmax_scale.is_some()
                        && !self.scores.sinks;
                    match job.is(bugs::SOFTCAP_AFTER_BIAS) || without {
                        true => (cap * ((s + bias) / cap).tanh(), slope),
                        false => (cap * bent + bias, slope),
                    }
                }
            };
            Score { s, slope, seen: allowed && s != f32::NEG_INFINITY }
        };
        (0..query.sequence.keys).map(score).collect()
    }
}
