//! From the errors of rows to those of whole outputs, for attention, attention_lse and
//! lazy_attention: o and lse, and the gradients (N15) to (N20), (N47) to (N51).

use super::inputs::Errors;
use super::model::Model;
use super::scores::{Operands, Place, Row};
use super::sum::{Sum, accumulate};
use rayon::prelude::*;
use std::ops::Range;

/// The errors of o and of lse; heads in parallel. `output` adds the errors of a row of o, and returns
/// the power of the row, NaN where that says nothing.
pub(super) fn forward(
    operands: &Operands<'_>,
    output: impl Fn(&Row<'_>, &mut [f64]) -> f64 + Sync,
) -> Errors {
    let (e, width) = (&operands.scores.extents, operands.v.width);
    let head = |index: usize| {
        let (batch, head) = (index / e.query_heads, index % e.query_heads);
        let (mut o, mut lse) = (vec![0.0; e.queries * width], vec![0.0; e.queries]);
        let mut powers = Vec::new();
        for place in operands.places(batch, head..head + 1) {
            let (row, at) = (Row::new(place), place.query());
            lse[at] = row.lse_error;
            powers.push(output(&row, &mut o[at * width..(at + 1) * width]));
        }
        (o, lse, powers)
    };
    let heads = if e.queries == 0 { 0 } else { e.batch * e.query_heads };
    let heads: Vec<_> = (0..heads).into_par_iter().map(head).collect();
    let powers = heads.iter().flat_map(|(.., powers)| powers).filter(|power| !power.is_nan());
    let (strong, all) = (powers.clone().filter(|power| **power >= 4.0).count(), powers.count());
    let power = (all > 0).then(|| strong as f64 / all as f64);
    let o = heads.iter().flat_map(|(o, ..)| o).copied().collect();
    let lse = heads.iter().flat_map(|(_, lse, _)| lse).copied().collect();
    Errors { power, ..Errors::of([("o", o), ("lse", lse)]) }
}

/// Terms that a pair adds to the gradients.
pub(super) struct PairTerms {
    /// Index of the key in its array.
    pub key: usize,
    /// dS.
    pub d_score: Sum,
    /// dS as it enters the product with k, before σ.
    pub by_query: Sum,
    /// The same for the product with q.
    pub by_key: Sum,
    /// The weight that multiplies dout, before the sum over queries, and what its storage may
    /// lose to underflow. None where no kernel adds to dv.
    pub weight: Option<(Sum, f64)>,
}

/// Terms that a row adds to the gradients.
#[derive(Default)]
pub(super) struct RowTerms {
    pub pairs: Vec<PairTerms>,
    /// γ of the sum over keys.
    pub gamma: f64,
    /// Term of the gradient of its head's sink or τ.
    pub head: Sum,
}

/// The errors of the gradients before they are stored; those of a head and of the bias are not
/// added up yet.
#[derive(Default)]
pub(super) struct Gradients {
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
    by_head: Vec<Sum>,
    dbias: Vec<Sum>,
}

/// Every gradient's errors; the key heads in parallel, their results joined in order. `terms` says
/// what a row adds.
pub(super) fn backward(
    operands: &Operands<'_>,
    terms: impl Fn(&Row<'_>) -> RowTerms + Sync,
) -> Gradients {
    let (e, group) = (&operands.scores.extents, operands.scores.group());
    let mut all = Gradients {
        by_head: vec![Sum::default(); e.query_heads],
        dbias: vec![Sum::default(); operands.bias.map_or(0, |bias| bias.len())],
        ..Gradients::default()
    };
    let tasks: Vec<usize> = (0..e.batch * e.key_heads).collect();
    // A group's share of dbias may be as large as its scores: only as many at once as can run.
    for tasks in tasks.chunks(rayon::current_num_threads().max(1)) {
        let first = |task: usize| (task / e.key_heads, task % e.key_heads * group);
        let groups = tasks.par_iter().map(|&task| {
            let (batch, first) = first(task);
            Gradients::of_heads(operands, batch, first..first + group, &terms)
        });
        for (&task, found) in tasks.iter().zip(groups.collect::<Vec<_>>()) {
            let (batch, first) = first(task);
            all.dq.extend(found.dq);
            all.dk.extend(found.dk);
            all.dv.extend(found.dv);
            join(&mut all.by_head[first..], &found.by_head);
            let Some(bias) = operands.bias else { continue };
            for (head, found) in (first..).zip(found.dbias.chunks(bias.size.max(1))) {
                join(&mut all.dbias[bias.start(batch, head)..], found);
            }
        }
    }
    all
}

fn join(sums: &mut [Sum], more: &[Sum]) {
    sums.iter_mut().zip(more).for_each(|(sum, &more)| sum.add(more));
}

/// γ of the sums over the queries of some heads that see each key (N17).
fn key_gammas(operands: &Operands<'_>, batch: usize, heads: &Range<usize>) -> Vec<f64> {
    let mut gammas = vec![0.0; operands.scores.extents.keys];
    for sequence in operands.sequences(batch) {
        for j in 0..sequence.keys {
            let sees = |head: usize, i: &usize| operands.scores.mask.allows(sequence, head, *i, j);
            let queries = |head| (0..sequence.queries).filter(|i| sees(head, i)).count();
            // A new accumulator for each tile of queries and for each head at the most.
            let terms = heads.clone().map(queries).sum();
            gammas[sequence.key_start + j] = operands.model.gamma_by_parts(terms, heads.len() + 3);
        }
    }
    gammas
}

impl Gradients {
    /// The work on one key head of one batch element: on the query heads that share it.
    fn of_heads(
        operands: &Operands<'_>,
        batch: usize,
        heads: Range<usize>,
        terms: &impl Fn(&Row<'_>) -> RowTerms,
    ) -> Self {
        let e = &operands.scores.extents;
        let mut found = Gradients {
            dq: vec![0.0; heads.len() * e.queries * e.dim],
            dk: vec![0.0; e.keys * e.dim],
            dv: vec![0.0; e.keys * operands.v.width],
            by_head: vec![Sum::default(); heads.len()],
            dbias: vec![Sum::default(); heads.len() * operands.bias.map_or(0, |bias| bias.size)],
        };
        let gammas = key_gammas(operands, batch, &heads);
        for place in operands.places(batch, heads.clone()) {
            found.add(place, &terms(&Row::new(place)), place.head - heads.start, &gammas);
        }
        found
    }

    /// Adds what one row, of head `h` of the group, gives to the errors of every gradient.
    fn add(&mut self, place: Place<'_>, row: &RowTerms, h: usize, gammas: &[f64]) {
        let operands = place.operands;
        let (model, e) = (operands.model, &operands.scores.extents);
        let sigma = operands.scores.scale().abs();
        let (q, dout) = (place.row(operands.q), place.row(operands.dout));
        let at = h * e.queries + place.query();
        let dq = &mut self.dq[at * e.dim..(at + 1) * e.dim];
        // Heads that share a key may store their parts of dk and dv.
        let shared = operands.scores.group() > 1;
        let (u_g, tiny) = if shared { (model.u_g, model.eta_g) } else { (0.0, model.eta) };
        for pair in &row.pairs {
            let (key, gamma) = (pair.key, gammas[pair.key]);
            let to_query = sigma * pair.by_query.summed(row.gamma);
            accumulate(dq, to_query, place.shared(operands.k, key), model.eta); // (N15), (N47)
            let to_key = sigma * pair.by_key.summed(gamma + u_g);
            let dk = &mut self.dk[key * e.dim..(key + 1) * e.dim];
            accumulate(dk, to_key, q, tiny); // (N17), (N48)
            if let Some((weight, stored)) = pair.weight {
                let error = weight.summed(model.u_p + gamma + u_g) + stored;
                let dv = &mut self.dv[key * dout.len()..(key + 1) * dout.len()];
                accumulate(dv, error, dout, tiny); // (N18), (N49)
            }
            let bias = operands.bias.and_then(|x| Some(h * x.size + x.offset(place, key)?));
            if let Some(at) = bias {
                self.dbias[at].add(pair.d_score);
            }
        }
        self.by_head[h].add(row.head);
    }

    /// With the sums added up, of which each passes through so many roundings.
    pub fn into_errors(
        self,
        model: &Model,
        (of_heads, head): (&'static str, impl Fn(&Sum) -> usize),
        bias: impl Fn(&Sum) -> usize,
    ) -> Errors {
        let by_head = self.by_head.iter().map(|sum| sum.chained(model, head(sum))).collect();
        let dbias = self.dbias.iter().map(|sum| sum.chained(model, bias(sum))).collect();
        let lists = [
            ("dq", self.dq),
            ("dk", self.dk),
            ("dv", self.dv),
            (of_heads, by_head), // (N19), (N51)
            ("dbias", dbias),    // (N20), (N50)
        ];
        Errors::of(lists)
    }
}
