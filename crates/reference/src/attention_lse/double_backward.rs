//! The gradients of <ddq, dq> + <ddk, dk> + <ddsinks, dsinks> + <ddbias, dbias> +
//! <cot_lse, lse>: those of attention with dP = T = 0, δ = −dlse and z = −cot_lse.
//!
//! ```text
//! (D1)  u⁰_ij   = σ (ddq_i·k_j + q_i·ddk_j)
//! (D2)  U_ij    = S'_ij u⁰_ij + ddbias_ij
//! (D4)  u_i     = Σ_j P_ij U_ij + π_i ddsink
//! (D7)  Ṗ_ij    = P_ij (U_ij − u_i)
//! (D8)  X_ij    = Ṗ_ij dlse_i + P_ij cot_lse_i
//! (D9)  x_ij    = S'_ij X_ij + S''_ij u⁰_ij dS_ij
//! (D10) gq_i    = σ Σ_j (x_ij k_j + ds_ij ddk_j)
//! (D11) gk_j    = σ Σ_i (x_ij q_i + ds_ij ddq_i)         over the query heads of the group
//! (D13) gdlse_i = u_i
//! (D14) gsink   = Σ_i π_i [(ddsink − u_i) dlse_i + cot_lse_i]
//! (D15) gbias_ij = X_ij                                  over the axes that the bias broadcasts
//! ```

use super::backward::{BackwardOperands, First, HeadCotangents};
use super::{Cotangents, Inputs, SecondCotangents, SecondGradients};
use crate::heads::{bias_gradient, for_each_head};
use crate::named::{Named, check};
use crate::scalar::Real;
use crate::scores::{Direction, HeadDirection, Motion, Second};
use crate::tensor::{Matrix, Output, Rows};
use etalon_problem::{AttentionLse, Error, Pass, Sequence};

/// The gradients of a loss of the gradients (and of lse) by everything they come from.
pub fn double_backward<T: Real>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
) -> Result<SecondGradients<T>, Error> {
    problem.check()?;
    let given = [inputs.shapes(), cotangents.shapes(), second.shapes()];
    check(&problem.table(Pass::DoubleBackward), &given)?;
    let scores = &problem.scores;
    let mut gq = Output::zeros("gq", &scores.q_shape())?;
    let mut gk = Output::zeros("gk", &scores.k_shape())?;
    let mut gdlse = Output::zeros("gdlse", &scores.row_shape())?;
    let operands = SecondOperands::new(problem, inputs, cotangents, second)?;
    let gsinks = for_each_head(
        scores,
        [&mut gq, &mut gdlse],
        [&mut gk],
        |sequence, head, [mut gq, mut gdlse], [gk]| {
            let head = operands.head(sequence, head);
            let mut second = SecondRow::default();
            let mut gsink = T::ZERO;
            for i in 0..sequence.queries {
                head.row(i, &mut second);
                let SecondRow { first: First { row, d_scores }, motion, x } = &second;
                let from = Second { d_scores, x, u0: &motion.u0 };
                let (scores, direction) = (&head.first.scores, &head.direction);
                scores.pull_back_twice(i, row, direction, &from, gq.row(i), gk); // (D9)–(D11)
                gdlse.row(i)[0] = motion.u; // (D13)
                if let Some(pi) = row.pi {
                    let moved = direction.ddsink - motion.u;
                    gsink += pi * (moved * head.first.dlse.scalar(i) + head.cot_lse.scalar(i)); // (D14)
                }
            }
            gsink
        },
    )?;
    let gbias =
        bias_gradient("gbias", scores, |sequence, head, i, second: &mut SecondRow<T>, gbias| {
            operands.head(sequence, head).row(i, second);
            for (&j, &x) in second.first.row.keys.iter().zip(&second.x) {
                gbias[j] += x; // (D15)
            }
        })?;
    Ok(SecondGradients {
        gq: gq.finish()?,
        gk: gk.finish()?,
        gdlse: gdlse.finish()?,
        gsinks,
        gbias,
    })
}

/// The operands of the double backward pass.
struct SecondOperands<'a, T: Real> {
    backward: BackwardOperands<'a, T>,
    direction: Direction<'a, T>,
    cot_lse: Rows<'a, T>,
}

impl<'a, T: Real> SecondOperands<'a, T> {
    fn new(
        problem: &'a AttentionLse,
        inputs: &'a Inputs<'_, T>,
        cotangents: &'a Cotangents<'_, T>,
        second: &'a SecondCotangents<'_, T>,
    ) -> Result<Self, Error> {
        let SecondCotangents { ddq, ddk, ddsinks, ddbias, cot_lse } = second;
        Ok(SecondOperands {
            backward: BackwardOperands::new(problem, inputs, cotangents)?,
            direction: Direction::new(&problem.scores, ddq, ddk, ddsinks, ddbias)?,
            cot_lse: Rows::scalars("cot_lse", cot_lse)?,
        })
    }

    /// What one query head sees in one sequence.
    fn head<'b>(&'b self, sequence: &'b Sequence, head: usize) -> HeadSecond<'b, T> {
        let first = self.backward.head(sequence, head);
        HeadSecond {
            direction: self.direction.head(&first.scores),
            first,
            cot_lse: self.cot_lse.matrix(sequence.batch, head, sequence.query_start),
        }
    }
}

/// What one query head sees in one sequence.
struct HeadSecond<'a, T> {
    first: HeadCotangents<'a, T>,
    direction: HeadDirection<'a, T>,
    cot_lse: Matrix<'a, T>,
}

/// A row of the second order.
struct SecondRow<T> {
    first: First<T>,
    motion: Motion<T>,
    /// X_ij of every visible key.
    x: Vec<T>,
}

impl<T: Real> Default for SecondRow<T> {
    fn default() -> Self {
        SecondRow { first: First::default(), motion: Motion::default(), x: Vec::new() }
    }
}

impl<T: Real> HeadSecond<'_, T> {
    /// Computes row `i`.
    fn row(&self, i: usize, second: &mut SecondRow<T>) {
        let SecondRow { first, motion, x } = second;
        let (dlse, cot_lse) = (self.first.dlse.scalar(i), self.cot_lse.scalar(i));
        self.first.row(i, first);
        self.first.scores.tangent(i, &first.row, &self.direction, motion); // (D1), (D2), (D4)
        x.clear();
        for (&p, &big_u) in first.row.p.iter().zip(&motion.big_u) {
            let p_dot = p * (big_u - motion.u); // (D7)
            x.push(p_dot * dlse + p * cot_lse); // (D8)
        }
    }
}
