//! The gradients of <ddq, dq> + <ddk, dk> + <ddv, dv> + <ddsinks, dsinks> + <ddbias, dbias> +
//! <cot_o, o> + <cot_lse, lse>, with P, o, δ, dP, dS of the first order, computed again:
//!
//! ```text
//! (D1)  u⁰_ij   = σ (ddq_i·k_j + q_i·ddk_j)
//! (D2)  U_ij    = S'_ij u⁰_ij + ddbias_ij
//! (D3)  T_ij    = dout_i·ddv_j + cot_o_i·v_j
//! (D4)  u_i     = Σ_j P_ij U_ij + π_i ddsink
//! (D5)  gdout_i = Σ_j P_ij (U_ij v_j + ddv_j) − u_i o_i
//! (D6)  z_i     = dout_i·gdout_i + cot_o_i·o_i − cot_lse_i
//! (D7)  Ṗ_ij    = P_ij (U_ij − u_i)
//! (D8)  X_ij    = Ṗ_ij (dP_ij − δ_i) + P_ij (T_ij − z_i)
//! (D9)  x_ij    = S'_ij X_ij + S''_ij u⁰_ij dS_ij
//! (D10) gq_i    = σ Σ_j (x_ij k_j + ds_ij ddk_j)
//! (D11) gk_j    = σ Σ_i (x_ij q_i + ds_ij ddq_i)         over the query heads of the group
//! (D12) gv_j    = Σ_i (Ṗ_ij dout_i + P_ij cot_o_i)       over the query heads of the group
//! (D13) gdlse_i = u_i
//! (D14) gsink   = −Σ_i π_i [(ddsink − u_i) δ_i + z_i]
//! (D15) gbias_ij = X_ij                                  over the axes that the bias broadcasts
//! ```

use super::backward::{BackwardOperands, First, HeadCotangents};
use super::{Cotangents, Inputs, SecondCotangents, SecondGradients};
use crate::heads::{bias_gradient, for_each_head};
use crate::named::{Named, check};
use crate::scalar::Real;
use crate::scores::{Direction, HeadDirection, Motion, Second};
use crate::tensor::{Matrix, MatrixMut, Output, Rows, add_scaled, dot};
use etalon_problem::{Attention, Error, Pass, Sequence};

/// The gradients of a loss of the gradients (and of the outputs) by everything they come from.
pub fn double_backward<T: Real>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
) -> Result<SecondGradients<T>, Error> {
    problem.check()?;
    let given = [inputs.shapes(), cotangents.shapes(), second.shapes()];
    check(&problem.table(Pass::DoubleBackward), &given)?;
    let (scores, rows) = (&problem.scores, problem.scores.row_shape());
    let mut gq = Output::zeros("gq", &scores.q_shape())?;
    let mut gk = Output::zeros("gk", &scores.k_shape())?;
    let mut gv = Output::zeros("gv", &problem.v_shape())?;
    let mut gdout = Output::zeros("gdout", &problem.o_shape())?;
    let mut gdlse = Output::zeros("gdlse", &rows)?;
    let operands = SecondOperands::new(problem, inputs, cotangents, second)?;
    let gsinks = for_each_head(
        scores,
        [&mut gq, &mut gdout, &mut gdlse],
        [&mut gk, &mut gv],
        |sequence, head, [mut gq, mut gdout, mut gdlse], [gk, gv]| {
            let head = operands.head(sequence, head);
            let mut second = SecondRow::default();
            let mut gsink = T::ZERO;
            for i in 0..sequence.queries {
                head.row(i, &mut second);
                head.pull_back(i, &second, gq.row(i), gk); // (D9)–(D11)
                head.value_gradient(i, &second, gv); // (D12)
                gdout.row(i).copy_from_slice(&second.gdout); // (D5)
                gdlse.row(i)[0] = second.motion.u; // (D13)
                gsink -= head.sink_part(&second); // (D14)
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
        gv: gv.finish()?,
        gdout: gdout.finish()?,
        gdlse: gdlse.finish()?,
        gsinks,
        gbias,
    })
}

/// The operands of the double backward pass.
struct SecondOperands<'a, T: Real> {
    backward: BackwardOperands<'a, T>,
    direction: Direction<'a, T>,
    ddv: Rows<'a, T>,
    cot_o: Rows<'a, T>,
    cot_lse: Rows<'a, T>,
    group: usize,
}

