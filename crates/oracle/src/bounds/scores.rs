//! The scores and weights of one row with their errors: equations (N5) to (N10).

use super::cap::Capped;
use super::inputs::{Inputs, Rows};
use super::model::{BEYOND, Model, floor, spread};
use super::reach::Reach;
use super::sum::{Sum, dots};
use etalon_problem::{DistanceBias, Extents, Scores, Sequence};
use std::ops::Range;

/// A query of one head in one sequence.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub operands: &'a Operands<'a>,
    pub sequence: &'a Sequence,
    pub head: usize,
    pub i: usize,
}

impl<'a> Place<'a> {
    /// Index of its query in the arrays.
    pub fn query(&self) -> usize {
        self.sequence.query_start + self.i
    }

    /// Its row of a tensor that lies as q does.
    pub fn row(&self, x: Rows<'a>) -> &'a [f64] {
        x.row(self.sequence.batch, self.head, self.query())
    }

    /// The row that it sees at array position `key` of a tensor that lies as k does.
    pub fn shared(&self, x: Rows<'a>, key: usize) -> &'a [f64] {
        x.row(self.sequence.batch, self.head / self.operands.scores.group(), key)
    }

    /// Its visible pairs, whose weights are open.
    pub fn pairs(&self) -> Vec<Pair> {
        let Place { operands, sequence, head, i } = *self;
        let allows = |j: &usize| operands.scores.mask.allows(sequence, head, i, *j);
        let pairs = (0..sequence.keys).filter(allows);
        let pairs = pairs.map(|j| operands.pair(*self, sequence.key_start + j));
        pairs.filter(|pair| pair.score != f64::NEG_INFINITY).collect()
    }

    /// The lse of its row, as the reference gives it.
    pub fn lse(&self) -> f64 {
        self.row(self.operands.lse)[0]
    }

    /// The logit of its sink, if there is one.
    pub fn sink(&self) -> Option<f64> {
        self.operands.sinks.data.get(self.head).copied()
    }

    /// The cotangent of its lse.
    pub fn dlse(&self) -> f64 {
        self.row(self.operands.dlse).first().copied().unwrap_or(0.0)
    }
}

/// Numbers that are added to the scores: `size` for each of the heads of each of the batch elements,
/// of which there is 1 where the numbers are shared. Its gradient lies in the same way.
#[derive(Clone, Copy)]
pub(super) struct Bias<'a> {
    data: &'a [f64],
    batches: usize,
    heads: usize,
    pub size: usize,
    /// Keys in a row of numbers for each pair.
    keys: usize,
    /// Distances of a bias that has a number for each distance within reach instead, and 0 beyond.
    reach: Option<DistanceBias>,
}

impl<'a> Bias<'a> {
    fn new(scores: &Scores, reach: Option<DistanceBias>, inputs: &Inputs<'a>) -> Option<Self> {
        let (data, e) = (inputs.rows("bias").data, &scores.extents);
        let [batches, heads, size] = match reach {
            Some(reach) => [1, e.query_heads, reach.width],
            None => scores.bias.map(|bias| [bias.batch, bias.heads, e.queries * e.keys])?,
        };
        Some(Bias { data, batches, heads, size, keys: e.keys, reach })
    }

    /// The numbers of all heads.
    pub fn len(&self) -> usize {
        self.batches * self.heads * self.size
    }

    /// Number of heads that share each number.
    pub fn copies(&self, e: &Extents) -> usize {
        e.batch / self.batches.max(1) * (e.query_heads / self.heads.max(1))
    }

    /// Index of the first number of a head of a batch element.
    pub fn start(&self, batch: usize, head: usize) -> usize {
        let batch = if self.batches == 1 { 0 } else { batch };
        let head = if self.heads == 1 { 0 } else { head };
        (batch * self.heads + head) * self.size
    }

    /// Index of the number of a pair among those of its head, if there is one.
    pub fn offset(&self, place: Place<'_>, key: usize) -> Option<usize> {
        match self.reach {
            Some(reach) => reach.distance(place.sequence, place.i, key - place.sequence.key_start),
            None => Some(place.query() * self.keys + key),
        }
    }

