//! The scores and weights of one row with their errors: equations (N5) to (N10).

use super::inputs::{Inputs, Rows};
use super::model::{LARGEST_RELATIVE, Model, floor, growth};
use super::sum::{Sum, dots};
use etalon_problem::{DistanceBias, Error, Precision, Scores, Sequence};

/// A query of one head in one sequence.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub sequence: &'a Sequence,
    pub head: usize,
    pub i: usize,
}

impl Place<'_> {
    /// Its row of a tensor that lies as q does.
    pub fn row<'a>(&self, x: Rows<'a>) -> &'a [f64] {
        x.row(self.sequence.batch, self.head, self.sequence.query_start + self.i)
    }
}

/// What the scores are raised by.
#[derive(Clone, Copy)]
pub(super) enum Bias<'a> {
    None,
    /// A number for each pair, `[B or 1, Hq or 1, N, M]`.
    ByPair(Rows<'a>, [usize; 2]),
    /// A number for each distance within reach, `[Hq, W]`, and 0 beyond.
    ByDistance(DistanceBias, Rows<'a>),
}

impl<'a> Bias<'a> {
    fn at(&self, place: Place<'_>, j: usize) -> Option<f64> {
        let Place { sequence, head, i } = place;
        match *self {
            Bias::None => None,
            Bias::ByPair(rows, [batches, heads]) => {
                let batch = if batches == 1 { 0 } else { sequence.batch };
                let head = if heads == 1 { 0 } else { head };
                Some(rows.row(batch, head, sequence.query_start + i)[sequence.key_start + j])
            }
            Bias::ByDistance(reach, bias) => {
                let distance = reach.distance(sequence, i, j);
                Some(distance.map_or(0.0, |d| bias.data[head * reach.width + d]))
            }
        }
    }
}

/// What the scores are made of, and the reference's lse.
#[derive(Clone, Copy)]
pub(super) struct ScoreOperands<'a> {
    pub scores: &'a Scores,
    pub model: &'a Model,
    q: Rows<'a>,
    k: Rows<'a>,
    sinks: Option<Rows<'a>>,
    bias: Bias<'a>,
    lse: Rows<'a>,
}

/// A visible pair.
#[derive(Clone, Copy)]
pub(super) struct Pair {
    /// Where the key lies in its array: `key_start + j`.
    pub key: usize,
    /// S, (F1) and (F2).
    pub score: f64,
    /// ε: the error of S, (N5) and (N6).
    pub error: f64,
    /// S′.
    pub slope: f64,
    /// ε′: the error of S′, (N6).
    pub slope_error: f64,
    /// P, (F4).
    pub p: f64,
    /// e: the error of a streamed P before its sum normalises it, (N7).
    pub p_error: f64,
}

/// The visible pairs of one query with the sums over them. Reused from row to row.
#[derive(Default)]
pub(super) struct Row {
    pub pairs: Vec<Pair>,
    /// lse of the row, as the reference gives it.
    lse: f64,
    /// The sink's logit, −∞ without one.
    pub sink: f64,
    /// π: the weight of the sink.
    pub pi: f64,
    /// Its error, as [`Pair::p_error`].
    pub pi_error: f64,
    /// m: the largest logit of the row.
    max: f64,
    /// A: the relative error of the sum of the weights, (N7).
    relative: f64,
    /// γ of a streamed sum over the row.
    pub gamma: f64,
    /// The error of the stored lse, (N9).
    pub lse_error: f64,
    /// Whether the row's errors are too large to bound anything.
    pub refused: bool,
}

impl<'a> ScoreOperands<'a> {
    pub fn new(scores: &'a Scores, bias: Bias<'a>, inputs: &Inputs<'a>) -> Result<Self, Error> {
        Ok(ScoreOperands {
            scores,
            model: inputs.model,
            q: inputs.needed("q")?,
            k: inputs.needed("k")?,
            sinks: inputs.get("sinks").filter(|_| scores.sinks),
            bias,
            lse: inputs.needed("lse")?,
        })
    }

