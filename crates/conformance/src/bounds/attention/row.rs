//! The scores and weights of one row with their errors: equations (N5) to (N9).

use crate::bounds::model::{LARGEST_RELATIVE, Model, dots, floor, growth};
use etalon_problem::{Scores, Sequence};

/// What the scores are made of; all arrays row-major, with the shapes of the problem.
#[derive(Clone, Copy)]
pub(in crate::bounds) struct Operands<'a> {
    pub scores: &'a Scores,
    pub q: &'a [f64],
    pub k: &'a [f64],
    pub sinks: Option<&'a [f64]>,
    pub bias: Option<&'a [f64]>,
}

/// The visible pairs of one query with the sums over them. Reused from row to row.
#[derive(Default)]
pub(in crate::bounds) struct Row {
    /// Where the key lies in its array: `key_start + j`.
    pub key: Vec<usize>,
    /// S, (F1) and (F2).
    pub score: Vec<f64>,
    /// ε: the error of S, (N5) and (N6).
    pub error: Vec<f64>,
    /// S′.
    pub slope: Vec<f64>,
    /// ε′: the error of S′, (N6).
    pub slope_error: Vec<f64>,
    /// P, (F4).
    pub p: Vec<f64>,
    /// e: the error of a streamed P before its sum normalises it, (N7).
    pub p_error: Vec<f64>,
    /// lse of the row, as the reference gives it.
    pub lse: f64,
    /// The sink's logit, −∞ without one.
    pub sink: f64,
    /// π: the weight of the sink.
    pub pi: f64,
    /// Its error, as `p_error`.
    pub pi_error: f64,
    /// m: the largest logit of the row.
    pub max: f64,
    /// A: the relative error of the sum of the weights, (N7).
    pub relative: f64,
    /// γ of a streamed sum over the row.
    pub gamma: f64,
    /// The error of the stored lse, (N9).
    pub lse_error: f64,
    /// Whether the row's errors are too large to bound anything.
    pub refused: bool,
}

impl<'a> Operands<'a> {
    /// The elements of a query.
    pub fn query(&self, sequence: &Sequence, head: usize, i: usize) -> &'a [f64] {
        let e = &self.scores.extents;
        let row = (sequence.batch * e.query_heads + head) * e.queries + sequence.query_start + i;
        &self.q[row * e.dim..(row + 1) * e.dim]
    }

    /// The elements of the key at array position `key`, as query head `head` sees it.
    pub fn key(&self, batch: usize, head: usize, key: usize) -> &'a [f64] {
        let e = &self.scores.extents;
        let row = (batch * e.key_heads + head / self.scores.group()) * e.keys + key;
        &self.k[row * e.dim..(row + 1) * e.dim]
    }

    /// Where the bias of a pair lies in its array.
    pub fn bias_index(&self, sequence: &Sequence, head: usize, i: usize, key: usize) -> usize {
        let e = &self.scores.extents;
        let (batches, heads) = self.scores.bias.map_or((1, 1), |bias| (bias.batch, bias.heads));
        let batch = if batches == 1 { 0 } else { sequence.batch };
        let head = if heads == 1 { 0 } else { head };
        ((batch * heads + head) * e.queries + sequence.query_start + i) * e.keys + key
    }

    /// Fills `row` with query `i` of `sequence` in query head `head`, whose log-sum-exp is `lse`.
    pub fn fill(
        &self,
        row: &mut Row,
        model: &Model,
        (sequence, head, i): (&Sequence, usize, usize),
        lse: f64,
    ) {
        row.clear();
        let q = self.query(sequence, head, i);
        for j in 0..sequence.keys {
            if !self.scores.mask.allows(sequence, head, i, j) {
                continue;
            }
            let key = sequence.key_start + j;
            let bias = self.bias.map(|bias| bias[self.bias_index(sequence, head, i, key)]);
            let pair = self.score(model, q, self.key(sequence.batch, head, key), bias);
            if pair.score != f64::NEG_INFINITY {
                row.push(key, pair);
            }
        }
        row.weigh(model, lse, self.sinks.map(|sinks| sinks[head]));
    }

    /// One score with its errors.
    fn score(&self, model: &Model, q: &[f64], k: &[f64], bias: Option<f64>) -> Pair {
        let (u, sigma) = (model.u, self.scores.scale());
        let (dot, absolute) = dots(q, k);
        let s = sigma * dot;
        let largest = absolute * sigma.abs().max(1.0);
        // (N5): D products and their sum, σ itself and the product with it.
        let mut error = model.gamma(q.len() + 2) * (sigma * absolute).abs();
        if largest > 0.0 {
            let operands: f64 = q.iter().chain(k).map(|x| x.abs()).sum();
            error += model.eta * (1.0 + sigma.abs()) * (q.len() as f64 + operands);
        }
        if largest > model.limit {
            error = f64::INFINITY;
        }
        let mut pair = Pair { score: s, error, slope: 1.0, slope_error: 0.0 };
        if let Some(cap) = self.scores.softcap {
            pair.cap(model, cap);
        }
        if let Some(bias) = bias {
            pair.score += bias;
            pair.error += u * (pair.score.abs() + bias.abs());
        }
        if pair.score.abs() > model.limit {
            pair.error = f64::INFINITY;
        }
        pair
    }
}

