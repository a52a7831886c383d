//! The bounds of the gradients: equations (N10) to (N20).

use super::forward::Values;
use super::row::{Operands, Row};
use crate::bounds::model::{Model, dots, floor};
use etalon_problem::Sequence;
use rayon::prelude::*;

/// What the backward pass is asked with, and what the reference's forward pass returned.
#[derive(Clone, Copy)]
pub(super) struct Asked<'a> {
    pub operands: Operands<'a>,
    pub model: &'a Model,
    pub lse: &'a [f64],
    pub dlse: Option<&'a [f64]>,
    /// The values with the cotangent of o; attention_lse has none.
    pub values: Option<(Values<'a>, &'a [f64])>,
}

/// The errors of the gradients before they are stored.
pub(super) struct Errors {
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
    pub dsinks: Vec<f64>,
    pub dbias: Vec<f64>,
}

/// A sum of terms: their errors and their absolute values.
#[derive(Clone, Copy, Default)]
struct Sum {
    error: f64,
    absolute: f64,
}

impl Sum {
    fn add(&mut self, other: Sum) {
        self.error += other.error;
        self.absolute += other.absolute;
    }

    /// The error of adding up `terms` of them.
    fn chained(self, model: &Model, terms: usize) -> f64 {
        self.error + model.gamma(terms) * self.absolute + floor(self.absolute, model.eta)
    }
}

/// The gradients of one key head of one batch element and of the query heads that share it.
struct Group {
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
    dsinks: Vec<Sum>,
    dbias: Vec<Sum>,
}

/// Every gradient's errors; the key heads in parallel, their results joined in order.
pub(super) fn errors(asked: &Asked<'_>) -> Errors {
    let scores = asked.operands.scores;
    let e = &scores.extents;
    let group = scores.group();
    let bias_len = scores.bias_shape().map_or(0, |shape| shape.iter().product());
    let mut dsinks = vec![Sum::default(); e.query_heads];
    let mut dbias = vec![Sum::default(); bias_len];
    let mut errors = Errors { dq: vec![], dk: vec![], dv: vec![], dsinks: vec![], dbias: vec![] };
    let tasks: Vec<usize> = (0..e.batch * e.key_heads).collect();
    // A group's share of dbias is as large as its scores: only as many at once as can run.
    for tasks in tasks.chunks(rayon::current_num_threads().max(1)) {
        let groups: Vec<Group> = tasks.par_iter().map(|&task| asked.group(task)).collect();
        for (&task, found) in tasks.iter().zip(groups) {
            errors.dq.extend(found.dq);
            errors.dk.extend(found.dk);
            errors.dv.extend(found.dv);
            let first = task % e.key_heads * group;
            for (sum, found) in dsinks[first..].iter_mut().zip(found.dsinks) {
                sum.add(found);
            }
            asked.join_bias(task / e.key_heads, first, &found.dbias, &mut dbias);
        }
    }
    let rows = e.batch * e.queries;
    if scores.sinks {
        errors.dsinks = dsinks.iter().map(|sum| sum.chained(asked.model, rows + 2)).collect();
    }
    let copies = scores
        .bias
        .map_or(1, |bias| e.batch / bias.batch.max(1) * (e.query_heads / bias.heads.max(1)));
    errors.dbias = dbias.iter().map(|sum| sum.chained(asked.model, copies)).collect();
    errors
}