    fn at(&self, place: Place<'_>, key: usize) -> f64 {
        let start = self.start(place.sequence.batch, place.head);
        self.offset(place, key).map_or(0.0, |offset| self.data[start + offset])
    }
}

/// Operands of attention, attention_lse and lazy_attention, and the reference's o and lse.
pub(super) struct Operands<'a> {
    pub scores: &'a Scores,
    pub model: &'a Model,
    pub bias: Option<Bias<'a>>,
    sequences: Vec<Sequence>,
    pub q: Rows<'a>,
    pub k: Rows<'a>,
    sinks: Rows<'a>,
    lse: Rows<'a>,
    /// attention_lse has no values, nor what belongs to them.
    pub v: Rows<'a>,
    pub o: Rows<'a>,
    pub dout: Rows<'a>,
    dlse: Rows<'a>,
}

/// A visible pair.
#[derive(Clone, Copy)]
pub(super) struct Pair {
    /// Index of the key in its array: `key_start + j`.
    pub key: usize,
    /// S, (F1) and (F2).
    pub score: f64,
    /// ε: the error of S, (N5) and (N6).
    pub error: f64,
    /// S′.
    pub slope: f64,
    /// ε′: the error of S′, (N6).
    pub slope_error: f64,
    /// ln P and P, (F4).
    log: f64,
    pub p: f64,
    /// e: the error of a streamed P before its sum normalises it, (N7).
    pub p_error: f64,
}

/// The visible pairs of one query with the sums over them.
pub(super) struct Row<'a> {
    pub place: Place<'a>,
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
    /// Λ: how far a running maximum may lag behind it.
    lag: f64,
    /// A: Σ e, with that of the sink (N7).
    error: f64,
    /// ln A⁻: the least that the sum of the weights may become, which is 1 (N7).
    least: f64,
    /// γ of a streamed sum over the row, of products and of the weights alone.
    pub gamma: f64,
    sum_gamma: f64,
    /// The error of the stored lse, (N9).
    pub lse_error: f64,
    /// True where weights may err by so much that their average is bounded by its hull, too.
    pub rough: bool,
    /// True where a score may overflow: nothing is known of the row.
    pub overflows: bool,
}

/// The logarithm of the sum of the weights may move by so much before the hull of the values is the better
/// bound anywhere: it costs a pass over the values.
const ROUGH: f64 = 0.1;

/// An average y of numbers x_j with the weights of a row, as its bound (N8) reads it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Average {
    /// y.
    pub value: f64,
    /// Σ e_j |x_j − y|.
    pub apart: f64,
    /// Error from rounding the weights and the sum: Σ w_j |x_j| with w of [`Row::rounded`].
    pub rounded: f64,
    /// Range of the x_j; of rough rows.
    pub hull: Option<Hull>,
}

/// The least and the largest of some numbers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hull {
    low: f64,
    high: f64,
}

impl Hull {
    pub const EMPTY: Hull = Hull { low: f64::INFINITY, high: f64::NEG_INFINITY };

    pub fn add(&mut self, x: f64) {
        (self.low, self.high) = (self.low.min(x), self.high.max(x));
    }
}

impl<'a> Operands<'a> {
    /// `reach` is that of a bias by distance.
    pub fn new(scores: &'a Scores, reach: Option<DistanceBias>, inputs: &Inputs<'a>) -> Self {
        Operands {
            scores,
            model: inputs.model,
            bias: Bias::new(scores, reach, inputs),
            sequences: scores.sequences(),
            q: inputs.rows("q"),
            k: inputs.rows("k"),
            sinks: inputs.rows("sinks"),
            lse: inputs.rows("lse"),
            v: inputs.rows("v"),
            o: inputs.rows("o"),
            dout: inputs.rows("dout"),
            dlse: inputs.rows("dlse"),
        }
    }

    /// The sequences of a batch element.
    pub fn sequences(&self, batch: usize) -> impl Iterator<Item = &Sequence> {
        // They ascend: a search for each of many batch elements is no search of all for each.
        let first = self.sequences.partition_point(|sequence| sequence.batch < batch);
        self.sequences[first..].iter().take_while(move |sequence| sequence.batch == batch)
    }

