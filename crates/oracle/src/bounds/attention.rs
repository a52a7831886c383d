//! The bounds of attention and attention_lse: equations (N8) and (N11) to (N20).

use super::heads::{self, PairTerms, RowTerms};
use super::inputs::{Errors, Inputs};
use super::model::{floor, spread};
use super::scores::{Average, Hull, Operands, Pair, Row};
use super::sum::{Sum, dots};
use etalon_problem::{Pass, Scores};

/// The errors of the outputs of the forward or backward pass: of attention, or of attention_lse,
/// which has no values.
pub(super) fn errors(scores: &Scores, inputs: &Inputs<'_>) -> Errors {
    let operands = Operands::new(scores, None, inputs);
    if inputs.pass == Pass::Forward {
        return heads::forward(&operands, |row, errors| {
            output(row, row.place.row(operands.o), errors)
        });
    }
    let e = &scores.extents;
    let copies = operands.bias.map_or(0, |bias| bias.copies(e));
    let found = heads::backward(&operands, terms);
    found.into_errors(inputs.model, ("dsinks", |_| e.batch * e.queries + 2), |_| copies)
}

/// (N8): adds the errors of one row `o`. Returns how far the row moves when its last visible key is
/// forgotten, in bounds: the power of the bound against a mask that is wrong by one.
pub(super) fn output(row: &Row<'_>, o: &[f64], errors: &mut [f64]) -> f64 {
    let (place, operands) = (row.place, row.place.operands);
    let model = operands.model;
    let Some(last) = row.pairs.last() else {
        return f64::NAN; // nothing to sum: o = 0 exactly
    };
    if row.overflows {
        errors.fill(f64::INFINITY);
    } else {
        let mut rounded = vec![0.0; o.len()];
        for pair in &row.pairs {
            let (v, weight) = (place.shared(operands.v, pair.key), row.rounded(model, pair));
            for (((apart, rounded), &v), &o) in errors.iter_mut().zip(&mut rounded).zip(v).zip(o) {
                *apart += pair.p_error * (v - o).abs();
                *rounded += weight * v.abs();
            }
        }
        let hulls = row.rough.then(|| hulls(row));
        for (c, (error, rounded)) in errors.iter_mut().zip(rounded).enumerate() {
            let hull = hulls.as_ref().map(|hulls| hulls[c]);
            let average = Average { value: o[c], apart: *error, rounded, hull };
            *error = row.average(model, &average, o[c].abs());
            *error += floor(*error, row.pairs.len() as f64 * model.eta);
        }
    }
    if row.pairs.len() < 2 {
        return f64::NAN;
    }
    let v = place.shared(operands.v, last.key).iter().zip(o).zip(errors);
    let moves = v.map(|((v, o), error)| last.p / (1.0 - last.p) * (v - o).abs() / *error);
    moves.fold(f64::NAN, f64::max)
}

/// Of each column of the values that a row sees.
fn hulls(row: &Row<'_>) -> Vec<Hull> {
    let v = row.place.operands.v;
    let mut hulls = vec![Hull::EMPTY; v.width];
    for pair in &row.pairs {
        hulls.iter_mut().zip(row.place.shared(v, pair.key)).for_each(|(hull, &v)| hull.add(v));
    }
    hulls
}

/// Terms that a row adds to the gradients.
fn terms(row: &Row<'_>) -> RowTerms {
    let (operands, delta) = (row.place.operands, Delta::new(row));
    let (model, alone) = (operands.model, operands.v.width == 0);
    let mut gamma = model.gamma_by_parts(row.pairs.len(), 3);
    if alone {
        // attention_lse may take Σ_j P S′ k_j from its forward pass (N16).
        let own = row.gamma + 3.0 * model.u;
        gamma = gamma.max(own * (2.0 + own));
    }
    let pair = |(index, pair): (usize, &Pair)| {
        let weight = row.recomputed(model, pair, 0.0);
        let (d_score, by_key) = delta.products(pair, index, weight);
        let by_query = if alone {
            let weight = row.recomputed(model, pair, row.streamed(model, pair));
            delta.products(pair, index, weight).1
        } else {
            by_key
        };
        let weight = Some((Sum::term(weight, pair.p), floor(pair.p, model.eta_p)));
        PairTerms { key: pair.key, d_score, by_query, by_key, weight }
    };
    let pairs = row.pairs.iter().enumerate().map(pair).collect();
    let mut head = Sum::default();
    if row.sink > f64::NEG_INFINITY {
        // π_i δ_i (N19)
        let (size, weight) = (delta.value.abs(), row.recomputed_sink(model));
        let stored = if model.score.u > 0.0 { model.u_ds } else { 0.0 };
        let error = spread(weight, size + delta.error)
            + spread(row.pi, delta.error)
            + (2.0 * model.u + stored) * row.pi * size;
        head = Sum::term(error, row.pi * size);
    }
    RowTerms { pairs, gamma, head }
}