impl Asked<'_> {
    /// Adds one group's share of dbias, `[heads of the group, N, M]`, to the whole (N20).
    fn join_bias(&self, batch: usize, first: usize, found: &[Sum], whole: &mut [Sum]) {
        let scores = self.operands.scores;
        let (Some(bias), e) = (scores.bias, &scores.extents) else { return };
        let size = e.queries * e.keys;
        for (head, found) in (first..).zip(found.chunks(size.max(1))) {
            let batch = if bias.batch == 1 { 0 } else { batch };
            let head = if bias.heads == 1 { 0 } else { head };
            let start = (batch * bias.heads + head) * size;
            for (sum, &found) in whole[start..start + size].iter_mut().zip(found) {
                sum.add(found);
            }
        }
    }

    fn group(&self, task: usize) -> Group {
        let scores = self.operands.scores;
        let e = &scores.extents;
        let (group, width) = (scores.group(), self.values.map_or(0, |(values, _)| values.dim));
        let (batch, first) = (task / e.key_heads, task % e.key_heads * group);
        let bias_len = if scores.bias.is_some() { group * e.queries * e.keys } else { 0 };
        let mut found = Group {
            dq: vec![0.0; group * e.queries * e.dim],
            dk: vec![0.0; e.keys * e.dim],
            dv: vec![0.0; e.keys * width],
            dsinks: vec![Sum::default(); group],
            dbias: vec![Sum::default(); bias_len],
        };
        let mut row = Row::default();
        for sequence in scores.sequences().iter().filter(|sequence| sequence.batch == batch) {
            let gammas = self.key_gammas(sequence, first..first + group);
            for head in first..first + group {
                for i in 0..sequence.queries {
                    let at = (batch * e.query_heads + head) * e.queries + sequence.query_start + i;
                    let place = (sequence, head, i);
                    self.operands.fill(&mut row, self.model, place, self.lse[at]);
                    self.row(&row, place, at, first, &gammas, &mut found);
                }
            }
        }
        found
    }

    /// γ of the sums over the queries that see each key of a sequence (N17).
    fn key_gammas(&self, sequence: &Sequence, heads: std::ops::Range<usize>) -> Vec<f64> {
        let mask = &self.operands.scores.mask;
        (0..sequence.keys)
            .map(|j| {
                let sees = |head| {
                    (0..sequence.queries).filter(|&i| mask.allows(sequence, head, i, j)).count()
                };
                let terms: usize = heads.clone().map(sees).sum();
                // A new accumulator for each tile of queries and for each head at the most.
                self.model.gamma(terms + self.model.rescales(terms) + heads.len() + 3)
            })
            .collect()
    }

    /// Adds what one row gives to the errors of every gradient.
    fn row(
        &self,
        row: &Row,
        (sequence, head, i): (&Sequence, usize, usize),
        at: usize,
        first: usize,
        gammas: &[f64],
        found: &mut Group,
    ) {
        let (model, scores) = (self.model, self.operands.scores);
        let e = &scores.extents;
        let delta = self.delta(row, sequence.batch, head, at);
        let local = (head - first) * e.queries + sequence.query_start + i;
        if row.sink > f64::NEG_INFINITY {
            found.dsinks[head - first].add(sink_term(row, model, &delta)); // (N19)
        }
        let q = self.operands.query(sequence, head, i);
        let dq = &mut found.dq[local * e.dim..(local + 1) * e.dim];
        let sigma = scores.scale().abs();
        // attention_lse may take Σ_j P S′ k_j from its forward pass (N16).
        let forward_gradient = self.values.is_none();
        let gamma = self.row_gamma(row, forward_gradient);
        for (index, &key) in row.key.iter().enumerate() {
            let k = self.operands.key(sequence.batch, head, key);
            let key_gamma = gammas[key - sequence.key_start];
            let weight = row.recomputed(model, index);
            let pair = self.pair(row, index, weight, &delta);
            if scores.bias.is_some() {
                found.dbias[local * e.keys + key].add(pair.before_cap);
            }
            let by_query = if forward_gradient {
                let weight = row.recomputed_or_streamed(model, index);
                self.pair(row, index, weight, &delta).product
            } else {
                pair.product
            };
            let to_query = sigma * (by_query.error + gamma * by_query.absolute);
            accumulate(dq, to_query, k); // (N15)
            let to_key = sigma * (pair.product.error + key_gamma * pair.product.absolute);
            accumulate(&mut found.dk[key * e.dim..(key + 1) * e.dim], to_key, q); // (N17)
            if let Some((values, dout)) = self.values {
                let width = values.dim;
                let p = row.p[index];
                let error = weight + p * (model.u_p() + key_gamma) + floor(p, model.eta_p());
                let dout = &dout[at * width..(at + 1) * width];
                accumulate(&mut found.dv[key * width..(key + 1) * width], error, dout); // (N18)
            }
        }
        let terms = row.key.len() as f64;
        dq.iter_mut().for_each(|error| *error += floor(*error, terms * model.eta));
    }

    fn row_gamma(&self, row: &Row, forward_gradient: bool) -> f64 {
        let terms = row.key.len();
        let partials = self.model.gamma(terms + self.model.rescales(terms) + 3);
        let streamed = 2.0 * (row.gamma + 3.0 * self.model.u);
        if forward_gradient { partials.max(streamed) } else { partials }
    }

    /// δ with its error (N12), and dP of every visible pair with Σ_c |dout_c v_c|.
    fn delta(&self, row: &Row, batch: usize, head: usize, at: usize) -> Delta {
        let model = self.model;
        let dlse = self.dlse.map_or(0.0, |dlse| dlse[at]);
        let mut delta = Delta { value: -dlse, error: 0.0, dp: Vec::new(), dot_gamma: 0.0 };
        let Some((values, dout)) = self.values else { return delta };
        let width = values.dim;
        let (dout, o) =
            (&dout[at * width..(at + 1) * width], &values.o[at * width..(at + 1) * width]);
        let (product, absolute) = dots(dout, o);
        delta.value += product;
        delta.dot_gamma = model.gamma(width + 1);
        let (mut streamed, mut rounded) = (row.pi_error * product.abs(), 0.0);
        for (index, &key) in row.key.iter().enumerate() {
            let (dp, size) = dots(dout, values.value(&self.operands, batch, head, key));
            streamed += row.p_error[index] * (dp - product).abs();
            rounded += (row.p[index] * (row.gamma + model.u_p()) + model.eta_p()) * size;
            delta.dp.push((dp, size));
        }
        let own = (streamed + rounded + (row.gamma + 2.0 * model.u) * absolute) * row.normalised();
        let storage = etalon_problem::Precision::Storage;
        let stored: f64 =
            dout.iter().zip(o).map(|(d, o)| d.abs() * model.store(o.abs(), storage)).sum();
        delta.error = own
            + stored
            + delta.dot_gamma * absolute
            + model.u * (dlse.abs() + delta.value.abs())
            + floor(absolute, width as f64 * model.eta);
        if row.refused && !row.key.is_empty() {
            delta.error = f64::INFINITY;
        }
        delta
    }

    /// The errors of dS and of ds (N13), (N14).
    fn pair(&self, row: &Row, index: usize, weight: f64, delta: &Delta) -> PairErrors {
        let model = self.model;
        let p = row.p[index];
        let (dp, size) = delta.dp.get(index).copied().unwrap_or((0.0, 0.0));
        let difference = (dp - delta.value).abs();
        let width = self.values.map_or(0, |(values, _)| values.dim);
        let inner = delta.dot_gamma * size
            + floor(size, width as f64 * model.eta)
            + delta.error
            + model.u * difference;
        let before_cap = Sum {
            absolute: p * difference,
            error: weight * (difference + inner)
                + p * inner
                + 2.0 * model.u * p * difference
                + floor(difference + inner, model.eta),
        };
        let absolute = row.slope[index] * before_cap.absolute;
        let slope_error = row.slope_error[index];
        let mut error = row.slope[index] * before_cap.error
            + slope_error * (before_cap.absolute + before_cap.error)
            + (model.u + model.u_ds()) * absolute;
        // Either ds or σ ds is what a kernel stores; without a scale neither reaches a gradient.
        let scale = self.operands.scores.scale().abs();
        let unscaled = if scale > 0.0 { scale.recip().max(1.0) } else { 1.0 };
        error += floor(absolute + error, model.eta_ds() * unscaled);
        if absolute * scale.max(1.0) > model.profile.ds_store.max() {
            error = f64::INFINITY;
        }
        PairErrors { before_cap, product: Sum { error, absolute } }
    }
}

/// δ of a row, and the products dout·v of its visible pairs.
struct Delta {
    value: f64,
    error: f64,
    /// γ of the sum over the elements of a value.
    dot_gamma: f64,
    /// dP and Σ_c |dout_c v_c|.
    dp: Vec<(f64, f64)>,
}

/// The errors of dS, and of ds as it enters the products with q and k.
struct PairErrors {
    before_cap: Sum,
    product: Sum,
}

/// π_i δ_i with its error (N19).
fn sink_term(row: &Row, model: &Model, delta: &Delta) -> Sum {
    let weight = row.recomputed_sink(model);
    let size = delta.value.abs();
    Sum {
        absolute: row.pi * size,
        error: weight * (size + delta.error) + row.pi * delta.error + 2.0 * model.u * row.pi * size,
    }
}

/// sum_c += weight · |x_c|.
fn accumulate(sum: &mut [f64], weight: f64, x: &[f64]) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum += weight * x.abs();
    }
}
