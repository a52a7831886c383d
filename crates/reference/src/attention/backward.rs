//! With P and o of the forward pass, computed again:
//!
//! ```text
//! (B1)  δ_i     = dout_i·o_i − dlse_i
//! (B2)  dP_ij   = dout_i·v_j
//! (B3)  dS_ij   = P_ij (dP_ij − δ_i)
//! (B4)  ds_ij   = S'_ij dS_ij
//! (B5)  dq_i    = σ Σ_j ds_ij k_j
//! (B6)  dk_j    = σ Σ_i ds_ij q_i        over the query heads of the group
//! (B7)  dv_j    = Σ_i P_ij dout_i        over the query heads of the group
//! (B8)  dsink   = −Σ_i π_i δ_i
//! (B9)  dbias_ij = dS_ij                 over the axes that the bias broadcasts
//! ```

use super::forward::{ForwardOperands, HeadValues};
use super::{Cotangents, Gradients, Inputs};
use crate::heads::{bias_gradient, for_each_head};
use crate::named::{Named, check};
use crate::scalar::Real;
use crate::scores::Row;
use crate::tensor::{Matrix, Output, Rows, add_scaled, dot};
use etalon_problem::{Attention, Error, Pass, Sequence};

/// The gradients of <dout, o> + <dlse, lse> by the inputs.
pub fn backward<T: Real>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
) -> Result<Gradients<T>, Error> {
    problem.check()?;
    check(&problem.table(Pass::Backward), &[inputs.shapes(), cotangents.shapes()])?;
    let mut dq = Output::zeros("dq", &problem.scores.q_shape())?;
    let mut dk = Output::zeros("dk", &problem.scores.k_shape())?;
    let mut dv = Output::zeros("dv", &problem.v_shape())?;
    let operands = BackwardOperands::new(problem, inputs, cotangents)?;
    let dsinks = for_each_head(
        &problem.scores,
        [&mut dq],
        [&mut dk, &mut dv],
        |sequence, head, [mut dq], [dk, dv]| {
            let head = operands.head(sequence, head);
            let mut first = First::default();
            let mut dsink = T::ZERO;
            for i in 0..sequence.queries {
                head.row(i, &mut first); // (B1)–(B3)
                let First { row, delta, d_scores, .. } = &first;
                head.values.scores.pull_back(i, row, d_scores, dq.row(i), dk); // (B4)–(B6)
                for (&j, &p) in row.keys.iter().zip(&row.p) {
                    add_scaled(dv.row(j), p, head.dout.row(i)); // (B7)
                }
                if let Some(pi) = row.pi {
                    dsink -= pi * *delta; // (B8)
                }
            }
            dsink
        },
    )?;
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
    Ok(Gradients { dq: dq.finish()?, dk: dk.finish()?, dv: dv.finish()?, dsinks, dbias })
}

/// The operands of the backward pass.
pub(super) struct BackwardOperands<'a, T: Real> {
    forward: ForwardOperands<'a, T>,
    dout: Rows<'a, T>,
    dlse: Rows<'a, T>,
}

impl<'a, T: Real> BackwardOperands<'a, T> {
    pub fn new(
        problem: &'a Attention,
        inputs: &'a Inputs<'_, T>,
        cotangents: &'a Cotangents<'_, T>,
    ) -> Result<Self, Error> {
        Ok(BackwardOperands {
            forward: ForwardOperands::new(problem, inputs)?,
            dout: Rows::new("dout", cotangents.dout.view())?,
            dlse: Rows::scalars("dlse", &cotangents.dlse)?,
        })
    }

    /// What one query head sees in one sequence.
    pub fn head<'b>(&'b self, sequence: &'b Sequence, head: usize) -> HeadCotangents<'b, T> {
        let &Sequence { batch, query_start, .. } = sequence;
        HeadCotangents {
            values: self.forward.head(sequence, head),
            dout: self.dout.matrix(batch, head, query_start),
            dlse: self.dlse.matrix(batch, head, query_start),
        }
    }
}

/// What one query head sees in one sequence.
pub(super) struct HeadCotangents<'a, T> {
    pub values: HeadValues<'a, T>,
    pub dout: Matrix<'a, T>,
    pub dlse: Matrix<'a, T>,
}

/// A row of the first order; the vectors hold one number for each visible key, o one per value
/// element.
pub(super) struct First<T> {
    pub row: Row<T>,
    pub o: Vec<T>,
    /// δ_i
    pub delta: T,
    /// dP_ij
    pub dp: Vec<T>,
    /// dS_ij
    pub d_scores: Vec<T>,
}

impl<T: Real> Default for First<T> {
    fn default() -> Self {
        First {
            row: Row::default(),
            o: Vec::new(),
            delta: T::ZERO,
            dp: Vec::new(),
            d_scores: Vec::new(),
        }
    }
}

impl<T: Real> HeadCotangents<'_, T> {
    /// Computes row `i`.
    pub fn row(&self, i: usize, first: &mut First<T>) {
        let First { row, o, delta, dp, d_scores } = first;
        let dout = self.dout.row(i);
        self.values.scores.row(i, row);
        o.clear();
        o.resize(dout.len(), T::ZERO);
        self.values.output(row, o);
        *delta = -self.dlse.scalar(i);
        dp.clear();
        d_scores.clear();
        if row.keys.is_empty() {
            return; // o is 0 whatever the operands are: dout_i is not read
        }
        *delta += dot(dout, o); // (B1)
        for (&j, &p) in row.keys.iter().zip(&row.p) {
            let d_weight = dot(dout, self.values.v.row(j)); // (B2)
            dp.push(d_weight);
            d_scores.push(p * (d_weight - *delta)); // (B3)
        }
    }
}