    /// The elements of a query.
    pub fn query(&self, place: Place<'_>) -> &'a [f64] {
        place.row(self.q)
    }

    /// The elements of a key.
    pub fn key(&self, place: Place<'_>, key: usize) -> &'a [f64] {
        self.shared(self.k, place, key)
    }

    /// What the head of a query sees at array position `key` of a tensor that lies as k does.
    pub fn shared(&self, x: Rows<'a>, place: Place<'_>, key: usize) -> &'a [f64] {
        x.row(place.sequence.batch, place.head / self.scores.group(), key)
    }

    /// Fills `row`.
    pub fn fill(&self, row: &mut Row, place: Place<'_>) {
        let Place { sequence, head, i } = place;
        row.pairs.clear();
        for j in 0..sequence.keys {
            if self.scores.mask.allows(sequence, head, i, j) {
                let pair = self.pair(place, j);
                row.pairs.extend(Some(pair).filter(|pair| pair.score != f64::NEG_INFINITY));
            }
        }
        row.weigh(self.model, place.row(self.lse)[0], self.sinks.map(|sinks| sinks.data[head]));
    }

    /// ds as it enters the products with q and k, where it may be stored in a narrower type (N14).
    pub fn stored(&self, ds: Sum) -> Sum {
        let (model, scale) = (self.model, self.scores.scale().abs());
        let mut error = ds.error + (model.u + model.u_ds) * ds.absolute;
        // Either ds or σ ds is what a kernel stores; without a scale neither reaches a gradient.
        let unscaled = if scale > 0.0 { scale.recip().max(1.0) } else { 1.0 };
        error += floor(ds.absolute + error, model.eta_ds * unscaled);
        if ds.absolute * scale.max(1.0) > model.profile.ds_store.max() {
            error = f64::INFINITY;
        }
        Sum { error, ..ds }
    }

    /// One score with its errors; the weight is open.
    fn pair(&self, place: Place<'_>, j: usize) -> Pair {
        let (model, sigma) = (self.model, self.scores.scale());
        let key = place.sequence.key_start + j;
        let (q, k) = (self.query(place), self.key(place, key));
        let (dot, absolute) = dots(q, k);
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
        let (mut score, mut slope, mut slope_error) = (sigma * dot, 1.0, 0.0);
        if let Some(cap) = self.scores.softcap {
            // c, its reciprocal and the product with it.
            let reached = error + 3.0 * model.u * score.abs();
            let tau = (score / cap).tanh();
            slope = (1.0 - tau) * (1.0 + tau);
            let capped = Capped::new(model, cap, (tau, slope), reached);
            score = cap * tau;
            error = capped.moved + cap * model.profile.tanh * model.u + 2.0 * model.u * score.abs();
            slope_error = capped.slope_error;
        }
        if let Some(bias) = self.bias.at(place, j) {
            score += bias;
            error += model.u * (score.abs() + bias.abs());
        }
        if score.abs() > model.limit {
            error = f64::INFINITY;
        }
        Pair { key, score, error, slope, slope_error, p: 0.0, p_error: 0.0 }
    }
}

/// What a softcap c makes of an error: (N6).
pub(super) struct Capped {
    /// By how much c·tanh(s/c) moves with s.
    pub moved: f64,
    /// Of τ = tanh(s/c).
    pub tau_error: f64,
    /// Of S′ = 1 − τ².
    pub slope_error: f64,
}

impl Capped {
    /// `error` is that of s, with the roundings of s/c.
    pub fn new(model: &Model, cap: f64, (tau, slope): (f64, f64), error: f64) -> Self {
        let u = model.u;
        // |ln S′| changes by at most 2/c for each unit of s.
        let steepest = (slope * (2.0 * error / cap).exp()).min(1.0);
        let moved = steepest * error;
        let tau_error = moved / cap + model.profile.tanh * u;
        let slope_error = (2.0 * tau.abs() + tau_error) * tau_error + u * (tau * tau + slope);
        Capped { moved, tau_error, slope_error }
    }
}

impl Row {
    /// The weights and what follows from all of them together.
    fn weigh(&mut self, model: &Model, lse: f64, sink: Option<f64>) {
        self.lse = lse;
        self.sink = sink.unwrap_or(f64::NEG_INFINITY);
        self.max = self.pairs.iter().map(|pair| pair.score).fold(self.sink, f64::max);
        let terms = self.pairs.len() + usize::from(sink.is_some());
        let (rescales, max) = (model.rescales(terms), self.max);
        let streamed =
            |error: f64, logit: f64| error + model.streamed_exp((logit - max).abs(), rescales);
        for pair in &mut self.pairs {
            pair.p = (pair.score - lse).exp();
            pair.p_error = weight_error(pair.p, streamed(pair.error, pair.score));
        }
        (self.pi, self.pi_error) = (0.0, 0.0);
        if self.sink > f64::NEG_INFINITY {
            self.pi = (self.sink - lse).exp();
            self.pi_error = weight_error(self.pi, streamed(0.0, self.sink));
        }
        self.gamma = model.gamma(model.chain(terms));
        let weights = self.pairs.iter().map(|pair| pair.p_error).sum::<f64>();
        self.relative = weights + self.pi_error + terms as f64 * model.eta;
        let log = (lse - max).abs() + model.profile.rescale_lag;
        self.lse_error = model.lse_error(self.relative, self.gamma, max, log)
            + model.store(lse.abs(), Precision::Wide);
        let largest = self.relative.max(self.lse_error);
        self.refused = largest.is_nan() || largest > LARGEST_RELATIVE;
    }

    /// (1 + A) / (1 − A): what normalising an erroneous sum makes of an error (N8).
    pub fn normalised(&self) -> f64 {
        (1.0 + self.relative) / (1.0 - self.relative).max(0.0)
    }

    /// (N10): the error of a P that is computed anew from the stored lse. `more` is added to that of
    /// its logarithm.
    pub fn recomputed(&self, model: &Model, pair: &Pair, more: f64) -> f64 {
        if self.refused {
            return f64::INFINITY;
        }
        let exp = model.exp((pair.score - self.lse).abs());
        weight_error(pair.p, pair.error + self.lse_error + exp + more) + model.eta
    }

    /// The error of the logarithm of a weight that the forward pass streamed, without ε (N16).
    pub fn streamed(&self, model: &Model, pair: &Pair) -> f64 {
        let rescales = model.rescales(self.pairs.len() + 1);
        model.streamed_exp((pair.score - self.max).abs(), rescales)
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