    /// The queries of some heads of a batch element.
    pub fn places(&self, batch: usize, heads: Range<usize>) -> impl Iterator<Item = Place<'_>> {
        self.sequences(batch).flat_map(move |sequence| {
            let place = move |head, i| Place { operands: self, sequence, head, i };
            heads.clone().flat_map(move |head| (0..sequence.queries).map(move |i| place(head, i)))
        })
    }

    /// ds as it enters the products with q and k, where it may be stored in a narrower type (N14).
    pub fn stored(&self, ds: Sum) -> Sum {
        let (model, scale) = (self.model, self.scores.scale().abs());
        let steps = model.steps_back(self.scores.softcap.is_some());
        let mut error = ds.error + (model.u + steps * model.u_ds) * ds.absolute;
        // Either ds or σ ds is what a kernel stores; without a scale neither reaches a gradient.
        let unscaled = if scale > 0.0 { scale.recip().max(1.0) } else { 1.0 };
        error += floor(ds.absolute + error, steps * model.eta_ds * unscaled);
        let overflows = (ds.absolute + error) * scale.max(1.0) > model.profile.ds_store.max();
        if overflows && error <= BEYOND[0] {
            error = f64::INFINITY;
        }
        Sum { error, ..ds }
    }

    /// One score with its errors; the weight is open.
    fn pair(&self, place: Place<'_>, key: usize) -> Pair {
        let (model, sigma) = (self.model, self.scores.scale());
        let (q, k) = (place.row(self.q), place.shared(self.k, key));
        let (dot, absolute) = dots(q, k);
        let largest = absolute * sigma.abs().max(1.0);
        // (N5): D products and their sum; σ, to base 2 log₂ e and their product; the product with it.
        let mut error = spread(model.gamma(q.len() + 4), (sigma * absolute).abs());
        if largest > 0.0 {
            let operands: f64 = q.iter().chain(k).map(|x| x.abs()).sum();
            error += model.eta * (1.0 + sigma.abs()) * (q.len() as f64 + operands);
        }
        if largest > model.limit {
            error = f64::INFINITY;
        }
        let (mut score, mut slope, mut slope_error) = (sigma * dot, 1.0, 0.0);
        // (N90): the product, and the scaled one.
        let kept = model.score;
        error += sigma.abs() * kept.error(dot.abs()) + kept.error(score.abs());
        if let Some(cap) = self.scores.softcap {
            // c, its reciprocal and the product with it; the quotient may be stored.
            let reached = error + 3.0 * model.u * score.abs() + cap * kept.error(score.abs() / cap);
            let tau = (score / cap).tanh();
            slope = (1.0 - tau) * (1.0 + tau);
            let capped = Capped::new(model, cap, (tau, slope), reached);
            score = cap * tau;
            error = capped.moved + cap * model.profile.tanh * model.u + 2.0 * model.u * score.abs();
            error += cap * kept.error(tau.abs()) + kept.error(score.abs());
            slope_error = capped.slope_error;
        }
        if let Some(bias) = self.bias.map(|bias| bias.at(place, key)) {
            score += bias;
            // To base 2: the bias times log₂ e, and the sum.
            error += model.u * (score.abs() + 2.0 * bias.abs()) + kept.error(score.abs());
        }
        if score.abs() > model.limit {
            error = f64::INFINITY;
        }
        let (log, p, p_error) = (f64::NEG_INFINITY, 0.0, 0.0);
        Pair { key, score, error, slope, slope_error, log, p, p_error }
    }
}

/// True where a row sees nothing beside a sink of ∞, whose weight is 1 in every kernel: no difference of two
/// infinities says so.
fn alone_with_all(pairs: &[Pair], sink: f64) -> bool {
    pairs.is_empty() && sink == f64::INFINITY
}

impl<'a> Row<'a> {
    /// The visible pairs of a query, their weights, and what follows from all of them together.
    pub fn new(place: Place<'a>) -> Self {
        Row::of(place, place.pairs(), place.sink(), place.lse())
    }

    /// The same of some of the pairs, and perhaps a sink, of which the reference gives this lse.
    pub fn of(place: Place<'a>, mut pairs: Vec<Pair>, sink: Option<f64>, lse: f64) -> Self {
        let model = place.operands.model;
        let terms = pairs.len() + usize::from(sink.is_some());
        let sink = sink.unwrap_or(f64::NEG_INFINITY);
        let max = pairs.iter().map(|pair| pair.score).fold(sink, f64::max);
        let rescales = model.profile.rescales(terms);
        let lag = model.lag(pairs.iter().map(|pair| pair.score).chain([sink]));
        let mut reach = Reach::new(terms as f64 * model.eta);
        let mut weight = |logit: f64, error: f64| {
            let rho = error + model.streamed_exp((logit - max).abs(), lag, rescales);
            let log = logit - lse;
            reach.add(log, rho);
            (log, log.exp(), model.weight_error(log, rho))
        };
        for pair in &mut pairs {
            (pair.log, pair.p, pair.p_error) = weight(pair.score, pair.error);
        }
        let (mut pi, mut pi_error) = (0.0, 0.0);
        if alone_with_all(&pairs, sink) {
            pi = 1.0;
        } else if sink > f64::NEG_INFINITY {
            (_, pi, pi_error) = weight(sink, model.base_2(sink) + model.score.error(sink.abs()));
        }
        let error = pi_error + pairs.iter().map(|pair| pair.p_error).sum::<f64>();
        let chain = model.profile.chain(terms);
        let (gamma, sum_gamma) = (model.gamma(chain), model.gamma_of_sum(chain));
        let (moved, least) = (reach.moved(), reach.least());
        let log = (lse - max).abs() + lag;
        let lse_error =
            model.lse_error(moved, sum_gamma, max, log) + model.store(lse.abs(), model.lse);
        let overflows = pairs.iter().any(|pair| !pair.error.is_finite());
        let rough = moved > ROUGH;
        Row {
            place,
            pairs,
            lse,
            sink,
            pi,
            pi_error,
            max,
            lag,
            error,
            least,
            gamma,
            sum_gamma,
            lse_error,
            rough,
            overflows,
        }
    }

