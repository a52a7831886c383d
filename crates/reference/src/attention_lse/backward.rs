//! With P of the forward pass, computed again:
//!
//! ```text
//! (L2)  dS_ij    = dlse_i P_ij
//! (B4)  ds_ij    = S'_ij dS_ij
//! (B5)  dq_i     = σ Σ_j ds_ij k_j
//! (B6)  dk_j     = σ Σ_i ds_ij q_i        over the query heads of the group
//! (B8)  dsink    = Σ_i π_i dlse_i
//! (B9)  dbias_ij = dS_ij                  over the axes that the bias broadcasts
//! ```

use super::{Cotangents, Gradients, Inputs, score_operands};
use crate::heads::{bias_gradient, for_each_head};
use crate::named::{Named, check};
use crate::scalar::Real;
use crate::scores::{HeadScores, Row, ScoreOperands};
use crate::tensor::{Matrix, Output, Rows};
use etalon_problem::{AttentionLse, Error, Pass, Sequence};
use ndarray::Axis;

/// The gradients of <dlse, lse> by the inputs.
pub fn backward<T: Real>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
) -> Result<Gradients<T>, Error> {
    problem.check()?;
    check(&problem.table(Pass::Backward), &[inputs.shapes(), cotangents.shapes()])?;
    let mut dq = Output::zeros("dq", &problem.scores.q_shape())?;
    let mut dk = Output::zeros("dk", &problem.scores.k_shape())?;
    let operands = BackwardOperands::new(problem, inputs, cotangents)?;
    let dsinks =
        for_each_head(&problem.scores, [&mut dq], [&mut dk], |sequence, head, [mut dq], [dk]| {
            let head = operands.head(sequence, head);
            let mut first = First::default();
            let mut dsink = T::ZERO;
            for i in 0..sequence.queries {
                head.row(i, &mut first); // (L2)
                head.scores.pull_back(i, &first.row, &first.d_scores, dq.row(i), dk); // (B4)–(B6)
                if let Some(pi) = first.row.pi {
                    dsink += pi * head.dlse.scalar(i); // (B8)
                }
            }
            dsink
        })?;
    let dbias = bias_gradient(
        "dbias",
        &problem.scores,
        |sequence, head, i, first: &mut First<T>, dbias| {
            operands.head(sequence, head).row(i, first);
            for (&j, &d_score) in first.row.keys.iter().zip(&first.d_scores) {
                dbias[j] += d_score; // (B9)
            }
        },
    )?;
    Ok(Gradients { dq: dq.finish()?, dk: dk.finish()?, dsinks, dbias })
}

/// The operands of the backward pass.
pub(super) struct BackwardOperands<'a, T: Real> {
    scores: ScoreOperands<'a, T>,
    dlse: Rows<'a, T>,
}

impl<'a, T: Real> BackwardOperands<'a, T> {
    pub fn new(
        problem: &'a AttentionLse,
        inputs: &'a Inputs<'_, T>,
        cotangents: &'a Cotangents<'_, T>,
    ) -> Result<Self, Error> {
        let dlse = Rows::new("dlse", cotangents.dlse.view().insert_axis(Axis(3)))?;
        Ok(BackwardOperands { scores: score_operands(problem, inputs)?, dlse })
    }

    /// What one query head sees in one sequence.
    pub fn head<'b>(&'b self, sequence: &'b Sequence, head: usize) -> HeadCotangents<'b, T> {
        HeadCotangents {
            scores: self.scores.head(sequence, head),
            dlse: self.dlse.matrix(sequence.batch, head, sequence.query_start),
        }
    }
}

/// What one query head sees in one sequence.
pub(super) struct HeadCotangents<'a, T> {
    pub scores: HeadScores<'a, T>,
    pub dlse: Matrix<'a, T>,
}

/// A row of the first order.
pub(super) struct First<T> {
    pub row: Row<T>,
    /// dS_ij of every visible key.
    pub d_scores: Vec<T>,
}

impl<T: Real> Default for First<T> {
    fn default() -> Self {
        First { row: Row::default(), d_scores: Vec::new() }
    }
}

impl<T: Real> HeadCotangents<'_, T> {
    /// Computes row `i`.
    pub fn row(&self, i: usize, first: &mut First<T>) {
        let dlse = self.dlse.scalar(i);
        self.scores.row(i, &mut first.row);
        first.d_scores.clear();
        first.d_scores.extend(first.row.p.iter().map(|&p| dlse * p)); // (L2)
    }
}