struct Pair {
    score: f64,
    error: f64,
    slope: f64,
    slope_error: f64,
}

impl Pair {
    /// S = c·tanh(s/c) and S′ = 1 − tanh² (N6).
    fn cap(&mut self, model: &Model, cap: f64) {
        let u = model.u;
        let tau = (self.score / cap).tanh();
        // c, its reciprocal and the product with it.
        let error = self.error + 3.0 * u * self.score.abs();
        self.slope = (1.0 - tau) * (1.0 + tau);
        // |ln S′| changes by at most 2/c for each unit of s.
        let steepest = (self.slope * (2.0 * error / cap).exp()).min(1.0);
        let capped = steepest * error;
        let tau_error = capped / cap + model.profile.tanh * u;
        self.score = cap * tau;
        self.error = capped + cap * model.profile.tanh * u + 2.0 * u * self.score.abs();
        self.slope_error = (2.0 * tau.abs() + tau_error) * tau_error + u * (tau * tau + self.slope);
    }
}

impl Row {
    fn clear(&mut self) {
        self.key.clear();
        for list in [
            &mut self.score,
            &mut self.error,
            &mut self.slope,
            &mut self.slope_error,
            &mut self.p,
            &mut self.p_error,
        ] {
            list.clear();
        }
    }

    fn push(&mut self, key: usize, pair: Pair) {
        self.key.push(key);
        self.score.push(pair.score);
        self.error.push(pair.error);
        self.slope.push(pair.slope);
        self.slope_error.push(pair.slope_error);
    }

    /// The weights and what follows from all of them together.
    fn weigh(&mut self, model: &Model, lse: f64, sink: Option<f64>) {
        self.lse = lse;
        self.sink = sink.unwrap_or(f64::NEG_INFINITY);
        self.max = self.score.iter().copied().fold(self.sink, f64::max);
        let terms = self.key.len() + usize::from(sink.is_some());
        let rescales = model.rescales(terms);
        let streamed =
            |error: f64, logit: f64| error + model.streamed_exp((logit - self.max).abs(), rescales);
        self.p = self.score.iter().map(|score| (score - lse).exp()).collect();
        self.p_error = (self.p.iter().zip(&self.score).zip(&self.error))
            .map(|((&p, &score), &error)| weight_error(p, streamed(error, score)))
            .collect();
        (self.pi, self.pi_error) = (0.0, 0.0);
        if self.sink > f64::NEG_INFINITY {
            self.pi = (self.sink - lse).exp();
            self.pi_error = weight_error(self.pi, streamed(0.0, self.sink));
        }
        self.gamma = model.gamma(model.chain(terms));
        self.relative = self.p_error.iter().sum::<f64>() + self.pi_error + terms as f64 * model.eta;
        self.lse_error = self.lse_error(model);
        let largest = self.relative.max(self.lse_error);
        self.refused = largest.is_nan() || largest > LARGEST_RELATIVE;
    }

    /// (1 + A) / (1 − A): what normalising an erroneous sum makes of an error (N8).
    pub fn normalised(&self) -> f64 {
        (1.0 + self.relative) / (1.0 - self.relative).max(0.0)
    }

    /// (N9): lse = m + ln l.
    fn lse_error(&self, model: &Model) -> f64 {
        let log = (self.lse - self.max).abs() + model.profile.rescale_lag;
        let sum = self.relative / (1.0 - self.relative).max(0.0) + self.gamma;
        sum + model.profile.log * model.u * log.max(1.0)
            + 3.0 * model.u * (self.max.abs() + log)
            + model.store(self.lse.abs(), etalon_problem::Precision::Wide)
    }

    /// (N10): the error of a P that is computed anew from the stored lse.
    pub fn recomputed(&self, model: &Model, index: usize) -> f64 {
        self.recomputed_with(model, index, 0.0)
    }

    /// As [`Row::recomputed`], where the weight may instead come from the streaming forward pass.
    pub fn recomputed_or_streamed(&self, model: &Model, index: usize) -> f64 {
        let rescales = model.rescales(self.key.len() + 1);
        let distance = (self.score[index] - self.max).abs();
        self.recomputed_with(model, index, model.streamed_exp(distance, rescales))
    }

    fn recomputed_with(&self, model: &Model, index: usize, more: f64) -> f64 {
        if self.refused {
            return f64::INFINITY;
        }
        let rho = self.error[index]
            + self.lse_error
            + model.exp((self.score[index] - self.lse).abs())
            + more;
        weight_error(self.p[index], rho) + model.eta
    }

    /// (N10) of the sink's weight.
    pub fn recomputed_sink(&self, model: &Model) -> f64 {
        if self.refused {
            return f64::INFINITY;
        }
        let rho = self.lse_error + model.exp((self.sink - self.lse).abs());
        weight_error(self.pi, rho) + floor(self.pi, model.eta)
    }
}

/// The error of a weight whose logarithm errs by `rho` (N2). A weight that is 0 in f64 is far
/// below every floor, unless nothing is known of its logarithm.
fn weight_error(p: f64, rho: f64) -> f64 {
    if rho == f64::INFINITY {
        f64::INFINITY
    } else if p == 0.0 {
        0.0
    } else {
        p * growth(rho)
    }
}