    /// Error of P v from the rounding of a stored P and of the sums, for each |v| (N8).
    pub fn rounded(&self, model: &Model, pair: &Pair) -> f64 {
        let p = pair.p + pair.p_error;
        p * model.rounded_weight(self.gamma) + model.eta_p + model.weight.error(p)
    }

    /// (N8): the error of an average with the weights of the row. `size` is that of what the division rounds:
    /// |y|, or the sum of the sizes of the parts of y.
    pub fn average(&self, model: &Model, terms: &Average, size: f64) -> f64 {
        let least = self.least.exp();
        let mut moved = (terms.apart + self.pi_error * terms.value.abs()) / least;
        let mut rounded = terms.rounded / least;
        if let Some(Hull { low, high }) = terms.hull {
            // Whatever the weights are, their average lies between the values, and 0 where there is a sink.
            let zero = if self.sink > f64::NEG_INFINITY { 0.0 } else { terms.value };
            let (low, high) = (low.min(zero), high.max(zero));
            moved = moved.min((high - terms.value).max(terms.value - low));
            let tiny = self.pairs.len() as f64 * (model.eta_p + model.weight.eta);
            let largest = low.abs().max(high.abs()).max(size);
            let stored = model.rounded_weight(self.gamma) + model.weight.u;
            rounded = rounded.min((stored + tiny) * largest);
        }
        // A sum of weights that is too small by up to n u makes the quotient too large by up to γ.
        let division = self.sum_gamma + 2.0 * model.u;
        moved + rounded + spread(division, moved + rounded + size)
    }

    /// The largest that an average of sizes may become which is `size` and whose terms are off by `grown` in
    /// all and at `most` so large: e of each weight, of the normaliser, and the largest of all.
    pub fn largest_size(&self, size: f64, grown: f64, most: f64) -> f64 {
        let moved = (grown + self.error * size) / self.least.exp();
        if moved < f64::INFINITY {
            size + moved.min((most - size).max(0.0))
        } else {
            most.max(size)
        }
    }

    /// (N10): the error of a P that is computed anew from the stored lse. `more` is added to that of
    /// its logarithm.
    pub fn recomputed(&self, model: &Model, pair: &Pair, more: f64) -> f64 {
        let exp = model.exp((pair.score - self.lse).abs());
        let lse = self.lse_error + model.base_2(self.lse);
        let error = model.weight_error(pair.log, pair.error + lse + exp + more) + model.eta;
        error + model.weight.error(pair.p + error) // (N91)
    }

    /// The error of the logarithm of a weight that the forward pass streamed, without ε (N16).
    pub fn streamed(&self, model: &Model, pair: &Pair) -> f64 {
        let rescales = model.profile.rescales(self.pairs.len() + 1);
        model.streamed_exp((pair.score - self.max).abs(), self.lag, rescales)
    }

    /// (N10) of the sink's weight.
    pub fn recomputed_sink(&self, model: &Model) -> f64 {
        let (sink, lse) = (self.sink, self.lse);
        if alone_with_all(&self.pairs, sink) {
            return 0.0;
        }
        let stored = model.score.error(sink.abs());
        let log = stored + self.lse_error + model.base_2(sink) + model.base_2(lse);
        let rho = log + model.exp((sink - lse).abs());
        let error = model.weight_error(sink - lse, rho) + floor(self.pi, model.eta);
        error + model.weight.error(self.pi + error)
    }
}
