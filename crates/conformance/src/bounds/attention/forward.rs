//! The bounds of o and lse: equations (N8) and (N9).

use super::row::{Operands, Row};
use crate::bounds::model::{Model, floor};
use rayon::prelude::*;

/// The values of attention with the results of the reference.
#[derive(Clone, Copy)]
pub(super) struct Values<'a> {
    pub v: &'a [f64],
    pub o: &'a [f64],
    pub dim: usize,
}

impl<'a> Values<'a> {
    /// The value at array position `key`, as query head `head` sees it.
    pub fn value(
        &self,
        operands: &Operands<'_>,
        batch: usize,
        head: usize,
        key: usize,
    ) -> &'a [f64] {
        let e = &operands.scores.extents;
        let row = (batch * e.key_heads + head / operands.scores.group()) * e.keys + key;
        &self.v[row * self.dim..(row + 1) * self.dim]
    }
}

/// The errors of o and lse before they are stored. `lse` is the reference's.
pub(super) struct Errors {
    pub o: Vec<f64>,
    pub lse: Vec<f64>,
    /// Per row: by how many bounds the largest change of an element exceeds its bound when the
    /// last visible key is dropped; NaN where that says nothing.
    pub power: Vec<f64>,
}

/// Every row's errors, heads in parallel.
pub(super) fn errors(
    operands: &Operands<'_>,
    model: &Model,
    lse: &[f64],
    values: Option<Values<'_>>,
) -> Errors {
    let e = &operands.scores.extents;
    let width = values.map_or(0, |values| values.dim);
    let rows = e.batch * e.query_heads * e.queries;
    let mut errors =
        Errors { o: vec![0.0; rows * width], lse: vec![0.0; rows], power: vec![f64::NAN; rows] };
    if rows == 0 {
        return errors;
    }
    let sequences = operands.scores.sequences();
    let head_o = (e.queries * width).max(1);
    // Without values there is nothing to cut into heads; an empty slice stands for each.
    let mut o_heads: Vec<&mut [f64]> = errors.o.chunks_mut(head_o).collect();
    o_heads.resize_with(e.batch * e.query_heads, Default::default);
    o_heads
        .into_par_iter()
        .zip(errors.lse.par_chunks_mut(e.queries))
        .zip(errors.power.par_chunks_mut(e.queries))
        .enumerate()
        .for_each(|(index, ((o, lse_errors), power))| {
            let (batch, head) = (index / e.query_heads, index % e.query_heads);
            let lse = &lse[index * e.queries..(index + 1) * e.queries];
            let mut row = Row::default();
            for sequence in sequences.iter().filter(|sequence| sequence.batch == batch) {
                for i in 0..sequence.queries {
                    let at = sequence.query_start + i;
                    operands.fill(&mut row, model, (sequence, head, i), lse[at]);
                    lse_errors[at] = if row.refused { f64::INFINITY } else { row.lse_error };
                    if let Some(values) = values {
                        let errors = &mut o[at * width..(at + 1) * width];
                        let first = (index * e.queries + at) * width;
                        let o = &values.o[first..first + width];
                        output(operands, model, &row, values, (batch, head), o, errors);
                        power[at] = dropping(operands, &row, values, (batch, head), o, errors);
                    }
                }
            }
        });
    errors
}

/// (N8): the error of one row of o.
fn output(
    operands: &Operands<'_>,
    model: &Model,
    row: &Row,
    values: Values<'_>,
    (batch, head): (usize, usize),
    o: &[f64],
    errors: &mut [f64],
) {
    if row.key.is_empty() {
        return; // nothing to sum: o = 0 exactly
    }
    if row.refused {
        errors.fill(f64::INFINITY);
        return;
    }
    for (index, &key) in row.key.iter().enumerate() {
        let moved = row.p_error[index];
        let rounded = row.p[index] * (row.gamma + model.u_p()) + model.eta_p();
        let v = values.value(operands, batch, head, key);
        for ((error, &v), &o) in errors.iter_mut().zip(v).zip(o) {
            *error += moved * (v - o).abs() + rounded * v.abs();
        }
    }
    for (error, &o) in errors.iter_mut().zip(o) {
        *error += (row.pi_error + row.gamma + 2.0 * model.u) * o.abs();
        *error *= row.normalised();
        *error += floor(*error, row.key.len() as f64 * model.eta);
    }
}

/// How far o moves when the last visible key is forgotten, in bounds: the power of the bound
/// against a mask that is wrong by one.
fn dropping(
    operands: &Operands<'_>,
    row: &Row,
    values: Values<'_>,
    (batch, head): (usize, usize),
    o: &[f64],
    errors: &[f64],
) -> f64 {
    let (Some(&key), Some(&p)) = (row.key.last(), row.p.last()) else { return f64::NAN };
    if row.key.len() < 2 {
        return f64::NAN;
    }
    let v = values.value(operands, batch, head, key);
    let moves =
        v.iter().zip(o).zip(errors).map(|((v, o), error)| p / (1.0 - p) * (v - o).abs() / error);
    moves.fold(f64::NAN, f64::max)
}
