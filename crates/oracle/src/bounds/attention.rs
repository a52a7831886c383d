//! The bounds of attention and attention_lse: equations (N8) and (N11) to (N20).

use super::heads::{self, BiasLayout, PairTerms, RowTerms};
use super::inputs::{Errors, Inputs, Rows};
use super::model::floor;
use super::scores::{Bias, Pair, Place, Row, ScoreOperands};
use super::sum::{Sum, dots};
use etalon_problem::{Error, Pass, Scores};
use std::collections::BTreeMap;

/// The errors of the outputs of the forward or backward pass: of attention, whose values have
/// `value_dim` elements, or of attention_lse, which has none.
pub(super) fn errors(
    scores: &Scores,
    value_dim: Option<usize>,
    inputs: &Inputs<'_>,
) -> Result<Errors, Error> {
    let bias = match (scores.bias, inputs.get("bias")) {
        (Some(extents), Some(bias)) => Bias::ByPair(bias, [extents.batch, extents.heads]),
        _ => Bias::None,
    };
    let operands = ScoreOperands::new(scores, bias, inputs)?;
    let values = match value_dim {
        Some(_) => Some([inputs.needed("v")?, inputs.needed("o")?]),
        None => None,
    };
    if inputs.pass == Pass::Forward {
        let output = |row: &Row, place: Place<'_>, errors: &mut [f64]| {
            values.map_or(f64::NAN, |values| output(&operands, values, row, place, errors))
        };
        return Ok(heads::forward(&operands, value_dim.unwrap_or(0), output));
    }
    let dout = if values.is_some() { Some(inputs.needed("dout")?) } else { None };
    let layout = scores.bias.map_or(BiasLayout { batches: 1, heads: 1, size: 0 }, |bias| {
        let size = scores.extents.queries * scores.extents.keys;
        BiasLayout { batches: bias.batch, heads: bias.heads, size }
    });
    let gradient = Gradient { operands, dlse: inputs.get("dlse"), values: values.zip(dout) };
    let terms =
        |row: &Row, place: Place<'_>, terms: &mut RowTerms| gradient.terms(row, place, terms);
    Ok(gradients(&operands, layout, heads::backward(&operands, dout, layout, terms)))
}

/// Joins the sums of the heads and of the biases.
fn gradients(operands: &ScoreOperands<'_>, bias: BiasLayout, found: heads::Gradients) -> Errors {
    let e = &operands.scores.extents;
    let copies = e.batch / bias.batches.max(1) * (e.query_heads / bias.heads.max(1));
    let chained = |sums: Vec<Sum>, roundings: usize| -> Vec<f64> {
        sums.iter().map(|sum| sum.chained(operands.model, roundings)).collect()
    };
    let lists = BTreeMap::from([
        ("dq", found.dq),
        ("dk", found.dk),
        ("dv", found.dv),
        ("dsinks", chained(found.by_head, e.batch * e.queries + 2)), // (N19)
        ("dbias", chained(found.dbias, copies)),                     // (N20)
    ]);
    lists.into()
}

