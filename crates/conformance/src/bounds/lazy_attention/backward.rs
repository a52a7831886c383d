//! The bounds of the gradients: equations (N43) to (N51).

use super::row::{Activity, Operands, Pair, Row};
use crate::bounds::model::{Model, dots, floor};
use etalon_problem::{Precision, Sequence};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;

/// A sum of terms: their errors and their absolute values.
#[derive(Clone, Copy, Default)]
struct Sum {
    error: f64,
    absolute: f64,
    terms: usize,
}

impl Sum {
    fn add(&mut self, other: Sum) {
        self.error += other.error;
        self.absolute += other.absolute;
        self.terms += other.terms;
    }

    /// The error of adding them up.
    fn chained(self, model: &Model) -> f64 {
        // Each may pass through a partial of its own.
        let gamma = model.gamma(self.terms + model.rescales(self.terms) + 3);
        self.error + gamma * self.absolute + floor(self.absolute, model.eta)
    }
}

/// The gradients of one key head of one batch element and of the query heads that share it.
struct Group {
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
    /// `[heads of the group, W]`.
    dbias: Vec<Sum>,
    dtau: Vec<Sum>,
}

/// The errors of the gradients before they are stored; the key heads in parallel, their results
/// joined in order.
pub(super) fn errors(
    operands: &Operands<'_>,
    dout: &[f64],
    dlse: Option<&[f64]>,
    o: &[f64],
) -> BTreeMap<&'static str, Vec<f64>> {
    let e = operands.scores().extents;
    let width = operands.problem.bias.map_or(0, |bias| bias.width);
    let group = operands.scores().group();
    let asked = Asked { operands, dout, dlse, o };
    let tasks: Vec<usize> = (0..e.batch * e.key_heads).collect();
    let groups: Vec<Group> = tasks.par_iter().map(|&task| asked.group(task)).collect();
    let (mut dq, mut dk, mut dv) = (vec![], vec![], vec![]);
    let mut dbias = vec![Sum::default(); e.query_heads * width];
    let mut dtau = vec![Sum::default(); e.query_heads];
    for (task, found) in groups.into_iter().enumerate() {
        dq.extend(found.dq);
        dk.extend(found.dk);
        dv.extend(found.dv);
        let first = task % e.key_heads * group;
        for (sum, found) in dbias[first * width..].iter_mut().zip(found.dbias) {
            sum.add(found);
        }
        for (sum, found) in dtau[first..].iter_mut().zip(found.dtau) {
            sum.add(found);
        }
    }
    let chained = |sums: Vec<Sum>| sums.iter().map(|sum| sum.chained(operands.model)).collect();
    BTreeMap::from([
        ("dq", dq),
        ("dk", dk),
        ("dv", dv),
        ("dbias", chained(dbias)), // (N50)
        ("dtau", chained(dtau)),   // (N51)
    ])
}

/// What the backward pass is asked with, and the reference's o.
struct Asked<'a> {
    operands: &'a Operands<'a>,
    dout: &'a [f64],
    dlse: Option<&'a [f64]>,
    o: &'a [f64],
}

/// What the gradients of a row know of it.
struct Gradient {
    /// g of each pair with Σ_c |dout_c v_c|; both 0 where no kernel reads the value.
    g: Vec<(f64, f64)>,
    /// γ of a product with dout.
    gamma: f64,
    delta: f64,
    /// (N44)
    delta_error: f64,
    dlse: f64,
    /// Σ P |g| of the pairs whose activity is open.
    open: f64,
}

