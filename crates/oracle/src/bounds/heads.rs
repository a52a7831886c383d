//! From the errors of rows to those of whole outputs, for attention, attention_lse and
//! lazy_attention: o and lse, and the gradients (N15) to (N20), (N47) to (N51).

use super::inputs::{Errors, Rows};
use super::model::floor;
use super::scores::{Place, Row, ScoreOperands};
use super::sum::{Sum, accumulate};
use etalon_problem::{Scores, Sequence};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;

/// The sequences, unless there is no row. (A problem without rows may count batch elements without
/// end.)
fn sequences(scores: &Scores) -> Vec<Sequence> {
    if scores.row_shape().contains(&0) { Vec::new() } else { scores.sequences() }
}

/// The sequences of a batch element.
fn of_batch(sequences: &[Sequence], batch: usize) -> impl Iterator<Item = &Sequence> {
    sequences.iter().filter(move |sequence| sequence.batch == batch)
}

/// The errors of o, whose rows have `width` elements, and of lse; heads in parallel. `output` adds
/// the errors of a row of o, and returns the power of the row, NaN where that says nothing.
pub(super) fn forward(
    operands: &ScoreOperands<'_>,
    width: usize,
    output: impl Fn(&Row, Place<'_>, &mut [f64]) -> f64 + Sync,
) -> Errors {
    let sequences = sequences(operands.scores);
    let e = &operands.scores.extents;
    let head = |index: usize| {
        let mut o = vec![0.0; e.queries * width];
        let (mut lse, mut power) = (vec![0.0; e.queries], vec![f64::NAN; e.queries]);
        let mut row = Row::default();
        for sequence in of_batch(&sequences, index / e.query_heads) {
            for i in 0..sequence.queries {
                let place = Place { sequence, head: index % e.query_heads, i };
                let at = sequence.query_start + i;
                operands.fill(&mut row, place);
                lse[at] = if row.refused { f64::INFINITY } else { row.lse_error };
                power[at] = output(&row, place, &mut o[at * width..(at + 1) * width]);
            }
        }
        (o, lse, power)
    };
    let heads = if e.queries == 0 { 0 } else { e.batch * e.query_heads };
    let heads: Vec<_> = (0..heads).into_par_iter().map(head).collect();
    let (mut o, mut lse, mut powers) = (Vec::new(), Vec::new(), Vec::new());
    for (of_o, of_lse, of_power) in heads {
        o.extend(of_o);
        lse.extend(of_lse);
        powers.extend(of_power.into_iter().filter(|power| !power.is_nan()));
    }
    let strong = powers.iter().filter(|&&power| power >= 4.0).count();
    let power = (!powers.is_empty()).then(|| strong as f64 / powers.len() as f64);
    Errors { lists: BTreeMap::from([("o", o), ("lse", lse)]), power }
}

/// What a pair adds to the gradients.
pub(super) struct PairTerms {
    /// Where the key lies in its array.
    pub key: usize,
    /// dS as it enters the product with k, before σ.
    pub by_query: Sum,
    /// The same for the product with q.
    pub by_key: Sum,
    /// The weight that multiplies dout, before the sum over queries, and what its storage may
    /// lose to underflow. None where no kernel adds to dv.
    pub weight: Option<(Sum, f64)>,
    /// dS, and its place among the biases of the head, where it has one.
    pub bias: Option<(Sum, usize)>,
}

/// What a row adds to the gradients. Reused from row to row.
#[derive(Default)]
pub(super) struct RowTerms {
    pub pairs: Vec<PairTerms>,
    /// γ of the sum over keys.
    pub gamma: f64,
    /// What it adds to the gradient of its head's sink or τ.
    pub head: Sum,
}

/// How the gradient of the bias lies: `size` numbers for each of the heads of each of the batch
/// elements, of which there is 1 where the bias is shared.
#[derive(Clone, Copy)]
pub(super) struct BiasLayout {
    pub batches: usize,
    pub heads: usize,
    pub size: usize,
}

/// The errors of the gradients before they are stored; those of a head and of the bias are not
/// added up yet.
pub(super) struct Gradients {
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
    pub by_head: Vec<Sum>,
    pub dbias: Vec<Sum>,
}

/// Every gradient's errors; the key heads in parallel, their results joined in order. `dout` is
/// absent where there are no values; `terms` fills in what a row adds.
pub(super) fn backward(
    operands: &ScoreOperands<'_>,
    dout: Option<Rows<'_>>,
    bias: BiasLayout,
    terms: impl Fn(&Row, Place<'_>, &mut RowTerms) + Sync,
) -> Gradients {
    let (e, group) = (&operands.scores.extents, operands.scores.group());
    let sequences = sequences(operands.scores);
    let sweep = Sweep { operands, sequences: &sequences, dout, bias_size: bias.size, terms };
    let mut all = Gradients {
        dq: Vec::new(),
        dk: Vec::new(),
        dv: Vec::new(),
        by_head: vec![Sum::default(); e.query_heads],
        dbias: vec![Sum::default(); bias.batches * bias.heads * bias.size],
    };
    let tasks: Vec<usize> = (0..e.batch * e.key_heads).collect();
    // A group's share of dbias may be as large as its scores: only as many at once as can run.
    for tasks in tasks.chunks(rayon::current_num_threads().max(1)) {
        let groups: Vec<Gradients> = tasks.par_iter().map(|&task| sweep.group(task)).collect();
        for (&task, found) in tasks.iter().zip(groups) {
            all.dq.extend(found.dq);
            all.dk.extend(found.dk);
            all.dv.extend(found.dv);
            let (batch, first) = (task / e.key_heads, task % e.key_heads * group);
            join(&mut all.by_head[first..], &found.by_head);
            for (head, found) in (first..).zip(found.dbias.chunks(bias.size.max(1))) {
                let batch = if bias.batches == 1 { 0 } else { batch };
                let head = if bias.heads == 1 { 0 } else { head };
                join(&mut all.dbias[(batch * bias.heads + head) * bias.size..], found);
            }
        }
    }
    all
}

fn join(sums: &mut [Sum], more: &[Sum]) {
    sums.iter_mut().zip(more).for_each(|(sum, &more)| sum.add(more));
}

/// The work on one key head of one batch element and on the query heads that share it.
struct Sweep<'a, F> {
    operands: &'a ScoreOperands<'a>,
    sequences: &'a [Sequence],
    dout: Option<Rows<'a>>,
    bias_size: usize,
    terms: F,
}

impl<F: Fn(&Row, Place<'_>, &mut RowTerms) + Sync> Sweep<'_, F> {
    fn group(&self, task: usize) -> Gradients {
        let (e, group) = (&self.operands.scores.extents, self.operands.scores.group());
        let (batch, first) = (task / e.key_heads, task % e.key_heads * group);
        let mut found = Gradients {
            dq: vec![0.0; group * e.queries * e.dim],
            dk: vec![0.0; e.keys * e.dim],
            dv: vec![0.0; e.keys * self.dout.map_or(0, |dout| dout.width)],
            by_head: vec![Sum::default(); group],
            dbias: vec![Sum::default(); group * self.bias_size],
        };
        let (mut row, mut terms) = (Row::default(), RowTerms::default());
        for sequence in of_batch(self.sequences, batch) {
            let gammas = self.key_gammas(sequence, first..first + group);
            for head in first..first + group {
                for i in 0..sequence.queries {
                    let place = Place { sequence, head, i };
                    self.operands.fill(&mut row, place);
                    terms.pairs.clear();
                    (self.terms)(&row, place, &mut terms);
                    self.add(&terms, place, head - first, &gammas, &mut found);
                }
            }
        }
        found
    }

    /// γ of the sums over the queries that see each key of a sequence (N17).
    fn key_gammas(&self, sequence: &Sequence, heads: Range<usize>) -> Vec<f64> {
        let mask = &self.operands.scores.mask;
        let gamma = |j| {
            let sees =
                |head| (0..sequence.queries).filter(|&i| mask.allows(sequence, head, i, j)).count();
            // A new accumulator for each tile of queries and for each head at the most.
            let terms = heads.clone().map(sees).sum();
            self.operands.model.gamma_by_parts(terms, heads.len() + 3)
        };
        (0..sequence.keys).map(gamma).collect()
    }

    /// Adds what one row, of head `h` of the group, gives to the errors of every gradient.
    fn add(
        &self,
        row: &RowTerms,
        place: Place<'_>,
        h: usize,
        gammas: &[f64],
        found: &mut Gradients,
    ) {
        let (operands, model) = (self.operands, self.operands.model);
        let e = &operands.scores.extents;
        let sigma = operands.scores.scale().abs();
        let q = operands.query(place);
        let dout = self.dout.map_or(&[][..], |dout| place.row(dout));
        let at = h * e.queries + place.sequence.query_start + place.i;
        let dq = &mut found.dq[at * e.dim..(at + 1) * e.dim];
        for pair in &row.pairs {
            let (key, gamma) = (pair.key, gammas[pair.key - place.sequence.key_start]);
            let to_query = sigma * (pair.by_query.error + row.gamma * pair.by_query.absolute);
            accumulate(dq, to_query, operands.key(place, key)); // (N15), (N47)
            let to_key = sigma * (pair.by_key.error + gamma * pair.by_key.absolute);
            accumulate(&mut found.dk[key * e.dim..(key + 1) * e.dim], to_key, q); // (N17), (N48)
            if let Some((weight, tiny)) = pair.weight {
                let error = weight.error + weight.absolute * (model.u_p + gamma) + tiny;
                let dv = &mut found.dv[key * dout.len()..(key + 1) * dout.len()];
                accumulate(dv, error, dout); // (N18), (N49)
            }
            if let Some((d_score, at)) = pair.bias {
                found.dbias[h * self.bias_size + at].add(d_score);
            }
        }
        let tiny = row.pairs.len() as f64 * model.eta;
        dq.iter_mut().for_each(|error| *error += floor(*error, tiny));
        found.by_head[h].add(row.head);
    }
}