/// (N8): adds the errors of one row of o. Returns how far the row moves when its last visible key is
/// forgotten, in bounds: the power of the bound against a mask that is wrong by one.
fn output(
    operands: &ScoreOperands<'_>,
    [v, o]: [Rows<'_>; 2],
    row: &Row,
    place: Place<'_>,
    errors: &mut [f64],
) -> f64 {
    let (model, o) = (operands.model, place.row(o));
    let Some(last) = row.pairs.last() else {
        return f64::NAN; // nothing to sum: o = 0 exactly
    };
    if row.refused {
        errors.fill(f64::INFINITY);
    } else {
        for pair in &row.pairs {
            let rounded = pair.p * (row.gamma + model.u_p) + model.eta_p;
            let v = operands.shared(v, place, pair.key);
            for ((error, &v), &o) in errors.iter_mut().zip(v).zip(o) {
                *error += pair.p_error * (v - o).abs() + rounded * v.abs();
            }
        }
        for (error, &o) in errors.iter_mut().zip(o) {
            *error += (row.pi_error + row.gamma + 2.0 * model.u) * o.abs();
            *error *= row.normalised();
            *error += floor(*error, row.pairs.len() as f64 * model.eta);
        }
    }
    if row.pairs.len() < 2 {
        return f64::NAN;
    }
    let v = operands.shared(v, place, last.key).iter().zip(o).zip(errors);
    let moves = v.map(|((v, o), error)| last.p / (1.0 - last.p) * (v - o).abs() / *error);
    moves.fold(f64::NAN, f64::max)
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

/// The backward pass.
struct Gradient<'a> {
    operands: ScoreOperands<'a>,
    dlse: Option<Rows<'a>>,
    /// v and o, and dout; attention_lse has none.
    values: Option<([Rows<'a>; 2], Rows<'a>)>,
}

impl Gradient<'_> {
    /// What a row adds to the gradients.
    fn terms(&self, row: &Row, place: Place<'_>, terms: &mut RowTerms) {
        let (model, scores) = (self.operands.model, self.operands.scores);
        let delta = self.delta(row, place);
        let seen = row.pairs.len();
        terms.gamma = model.gamma_by_parts(seen, 3);
        if self.values.is_none() {
            // attention_lse may take Σ_j P S′ k_j from its forward pass (N16).
            terms.gamma = terms.gamma.max(2.0 * (row.gamma + 3.0 * model.u));
        }
        for (index, pair) in row.pairs.iter().enumerate() {
            let weight = row.recomputed(model, pair, 0.0);
            let (d_score, by_key) = self.products(pair, index, weight, &delta);
            let by_query = match self.values {
                Some(_) => by_key,
                None => {
                    let weight = row.recomputed(model, pair, row.streamed(model, pair));
                    self.products(pair, index, weight, &delta).1
                }
            };
            let bias = (place.sequence.query_start + place.i) * scores.extents.keys + pair.key;
            terms.pairs.push(PairTerms {
                key: pair.key,
                by_query,
                by_key,
                weight: Some((Sum::term(weight, pair.p), floor(pair.p, model.eta_p))),
                bias: scores.bias.map(|_| (d_score, bias)),
            });
        }
        terms.head = Sum::default();
        if row.sink > f64::NEG_INFINITY {
            // π_i δ_i (N19)
            let (size, weight) = (delta.value.abs(), row.recomputed_sink(model));
            let error = weight * (size + delta.error)
                + row.pi * delta.error
                + 2.0 * model.u * row.pi * size;
            terms.head = Sum::term(error, row.pi * size);
        }
    }

    /// (N11) and (N12).
    fn delta(&self, row: &Row, place: Place<'_>) -> Delta {
        let model = self.operands.model;
        let dlse = self.dlse.map_or(0.0, |dlse| place.row(dlse)[0]);
        let mut delta = Delta { value: -dlse, error: 0.0, dp: Vec::new(), dot_gamma: 0.0 };
        let Some(([v, o], dout)) = self.values else { return delta };
        let (dout, o) = (place.row(dout), place.row(o));
        let (product, absolute) = dots(dout, o);
        delta.value += product;
        delta.dot_gamma = model.gamma(v.width + 1);
        let (mut streamed, mut rounded) = (row.pi_error * product.abs(), 0.0);
        for pair in &row.pairs {
            let (dp, size) = dots(dout, self.operands.shared(v, place, pair.key));
            streamed += pair.p_error * (dp - product).abs();
            rounded += (pair.p * (row.gamma + model.u_p) + model.eta_p) * size;
            delta.dp.push((dp, size));
        }
        let own = (streamed + rounded + (row.gamma + 2.0 * model.u) * absolute) * row.normalised();
        delta.error = own
            + model.stored_product(dout, o)
            + delta.dot_gamma * absolute
            + model.u * (dlse.abs() + delta.value.abs())
            + floor(absolute, v.width as f64 * model.eta);
        if row.refused && !row.pairs.is_empty() {
            delta.error = f64::INFINITY;
        }
        delta
    }

    /// dS (N13), and ds as it enters the products with q and k (N14), where the weight errs by so
    /// much.
    fn products(&self, pair: &Pair, index: usize, weight: f64, delta: &Delta) -> (Sum, Sum) {
        let model = self.operands.model;
        let p = pair.p;
        let (dp, size) = delta.dp.get(index).copied().unwrap_or((0.0, 0.0));
        let width = self.values.map_or(0, |([v, _], _)| v.width);
        let difference = (dp - delta.value).abs();
        let inner = delta.dot_gamma * size
            + floor(size, width as f64 * model.eta)
            + delta.error
            + model.u * difference;
        let error = weight * (difference + inner)
            + p * inner
            + 2.0 * model.u * p * difference
            + floor(difference + inner, model.eta);
        let d_score = Sum::term(error, p * difference);
        let absolute = pair.slope * d_score.absolute;
        let error = pair.slope * error + pair.slope_error * (d_score.absolute + error);
        (d_score, self.operands.stored(Sum::term(error, absolute)))
    }
}