/// δ of a row, and the products dout·v of its visible pairs.
pub(super) struct Delta<'a> {
    operands: &'a Operands<'a>,
    value: f64,
    error: f64,
    /// γ of the sum over the elements of a value.
    dot_gamma: f64,
    /// dP and Σ_c |dout_c v_c|.
    dp: Vec<(f64, f64)>,
}

impl<'a> Delta<'a> {
    /// (N11), (N12) and (N85).
    pub fn new(row: &Row<'a>) -> Self {
        let (place, operands) = (row.place, row.place.operands);
        let (model, dlse, dp) = (operands.model, place.dlse(), Vec::new());
        let mut delta = Delta { operands, value: -dlse, error: 0.0, dp, dot_gamma: 0.0 };
        if operands.v.width == 0 {
            return delta;
        }
        let (dout, o) = (place.row(operands.dout), place.row(operands.o));
        let (product, absolute) = dots(dout, o);
        delta.value += product;
        delta.dot_gamma = model.gamma(dout.len() + 1);
        let (mut apart, mut rounded, mut hull) = (0.0, 0.0, Hull::EMPTY);
        let (mut grown, mut most) = (0.0, 0.0f64); // Σ e w, and the largest w
        // δ = Σ P dP, of weights that are made again (N85).
        let (mut summed, mut overflows) = (0.0, row.overflows);
        for pair in &row.pairs {
            let (dp, size) = dots(dout, place.shared(operands.v, pair.key));
            apart += pair.p_error * (dp - product).abs();
            rounded += row.rounded(model, pair) * size;
            hull.add(dp);
            grown += pair.p_error * size;
            most = most.max(size);
            overflows |= size > model.limit;
            let tiny = floor(size, dout.len() as f64 * model.eta);
            let dp_error = delta.dot_gamma * size + tiny + model.dp.error(dp.abs());
            let weight = row.recomputed(model, pair, 0.0);
            let chain = (pair.p + weight) * model.rounded_weight(row.gamma) + model.eta_p;
            summed += spread(weight, dp.abs() + dp_error) + pair.p * dp_error + spread(chain, size);
            delta.dp.push((dp, size));
        }
        // Σ_c |dout_c õ_c|: errors of o that cancel in dout·o are rounded all the same.
        let size = row.largest_size(absolute, grown, most);
        let hull = row.rough.then_some(hull);
        let average = Average { value: product, apart, rounded, hull };
        let stored = model.stored_product(dout, o) + model.storage_error(size - absolute);
        let from_output = row.average(model, &average, size)
            + stored
            + delta.dot_gamma * size
            + floor(size, dout.len() as f64 * model.eta);
        delta.error = from_output.max(summed) + model.u * (dlse.abs() + delta.value.abs());
        if overflows {
            delta.error = f64::INFINITY;
        }
        delta
    }

    /// dS (N13), and ds as it enters the products with q and k (N14), where the weight errs by so
    /// much.
    pub fn products(&self, pair: &Pair, index: usize, weight: f64) -> (Sum, Sum) {
        let (operands, model, p) = (self.operands, self.operands.model, pair.p);
        let (dp, size) = self.dp.get(index).copied().unwrap_or((0.0, 0.0));
        let difference = (dp - self.value).abs();
        let inner = self.dot_gamma * size
            + floor(size, operands.v.width as f64 * model.eta)
            + model.dp.error(dp.abs()) // (N92)
            + self.error
            + model.u * difference;
        let error = spread(weight, difference + inner)
            + spread(p, inner)
            + 2.0 * model.u * p * difference
            + floor(difference + inner, model.eta);
        // The dS that dbias is the sum of is stored where every step is.
        let stored = if model.score.u > 0.0 { model.u_ds * p * difference } else { 0.0 };
        let d_score = Sum::term(error + stored, p * difference);
        let absolute = pair.slope * d_score.absolute;
        let error = spread(pair.slope, error) + spread(pair.slope_error, d_score.absolute + error);
        (d_score, operands.stored(Sum::term(error, absolute)))
    }
}
