//! One row of weights with their errors, and which of them are surely active: (N40) and (N41).

use crate::bounds::Asked;
use crate::bounds::attention::row as attention;
use crate::bounds::model::{Model, floor};
use etalon_problem::{BiasExtents, Error, LazyAttention, Scores, Sequence};

/// What the weights are made of.
pub(super) struct Operands<'a> {
    pub problem: &'a LazyAttention,
    pub model: &'a Model,
    /// The same scores with the bias written out pair by pair.
    scores: Scores,
    bias: Option<Vec<f64>>,
    q: &'a [f64],
    k: &'a [f64],
    v: &'a [f64],
    tau: &'a [f64],
    lse: &'a [f64],
}

impl<'a> Operands<'a> {
    pub fn new(problem: &'a LazyAttention, asked: &Asked<'a>) -> Result<Self, Error> {
        let mut scores = problem.scores.clone();
        let mut bias = None;
        if problem.bias.is_some() {
            let e = &scores.extents;
            scores.bias = Some(BiasExtents { batch: e.batch, heads: e.query_heads });
            bias = Some(by_pair(problem, asked.input("bias")?));
        }
        Ok(Operands {
            problem,
            model: asked.model,
            scores,
            bias,
            q: asked.input("q")?,
            k: asked.input("k")?,
            v: asked.input("v")?,
            tau: asked.input("tau")?,
            lse: asked.output("lse")?,
        })
    }

    pub fn scores(&self) -> &Scores {
        &self.scores
    }

    /// The operands of the scores, as attention's bounds know them.
    pub fn of_scores(&self) -> attention::Operands<'_> {
        attention::Operands {
            scores: &self.scores,
            q: self.q,
            k: self.k,
            sinks: None,
            bias: self.bias.as_deref(),
        }
    }

    /// The value at array position `key`, as query head `head` sees it.
    pub fn value(&self, batch: usize, head: usize, key: usize) -> &'a [f64] {
        let e = &self.scores.extents;
        let width = self.problem.value_dim;
        let row = (batch * e.key_heads + head / self.scores.group()) * e.keys + key;
        &self.v[row * width..(row + 1) * width]
    }

    /// Fills `row` with query `i` of `sequence` in query head `head`, row `at` of the arrays.
    pub fn fill(&self, row: &mut Row, (sequence, head, i): (&Sequence, usize, usize), at: usize) {
        let model = self.model;
        self.of_scores().fill(&mut row.softmax, model, (sequence, head, i), self.lse[at]);
        let n = row.softmax.key.len() as f64;
        row.n = n;
        row.offset = self.tau[head] / n;
        row.pairs.clear();
        for (index, &p) in row.softmax.p.iter().enumerate() {
            let p_error = row.softmax.recomputed(model, index);
            row.pairs.push(Pair::new(model, p, p_error, row.offset));
        }
    }
}

/// The bias of every pair `[B, Hq, N, M]`, 0 where it does not reach.
fn by_pair(problem: &LazyAttention, bias: &[f64]) -> Vec<f64> {
    let e = problem.scores.extents;
    let mut pairs = vec![0.0; e.batch * e.query_heads * e.queries * e.keys];
    let Some(reach) = problem.bias else { return pairs };
    for sequence in problem.scores.sequences() {
        for head in 0..e.query_heads {
            for i in 0..sequence.queries {
                let row =
                    (sequence.batch * e.query_heads + head) * e.queries + sequence.query_start + i;
                for j in 0..sequence.keys {
                    if let Some(d) = reach.distance(&sequence, i, j) {
                        let key = sequence.key_start + j;
                        pairs[row * e.keys + key] = bias[head * reach.width + d];
                    }
                }
            }
        }
    }
    pairs
}

/// Whether a pair is active, as far as every correct kernel must agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Activity {
    Active,
    Inactive,
    /// Rounding may decide either way.
    Open,
}

/// A visible pair.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pair {
    /// P.
    pub p: f64,
    /// Its error, (N10).
    pub p_error: f64,
    /// max(P + τ/n, 0).
    pub e: f64,
    /// Its error, (N41); 0 where the pair is surely inactive.
    pub e_error: f64,
    /// P + |τ/n|: what e is a difference of.
    pub terms: f64,
    pub activity: Activity,
}

impl Pair {
    fn new(model: &Model, p: f64, p_error: f64, offset: f64) -> Self {
        let (raised, terms) = (p + offset, p + offset.abs());
        // (N40): τ/n as a quotient or by 1/n, and the sum.
        let error = p_error + 2.0 * model.u * offset.abs() + model.u * terms;
        let error = error + floor(terms, model.eta);
        let reach = model.widened(error);
        let activity = match raised {
            above if above > reach => Activity::Active,
            below if below < -reach => Activity::Inactive,
            _ => Activity::Open,
        };
        let e_error = if activity == Activity::Inactive { 0.0 } else { error };
        Pair { p, p_error, e: raised.max(0.0), e_error, terms, activity }
    }

    /// Whether some correct kernel holds it for active.
    pub fn may_be_active(&self) -> bool {
        self.activity != Activity::Inactive
    }
}

/// The visible pairs of one query. Reused from row to row.
#[derive(Default)]
pub(super) struct Row {
    pub softmax: attention::Row,
    pub n: f64,
    /// τ/n
    pub offset: f64,
    pub pairs: Vec<Pair>,
}
