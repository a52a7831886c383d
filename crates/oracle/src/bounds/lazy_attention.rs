//! The bounds of lazy_attention: equations (N40) to (N51), after those of attention for the scores
//! and lse.

use super::heads::{self, BiasLayout, PairTerms, RowTerms};
use super::inputs::{Errors, Inputs, Rows};
use super::model::{Model, floor};
use super::scores::{self, Bias, Place, ScoreOperands};
use super::sum::{Sum, dots};
use etalon_problem::{DistanceBias, Error, LazyAttention, Pass};
use std::collections::BTreeMap;

/// The errors of the outputs of the forward or backward pass.
pub(super) fn errors(problem: &LazyAttention, inputs: &Inputs<'_>) -> Result<Errors, Error> {
    let bias = match problem.bias {
        Some(reach) => Bias::ByDistance(reach, inputs.needed("bias")?),
        None => Bias::None,
    };
    let weights = Weights {
        operands: ScoreOperands::new(&problem.scores, bias, inputs)?,
        tau: inputs.needed("tau")?.data,
        v: inputs.needed("v")?,
    };
    if inputs.pass == Pass::Forward {
        return Ok(heads::forward(&weights.operands, problem.value_dim, |row, place, errors| {
            weights.output(&weights.row(row, place.head), place, errors);
            f64::NAN
        }));
    }
    let (model, heads) = (inputs.model, problem.scores.extents.query_heads);
    let layout = BiasLayout { batches: 1, heads, size: problem.bias.map_or(0, |bias| bias.width) };
    let (dout, dlse) = (inputs.needed("dout")?, inputs.get("dlse"));
    let gradient =
        Gradient { reach: problem.bias, dout, dlse, o: inputs.needed("o")?, weights: &weights };
    let found = heads::backward(&weights.operands, Some(dout), layout, |row, place, terms| {
        gradient.terms(row, place, terms);
    });
    let chained = |sums: Vec<Sum>| -> Vec<f64> {
        // Each may pass through a partial of its own.
        let roundings = |sum: &Sum| sum.terms + model.rescales(sum.terms) + 3;
        sums.iter().map(|sum| sum.chained(model, roundings(sum))).collect()
    };
    let lists = BTreeMap::from([
        ("dq", found.dq),
        ("dk", found.dk),
        ("dv", found.dv),
        ("dbias", chained(found.dbias)),  // (N50)
        ("dtau", chained(found.by_head)), // (N51)
    ]);
    Ok(lists.into())
}

/// What the weights are made of, and the values.
struct Weights<'a> {
    operands: ScoreOperands<'a>,
    tau: &'a [f64],
    v: Rows<'a>,
}

/// The visible pairs of one query.
struct Row<'a> {
    softmax: &'a scores::Row,
    n: f64,
    pairs: Vec<Pair>,
}

/// A visible pair.
#[derive(Debug, Clone, Copy)]
struct Pair {
    key: usize,
    /// P.
    p: f64,
    /// Its error, (N10).
    p_error: f64,
    /// P + τ/n.
    raised: f64,
    /// max(P + τ/n, 0).
    e: f64,
    /// Its error, (N41); 0 where the pair is surely inactive.
    e_error: f64,
    /// P + |τ/n|: what e is a difference of.
    terms: f64,
    /// Whether some correct kernel holds it for active.
    may_be_active: bool,
    /// Whether rounding may decide either way.
    open: bool,
}

impl Pair {
    fn new(model: &Model, key: usize, (p, p_error): (f64, f64), offset: f64) -> Self {
        let (raised, terms) = (p + offset, p + offset.abs());
        // (N40): τ/n as a quotient or by 1/n, and the sum.
        let error = p_error + 2.0 * model.u * offset.abs() + model.u * terms;
        let error = error + floor(terms, model.eta);
        let reach = model.widened(error);
        let (active, inactive) = (raised > reach, raised < -reach);
        let (may_be_active, open) = (!inactive, !active && !inactive);
        let (e, e_error) = (raised.max(0.0), if inactive { 0.0 } else { error });
        Pair { key, p, p_error, raised, e, e_error, terms, may_be_active, open }
    }

    /// `x` where the activity is open, else 0.
    fn if_open(&self, x: f64) -> f64 {
        if self.open { x } else { 0.0 }
    }
}

impl Weights<'_> {
    fn row<'b>(&self, softmax: &'b scores::Row, head: usize) -> Row<'b> {
        let (model, n) = (self.operands.model, softmax.pairs.len() as f64);
        let pair = |pair: &scores::Pair| {
            let p = (pair.p, softmax.recomputed(model, pair, 0.0));
            Pair::new(model, pair.key, p, self.tau[head] / n)
        };
        Row { softmax, n, pairs: softmax.pairs.iter().map(pair).collect() }
    }

    /// (N42): adds the errors of one row of o.
    fn output(&self, row: &Row<'_>, place: Place<'_>, errors: &mut [f64]) {
        let model = self.operands.model;
        for pair in row.pairs.iter().filter(|pair| pair.may_be_active) {
            let weight = pair.e_error
                + row.softmax.gamma * pair.terms
                + model.u_p * (pair.e + pair.e_error)
                + model.eta_p;
            let v = self.operands.shared(self.v, place, pair.key);
            for (error, v) in errors.iter_mut().zip(v) {
                *error += weight * v.abs() + floor(v.abs(), model.eta);
            }
        }
    }
}

