//! The bounds of lazy_attention: equations (N40) to (N51), after those of attention for the scores
//! and lse.

use super::heads::{self, PairTerms, RowTerms};
use super::inputs::{Errors, Inputs};
use super::model::{Model, floor, spread};
use super::scores::{self, Operands, Row};
use super::sum::{Sum, dots};
use etalon_problem::{LazyAttention, Pass};

/// The errors of the outputs of the forward or backward pass.
pub(super) fn errors(problem: &LazyAttention, inputs: &Inputs<'_>) -> Errors {
    let operands = Operands::new(&problem.scores, problem.bias, inputs);
    let tau = inputs.rows("tau").data;
    let pairs = |row: &Row<'_>| pairs(inputs.model, row, tau[row.place.head]);
    if inputs.pass == Pass::Forward {
        return heads::forward(&operands, |row, errors| {
            output(row, &pairs(row), errors);
            f64::NAN
        });
    }
    let found = heads::backward(&operands, |row| Gradient::new(row, &pairs(row)).terms());
    // Each term may pass through a partial of its own.
    let roundings = |sum: &Sum| sum.terms + inputs.model.profile.rescales(sum.terms) + 3;
    found.into_errors(inputs.model, ("dtau", roundings), roundings)
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
    /// P + |τ/n|: the sizes of the two terms of e, added up.
    terms: f64,
    /// True where some correct kernel takes it for active.
    may_be_active: bool,
    /// True where rounding may decide either way.
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

/// The visible pairs of a row.
fn pairs(model: &Model, row: &Row<'_>, tau: f64) -> Vec<Pair> {
    let offset = tau / row.pairs.len() as f64;
    let pair = |pair: &scores::Pair| {
        Pair::new(model, pair.key, (pair.p, row.recomputed(model, pair, 0.0)), offset)
    };
    row.pairs.iter().map(pair).collect()
}

/// (N42): adds the errors of one row of o.
fn output(row: &Row<'_>, pairs: &[Pair], errors: &mut [f64]) {
    let Operands { model, v, .. } = *row.place.operands;
    for pair in pairs.iter().filter(|pair| pair.may_be_active) {
        let weight = pair.e_error
            + row.gamma * (pair.terms + pair.e_error)
            + model.u_p * (pair.e + pair.e_error)
            + model.eta_p;
        for (error, v) in errors.iter_mut().zip(row.place.shared(v, pair.key)) {
            *error += weight * v.abs() + floor(v.abs(), model.eta);
        }
    }
}

/// Figures of a row that its gradients are made of.
struct Gradient<'a> {
    row: &'a Row<'a>,
    pairs: &'a [Pair],
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

impl<'a> Gradient<'a> {
    /// (N43), (N44).
    fn new(row: &'a Row<'_>, pairs: &'a [Pair]) -> Self {
        let (place, operands) = (row.place, row.place.operands);
        let (model, dlse) = (operands.model, place.dlse());
        let (dout, o) = (place.row(operands.dout), place.row(operands.o));
        let gamma = model.gamma(dout.len() + 1);
        let (g, delta, delta_error, open) = (Vec::new(), 0.0, 0.0, 0.0);
        let mut grown = 0.0; // Σ ε w: by how much Σ_c |dout_c o_c| may grow
        let mut found = Gradient { row, pairs, g, gamma, delta, delta_error, dlse, open };
        for pair in pairs {
            if !pair.may_be_active {
                found.g.push((0.0, 0.0));
                continue;
            }
            let (g, size) = dots(dout, place.shared(operands.v, pair.key));
            found.g.push((g, size));
            if pair.raised > 0.0 {
                found.delta += pair.p * g;
            }
            found.open += pair.if_open(pair.p * g.abs());
            // By (E8), or by (E16) from o and the sum of the active values.
            let moved = spread(pair.p_error + 3.0 * model.u * pair.terms, g.abs() + gamma * size);
            let rounded = (row.gamma + gamma) * (pair.terms + pair.e_error)
                + model.u_p * (pair.e + pair.e_error)
                + model.eta_p;
            // A dP that is stored (N92).
            let kept = (pair.terms + pair.e_error) * model.dp.error(g.abs());
            found.delta_error +=
                moved + kept + spread(rounded, size) + floor(size, dout.len() as f64 * model.eta);
            grown += spread(pair.e_error, size);
        }
        if found.delta_error > 0.0 {
            let (_, absolute) = dots(dout, o);
            found.delta_error += model.stored_product(dout, o)
                + model.storage_error(grown)
                + gamma * (absolute + grown)
                + 2.0 * model.u * (absolute + found.delta.abs());
        }
        found
    }

    /// Terms that the row adds to the gradients.
    fn terms(&self) -> RowTerms {
        let (pairs, operands) = (self.pairs, self.row.place.operands);
        let model = operands.model;
        let pair = |(pair, &g): (&Pair, _)| {
            let d_score = self.d_score(model, pair, g);
            let stored = operands.stored(d_score);
            let weight = Sum::term(pair.e_error, pair.e + pair.e_error);
            let weight = pair.may_be_active.then_some((weight, model.eta_p)); // (N49)
            PairTerms { key: pair.key, d_score, by_query: stored, by_key: stored, weight }
        };
        RowTerms {
            pairs: pairs.iter().zip(&self.g).map(pair).collect(),
            gamma: model.gamma_by_parts(pairs.len(), 3),
            head: self.of_tau(model),
        }
    }

    /// dS with its error, (N45) and (N46).
    fn d_score(&self, model: &Model, pair: &Pair, (g, size): (f64, f64)) -> Sum {
        let flipped = pair.if_open(pair.p * g.abs());
        // Sizes of the terms that (E9) and (E17) add up.
        let size_of_all = g.abs() + self.delta.abs() + self.open + self.dlse.abs();
        let error = self.gamma * size
            + model.dp.error(g.abs())
            + self.delta_error
            + 3.0 * model.u * size_of_all;
        // The dS that dbias is the sum of is stored where every step is.
        let stored = if model.score.u > 0.0 { model.u_ds } else { 0.0 };
        let flips = pair.p * (self.open - flipped) + (1.0 - pair.p).max(0.0) * flipped; // (N46)
        let error = spread(pair.p_error, size_of_all + error)
            + spread(pair.p, error)
            + (2.0 * model.u + stored) * pair.p * size_of_all
            + flips
            + floor(size_of_all + error, model.eta);
        Sum::term(error, pair.p * size_of_all)
    }

    /// (1/n) Σ g over the active pairs, with its error.
    fn of_tau(&self, model: &Model) -> Sum {
        let n = self.pairs.len() as f64;
        let mut sum = Sum { terms: self.pairs.len().min(1), ..Sum::default() };
        for (pair, (g, size)) in self.pairs.iter().zip(&self.g) {
            let chain = self.row.gamma + self.gamma + 2.0 * model.u;
            sum.error += (chain * size + model.dp.error(g.abs()) + floor(*size, model.eta)) / n;
            sum.absolute += size / n;
            sum.error += pair.if_open(g.abs()) / n;
        }
        sum
    }
}