impl<'a, T: Real> SecondOperands<'a, T> {
    fn new(
        problem: &'a Attention,
        inputs: &'a Inputs<'_, T>,
        cotangents: &'a Cotangents<'_, T>,
        second: &'a SecondCotangents<'_, T>,
    ) -> Result<Self, Error> {
        let SecondCotangents { ddq, ddk, ddv, ddsinks, ddbias, cot_o, cot_lse } = second;
        Ok(SecondOperands {
            backward: BackwardOperands::new(problem, inputs, cotangents)?,
            direction: Direction::new(&problem.scores, ddq, ddk, ddsinks, ddbias)?,
            ddv: Rows::or_zero("ddv", ddv, problem.value_dim)?,
            cot_o: Rows::or_zero("cot_o", cot_o, problem.value_dim)?,
            cot_lse: Rows::scalars("cot_lse", cot_lse)?,
            group: problem.scores.group(),
        })
    }

    /// What one query head sees in one sequence.
    fn head<'b>(&'b self, sequence: &'b Sequence, head: usize) -> HeadSecond<'b, T> {
        let &Sequence { batch, query_start, key_start, .. } = sequence;
        let first = self.backward.head(sequence, head);
        HeadSecond {
            direction: self.direction.head(&first.values.scores),
            first,
            ddv: self.ddv.matrix(batch, head / self.group, key_start),
            cot_o: self.cot_o.matrix(batch, head, query_start),
            cot_lse: self.cot_lse.matrix(batch, head, query_start),
        }
    }
}

/// What one query head sees in one sequence.
struct HeadSecond<'a, T> {
    first: HeadCotangents<'a, T>,
    direction: HeadDirection<'a, T>,
    ddv: Matrix<'a, T>,
    cot_o: Matrix<'a, T>,
    cot_lse: Matrix<'a, T>,
}

/// A row of the second order; the vectors hold one number for each visible key, gdout one per
/// value element.
struct SecondRow<T> {
    first: First<T>,
    motion: Motion<T>,
    gdout: Vec<T>,
    z: T,
    /// Ṗ_ij
    p_dot: Vec<T>,
    /// X_ij
    x: Vec<T>,
}

impl<T: Real> Default for SecondRow<T> {
    fn default() -> Self {
        SecondRow {
            first: First::default(),
            motion: Motion::default(),
            gdout: Vec::new(),
            z: T::ZERO,
            p_dot: Vec::new(),
            x: Vec::new(),
        }
    }
}

impl<T: Real> HeadSecond<'_, T> {
    /// Computes row `i`.
    fn row(&self, i: usize, second: &mut SecondRow<T>) {
        let SecondRow { first, motion, gdout, z, p_dot, x } = second;
        let (dout, cot_o, values) = (self.first.dout.row(i), self.cot_o.row(i), &self.first.values);
        self.first.row(i, first);
        let First { row, o, delta, dp, .. } = first;
        values.scores.tangent(i, row, &self.direction, motion); // (D1), (D2), (D4)
        gdout.clear();
        gdout.resize(dout.len(), T::ZERO);
        values.output_tangent(row, motion, &self.ddv, o, gdout); // (D5)
        *z = -self.cot_lse.scalar(i);
        p_dot.clear();
        x.clear();
        if row.keys.is_empty() {
            return; // o is 0 whatever the operands are: dout_i and cot_o_i are not read
        }
        *z += dot(dout, gdout) + dot(cot_o, o); // (D6)
        for (t, (&j, &p)) in row.keys.iter().zip(&row.p).enumerate() {
            let t_ij = dot(dout, self.ddv.row(j)) + dot(cot_o, values.v.row(j)); // (D3)
            p_dot.push(p * (motion.big_u[t] - motion.u)); // (D7)
            x.push(p_dot[t] * (dp[t] - *delta) + p * (t_ij - *z)); // (D8)
        }
    }

    fn pull_back(&self, i: usize, second: &SecondRow<T>, gq: &mut [T], gk: &mut MatrixMut<'_, T>) {
        let First { row, d_scores, .. } = &second.first;
        let from = Second { d_scores, x: &second.x, u0: &second.motion.u0 };
        self.first.values.scores.pull_back_twice(i, row, &self.direction, &from, gq, gk);
    }

    /// (D12), added to `gv`.
    fn value_gradient(&self, i: usize, second: &SecondRow<T>, gv: &mut MatrixMut<'_, T>) {
        let row = &second.first.row;
        for (t, (&j, &p)) in row.keys.iter().zip(&row.p).enumerate() {
            add_scaled(gv.row(j), second.p_dot[t], self.first.dout.row(i));
            add_scaled(gv.row(j), p, self.cot_o.row(i));
        }
    }

    /// The term of (D14).
    fn sink_part(&self, second: &SecondRow<T>) -> T {
        let SecondRow { first, motion, z, .. } = second;
        let moved = self.direction.ddsink - motion.u;
        first.row.pi.map_or(T::ZERO, |pi| pi * (moved * first.delta + *z))
    }
}