/// The backward pass.
struct Gradient<'a> {
    weights: &'a Weights<'a>,
    reach: Option<DistanceBias>,
    dout: Rows<'a>,
    dlse: Option<Rows<'a>>,
    o: Rows<'a>,
}

/// What the gradients of a row know of it.
struct RowGradient {
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

impl Gradient<'_> {
    /// What a row adds to the gradients.
    fn terms(&self, softmax: &scores::Row, place: Place<'_>, terms: &mut RowTerms) {
        let operands = &self.weights.operands;
        let model = operands.model;
        let row = self.weights.row(softmax, place.head);
        terms.gamma = model.gamma_by_parts(row.pairs.len(), 3);
        terms.head = Sum::default();
        if row.pairs.is_empty() {
            return;
        }
        let gradient = self.gradient(&row, place);
        for (pair, &g) in row.pairs.iter().zip(&gradient.g) {
            let d_score = gradient.d_score(model, pair, g);
            let stored = operands.stored(d_score);
            let weight = Sum::term(pair.e_error, pair.e + pair.e_error);
            let j = pair.key - place.sequence.key_start;
            let distance = self.reach.and_then(|r| r.distance(place.sequence, place.i, j));
            terms.pairs.push(PairTerms {
                key: pair.key,
                by_query: stored,
                by_key: stored,
                weight: pair.may_be_active.then_some((weight, model.eta_p)), // (N49)
                bias: distance.map(|d| (d_score, d)),
            });
        }
        terms.head = gradient.of_tau(model, &row);
    }

    /// (N43), (N44).
    fn gradient(&self, row: &Row<'_>, place: Place<'_>) -> RowGradient {
        let Weights { operands, v, .. } = self.weights;
        let model = operands.model;
        let (dout, o) = (place.row(self.dout), place.row(self.o));
        let gamma = model.gamma(v.width + 1);
        let dlse = self.dlse.map_or(0.0, |dlse| place.row(dlse)[0]);
        let mut found =
            RowGradient { g: Vec::new(), gamma, delta: 0.0, delta_error: 0.0, dlse, open: 0.0 };
        for pair in &row.pairs {
            if !pair.may_be_active {
                found.g.push((0.0, 0.0));
                continue;
            }
            let (g, size) = dots(dout, operands.shared(*v, place, pair.key));
            found.g.push((g, size));
            if pair.raised > 0.0 {
                found.delta += pair.p * g;
            }
            found.open += pair.if_open(pair.p * g.abs());
            // By (E8), or by (E16) from o and the sum of the active values.
            let moved = (pair.p_error + 3.0 * model.u * pair.terms) * (g.abs() + gamma * size);
            let rounded = (row.softmax.gamma + gamma) * pair.terms
                + model.u_p * (pair.e + pair.e_error)
                + model.eta_p;
            found.delta_error += moved + rounded * size + floor(size, v.width as f64 * model.eta);
        }
        if found.delta_error > 0.0 {
            let (_, absolute) = dots(dout, o);
            found.delta_error += model.stored_product(dout, o)
                + gamma * absolute
                + 2.0 * model.u * (absolute + found.delta.abs());
        }
        found
    }
}

impl RowGradient {
    /// dS with its error, (N45) and (N46).
    fn d_score(&self, model: &Model, pair: &Pair, (g, size): (f64, f64)) -> Sum {
        let flipped = pair.if_open(pair.p * g.abs());
        // What (E9) and (E17) add up.
        let size_of_all = g.abs() + self.delta.abs() + self.open + self.dlse.abs();
        let error = self.gamma * size + self.delta_error + 3.0 * model.u * size_of_all;
        let flips = pair.p * (self.open - flipped) + (1.0 - pair.p).max(0.0) * flipped; // (N46)
        let error = pair.p_error * (size_of_all + error)
            + pair.p * error
            + 2.0 * model.u * pair.p * size_of_all
            + flips
            + floor(size_of_all + error, model.eta);
        Sum::term(error, pair.p * size_of_all)
    }

    /// (1/n) Σ g over the active pairs, with its error.
    fn of_tau(&self, model: &Model, row: &Row<'_>) -> Sum {
        let mut sum = Sum::term(0.0, 0.0);
        for (pair, (g, size)) in row.pairs.iter().zip(&self.g) {
            let chain = row.softmax.gamma + self.gamma + 2.0 * model.u;
            sum.error += (chain * size + floor(*size, model.eta)) / row.n;
            sum.absolute += size / row.n;
            sum.error += pair.if_open(g.abs()) / row.n;
        }
        sum
    }
}
