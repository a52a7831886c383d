//! The bounds of o and lse: equations (N42) and (N9).

use super::row::{Operands, Row};
use crate::bounds::model::floor;
use rayon::prelude::*;

/// The errors of o and lse before they are stored.
pub(super) struct Errors {
    pub o: Vec<f64>,
    pub lse: Vec<f64>,
}

/// Every row's errors, heads in parallel.
pub(super) fn errors(operands: &Operands<'_>) -> Errors {
    let e = operands.scores().extents;
    let width = operands.problem.value_dim;
    let rows = e.batch * e.query_heads * e.queries;
    let mut errors = Errors { o: vec![0.0; rows * width], lse: vec![0.0; rows] };
    if rows == 0 {
        return errors;
    }
    let sequences = operands.scores().sequences();
    errors
        .o
        .par_chunks_mut(e.queries * width)
        .zip(errors.lse.par_chunks_mut(e.queries))
        .enumerate()
        .for_each(|(index, (o, lse))| {
            let (batch, head) = (index / e.query_heads, index % e.query_heads);
            let mut row = Row::default();
            for sequence in sequences.iter().filter(|sequence| sequence.batch == batch) {
                for i in 0..sequence.queries {
                    let at = sequence.query_start + i;
                    operands.fill(&mut row, (sequence, head, i), index * e.queries + at);
                    let softmax = &row.softmax;
                    lse[at] = if softmax.refused { f64::INFINITY } else { softmax.lse_error };
                    output(operands, &row, (batch, head), &mut o[at * width..(at + 1) * width]);
                }
            }
        });
    errors
}

/// (N42): the error of one row of o.
fn output(operands: &Operands<'_>, row: &Row, (batch, head): (usize, usize), errors: &mut [f64]) {
    let model = operands.model;
    let seen = row.softmax.key.iter().zip(&row.pairs);
    for (&key, pair) in seen.filter(|(_, pair)| pair.may_be_active()) {
        let weight = pair.e_error
            + row.softmax.gamma * pair.terms
            + model.u_p() * (pair.e + pair.e_error)
            + model.eta_p();
        for (error, v) in errors.iter_mut().zip(operands.value(batch, head, key)) {
            *error += weight * v.abs() + floor(v.abs(), model.eta);
        }
    }
}
