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

use super::forward::Operands;
use super::{Cotangents, Gradients, Inputs};
use crate::heads::{Query, bias_gradient, each_query, sum_by_head};
use crate::named::{Named, checked};
use crate::scalar::Real;
use crate::scores::Row;
use crate::tensor::{HeadsMut, Rows, add_scaled, dot};
use etalon_problem::{Attention, Error, Pass};

/// As [`backward`](super::backward()), of a problem that is sound but that values may have no elements.
pub(crate) fn any_width<T: Real>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
) -> Result<Gradients<T>, Error> {
    let (scores, given) = (&problem.scores, [inputs.shapes(), cotangents.shapes()]);
    let mut gradients: Gradients<T> = checked(&problem.table(Pass::Backward), &given)?;
    let Gradients { dq, dk, dv, dsinks, dbias } = &mut gradients;
    let operands = BackwardOperands::new(problem, inputs, cotangents)?;
    let of_sinks = each_query(
        scores,
        [HeadsMut::new(dq)],
        [HeadsMut::new(dk), HeadsMut::new(dv)],
        |_, _| [T::ZERO],
        |[dsink], query, [dq], [dk, dv]| {
            let First { row, delta, d_scores, .. } = operands.row(query); // (B1)–(B3)
            operands.forward.scores.pull_back(&row, &d_scores, dq, dk); // (B4)–(B6)
            for (j, p) in row.weights() {
                add_scaled(dv.row(j), p.stored(), operands.dout.row(query.row)); // (B7)
            }
            if let Some(pi) = row.pi {
                *dsink -= pi * delta; // (B8)
            }
        },
    );
    sum_by_head(dsinks.as_mut(), of_sinks);
    bias_gradient(dbias.as_mut(), scores, |query| {
        let First { row, d_scores, .. } = operands.row(query);
        (row.keys, d_scores) // (B9)
    });
    Ok(gradients)
}

/// The operands of the backward pass.
pub(super) struct BackwardOperands<'a, T: Real> {
    pub forward: Operands<'a, T>,
    pub dout: Rows<'a, T>,
    dlse: Rows<'a, T>,
}

/// A row of the first order; the vectors hold one number for each visible key, o one per value
/// element.
pub(super) struct First<'a, T> {
    pub row: Row<'a, T>,
    pub o: Vec<T>,
    /// δ_i
    pub delta: T,
    /// dP_ij
    pub dp: Vec<T>,
    /// dS_ij
    pub d_scores: Vec<T>,
}

impl<'a, T: Real> BackwardOperands<'a, T> {
    pub fn new(
        problem: &'a Attention,
        inputs: &'a Inputs<'_, T>,
        cotangents: &'a Cotangents<'_, T>,
    ) -> Result<Self, Error> {
        Ok(BackwardOperands {
            forward: Operands::new(problem, inputs)?,
            dout: Rows::new("dout", cotangents.dout.view())?,
            dlse: Rows::or_zero("dlse", &cotangents.dlse, 1)?,
        })
    }

    /// The row of a query.
    pub fn row<'q>(&self, query: &Query<'q>) -> First<'q, T> {
        let (row, dout) = (self.forward.scores.row(query), self.dout.row(query.row));
        let o = self.forward.output(&row); // (F5)
        let mut delta = -self.dlse.scalar(query.row);
        // Without a visible key o is 0 whatever the operands are: dout_i is not read.
        if !row.keys.is_empty() {
            delta += dot(dout, &o); // (B1)
        }
        let dp = |&j| dot(dout, self.forward.v.row(query.key(j)));
        let dp: Vec<T> = row.keys.iter().map(dp).collect(); // (B2)
        let d_scores = row.p.iter().zip(&dp).map(|(&p, &dp)| p * (dp - delta)).collect(); // (B3)
        First { row, o, delta, dp, d_scores }
    }
}