impl Asked<'_> {
    fn group(&self, task: usize) -> Group {
        let operands = self.operands;
        let (scores, width) = (operands.scores(), operands.problem.value_dim);
        let (e, group) = (scores.extents, scores.group());
        let (batch, first) = (task / e.key_heads, task % e.key_heads * group);
        let reach = operands.problem.bias.map_or(0, |bias| bias.width);
        let mut found = Group {
            dq: vec![0.0; group * e.queries * e.dim],
            dk: vec![0.0; e.keys * e.dim],
            dv: vec![0.0; e.keys * width],
            dbias: vec![Sum::default(); group * reach],
            dtau: vec![Sum::default(); group],
        };
        let mut row = Row::default();
        for sequence in scores.sequences().iter().filter(|sequence| sequence.batch == batch) {
            let gammas = self.key_gammas(sequence, first..first + group);
            for head in first..first + group {
                for i in 0..sequence.queries {
                    let at = (batch * e.query_heads + head) * e.queries + sequence.query_start + i;
                    operands.fill(&mut row, (sequence, head, i), at);
                    if !row.pairs.is_empty() {
                        self.row(&row, (sequence, head, i), at, first, &gammas, &mut found);
                    }
                }
            }
        }
        found
    }

    /// γ of the sums over the queries that see each key of a sequence.
    fn key_gammas(&self, sequence: &Sequence, heads: Range<usize>) -> Vec<f64> {
        let (mask, model) = (&self.operands.scores().mask, self.operands.model);
        let gamma = |j| {
            let sees =
                |h| (0..sequence.queries).filter(|&i| mask.allows(sequence, h, i, j)).count();
            let terms: usize = heads.clone().map(sees).sum();
            // A new accumulator for each tile of queries and for each head at the most.
            model.gamma(terms + model.rescales(terms) + heads.len() + 3)
        };
        (0..sequence.keys).map(gamma).collect()
    }

    /// (N43), (N44).
    fn gradient(&self, row: &Row, (batch, head): (usize, usize), at: usize) -> Gradient {
        let (operands, model) = (self.operands, self.operands.model);
        let width = operands.problem.value_dim;
        let (dout, o) =
            (&self.dout[at * width..(at + 1) * width], &self.o[at * width..(at + 1) * width]);
        let gamma = model.gamma(width + 1);
        let dlse = self.dlse.map_or(0.0, |dlse| dlse[at]);
        let mut found =
            Gradient { g: Vec::new(), gamma, delta: 0.0, delta_error: 0.0, dlse, open: 0.0 };
        for (pair, &key) in row.pairs.iter().zip(&row.softmax.key) {
            if !pair.may_be_active() {
                found.g.push((0.0, 0.0));
                continue;
            }
            let (g, size) = dots(dout, operands.value(batch, head, key));
            found.g.push((g, size));
            if pair.p + row.offset > 0.0 {
                found.delta += pair.p * g;
            }
            if pair.activity == Activity::Open {
                found.open += pair.p * g.abs();
            }
            // By (E8), or by (E16) from o and the sum of the active values.
            let moved = (pair.p_error + 3.0 * model.u * pair.terms) * (g.abs() + gamma * size);
            let rounded = (row.softmax.gamma + gamma) * pair.terms
                + model.u_p() * (pair.e + pair.e_error)
                + model.eta_p();
            found.delta_error += moved + rounded * size + floor(size, width as f64 * model.eta);
        }
        let stored = |(d, o): (&f64, &f64)| d.abs() * model.store(o.abs(), Precision::Storage);
        if found.delta_error > 0.0 {
            let (_, absolute) = dots(dout, o);
            found.delta_error += dout.iter().zip(o).map(stored).sum::<f64>()
                + gamma * absolute
                + 2.0 * model.u * (absolute + found.delta.abs());
        }
        found
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
        let (operands, model) = (self.operands, self.operands.model);
        let (e, width) = (operands.scores().extents, operands.problem.value_dim);
        let gradient = self.gradient(row, (sequence.batch, head), at);
        let of_scores = operands.of_scores();
        let q = of_scores.query(sequence, head, i);
        let dout = &self.dout[at * width..(at + 1) * width];
        let sigma = operands.scores().scale().abs();
        let terms = row.pairs.len();
        let gamma = model.gamma(terms + model.rescales(terms) + 3);
        let local = (head - first) * e.queries + sequence.query_start + i;
        let dq = &mut found.dq[local * e.dim..(local + 1) * e.dim];
        let reach = operands.problem.bias;
        for (index, (pair, &key)) in row.pairs.iter().zip(&row.softmax.key).enumerate() {
            let j = key - sequence.key_start;
            let d_score = gradient.d_score(model, pair, index);
            let stored = self.stored(d_score);
            let to_query = sigma * (stored.error + gamma * stored.absolute);
            accumulate(dq, to_query, of_scores.key(sequence.batch, head, key)); // (N47)
            let to_key = sigma * (stored.error + gammas[j] * stored.absolute);
            accumulate(&mut found.dk[key * e.dim..(key + 1) * e.dim], to_key, q); // (N48)
            if pair.may_be_active() {
                let error = pair.e_error
                    + (model.u_p() + gammas[j]) * (pair.e + pair.e_error)
                    + model.eta_p();
                accumulate(&mut found.dv[key * width..(key + 1) * width], error, dout); // (N49)
            }
            if let Some((reach, d)) = reach.and_then(|r| Some((r, r.distance(sequence, i, j)?))) {
                found.dbias[(head - first) * reach.width + d].add(d_score); // (N50)
            }
        }
        dq.iter_mut().for_each(|error| *error += floor(*error, terms as f64 * model.eta));
        found.dtau[head - first].add(gradient.of_tau(model, row)); // (N51)
    }

    /// dS as it enters the products with q and k.
    fn stored(&self, d_score: Sum) -> Sum {
        let model = self.operands.model;
        let scale = self.operands.scores().scale().abs();
        let unscaled = if scale > 0.0 { scale.recip().max(1.0) } else { 1.0 };
        let mut error = d_score.error + (model.u + model.u_ds()) * d_score.absolute;
        error += floor(d_score.absolute + error, model.eta_ds() * unscaled);
        if d_score.absolute * scale.max(1.0) > model.profile.ds_store.max() {
            error = f64::INFINITY;
        }
        Sum { error, ..d_score }
    }
}

impl Gradient {
    /// dS with its error, (N45) and (N46).
    fn d_score(&self, model: &Model, pair: &Pair, index: usize) -> Sum {
        let (g, size) = self.g[index];
        let flipped = if pair.activity == Activity::Open { pair.p * g.abs() } else { 0.0 };
        // What (E9) and (E17) add up.
        let size_of_all = g.abs() + self.delta.abs() + self.open + self.dlse.abs();
        let error = self.gamma * size + self.delta_error + 3.0 * model.u * size_of_all;
        let flips = pair.p * (self.open - flipped) + (1.0 - pair.p).max(0.0) * flipped; // (N46)
        Sum {
            error: pair.p_error * (size_of_all + error)
                + pair.p * error
                + 2.0 * model.u * pair.p * size_of_all
                + flips
                + floor(size_of_all + error, model.eta),
            absolute: pair.p * size_of_all,
            terms: 1,
        }
    }

    /// (1/n) Σ g over the active pairs, with its error.
    fn of_tau(&self, model: &Model, row: &Row) -> Sum {
        let mut sum = Sum { terms: 1, ..Sum::default() };
        for (pair, (g, size)) in row.pairs.iter().zip(&self.g) {
            let chain = row.softmax.gamma + self.gamma + 2.0 * model.u;
            sum.error += (chain * size + floor(*size, model.eta)) / row.n;
            sum.absolute += size / row.n;
            if pair.activity == Activity::Open {
                sum.error += g.abs() / row.n;
            }
        }
        sum
    }
}

/// sum_c += weight · |x_c|.
fn accumulate(sum: &mut [f64], weight: f64, x: &[f64]) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum += weight * x.abs();
    }
}
