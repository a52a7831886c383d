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

use super::backward::{BackwardOperands, First};
use super::jvp::{Direction, Motion};
use super::{Cotangents, Inputs, SecondCotangents, SecondGradients, Tangents};
use crate::heads::{Query, bias_gradient, each_query, sum_by_head, width_of_rows};
use crate::named::{Named, checked};
use crate::scalar::Real;
use crate::tensor::{HeadsMut, MatrixMut, Rows, add_scaled, dot};
use etalon_problem::{Attention, Error, Pass};

/// As [`double_backward`](super::double_backward()), of a problem that is sound but that values may have no elements.
pub(crate) fn any_width<T: Real>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
) -> Result<SecondGradients<T>, Error> {
    let given = [inputs.shapes(), cotangents.shapes(), second.shapes()];
    let mut gradients: SecondGradients<T> = checked(&problem.table(Pass::DoubleBackward), &given)?;
    let SecondGradients { gq, gk, gv, gsinks, gbias, gdout, gdlse } = &mut gradients;
    let SecondCotangents { ddq, ddk, ddv, ddsinks, ddbias, cot_o, cot_lse } = *second;
    let direction = Tangents { tq: ddq, tk: ddk, tv: ddv, tsinks: ddsinks, tbias: ddbias };
    let operands = SecondOperands {
        backward: BackwardOperands::new(problem, inputs, cotangents)?,
        direction: Direction::new(problem, &direction)?,
        cot_o: Rows::or_zero("cot_o", &cot_o, width_of_rows(&problem.scores, problem.value_dim))?,
        cot_lse: Rows::or_zero("cot_lse", &cot_lse, 1)?,
    };
    let of_sinks = each_query(
        &problem.scores,
        [HeadsMut::new(gq), HeadsMut::new(gdout), HeadsMut::new(gdlse)],
        [HeadsMut::new(gk), HeadsMut::new(gv)],
        |_, _| [T::ZERO],
        |[gsink], query, [gq, gdout, gdlse], [gk, gv]| {
            let second = operands.row(query);
            operands.pull_back(&second, gq, gk); // (D9)–(D11)
            operands.add_value_gradient(&second, gv); // (D12)
            gdout.copy_from_slice(&second.gdout); // (D5)
            gdlse[0] = second.motion.u; // (D13)
            *gsink -= operands.sink_part(&second); // (D14)
        },
    );
    sum_by_head(gsinks.as_mut(), of_sinks);
    bias_gradient(gbias.as_mut(), &problem.scores, |query| {
        let second = operands.row(query);
        (second.first.row.keys, second.x) // (D15)
    });
    Ok(gradients)
}

/// The operands of the double backward pass.
struct SecondOperands<'a, T: Real> {
    backward: BackwardOperands<'a, T>,
    direction: Direction<'a, T>,
    cot_o: Rows<'a, T>,
    cot_lse: Rows<'a, T>,
}

/// A row of the second order; the vectors hold one number for each visible key, gdout one per
/// value element.
struct SecondRow<'a, T> {
    first: First<'a, T>,
    motion: Motion<T>,
    gdout: Vec<T>,
    z: T,
    /// Ṗ_ij
    p_dot: Vec<T>,
    /// X_ij
    x: Vec<T>,
}

impl<T: Real> SecondOperands<'_, T> {
    /// The row of a query.
    fn row<'q>(&self, query: &Query<'q>) -> SecondRow<'q, T> {
        let (dout, cot_o) = (self.backward.dout.row(query.row), self.cot_o.row(query.row));
        let forward = &self.backward.forward;
        let first = self.backward.row(query);
        let First { row, o, delta, dp, .. } = &first;
        let motion = self.direction.motion(forward, row); // (D1), (D2), (D4)
        let gdout = self.direction.of_output(forward, row, &motion, o); // (D5)
        let mut z = -self.cot_lse.scalar(query.row);
        // Without a visible key o is 0 whatever the operands are: dout_i and cot_o_i are not read.
        if !row.keys.is_empty() {
            z += dot(dout, &gdout) + dot(cot_o, o); // (D6)
        }
        let (mut p_dot, mut x) = (Vec::new(), Vec::new());
        for (t, (j, p)) in row.weights().enumerate() {
            let (v, ddv) = (forward.v.row(query.key(j)), self.direction.ddv.row(query.key(j)));
            let t_ij = dot(dout, ddv) + dot(cot_o, v); // (D3)
            p_dot.push(p * (motion.big_u[t] - motion.u)); // (D7)
            x.push(p_dot[t] * (dp[t] - *delta) + p * (t_ij - z)); // (D8)
        }
        SecondRow { first, motion, gdout, z, p_dot, x }
    }

    /// From the X and dS of a row to its gq, and to what it adds to gk.
    fn pull_back(&self, second: &SecondRow<'_, T>, gq: &mut [T], gk: &mut MatrixMut<'_, T>) {
        let SecondRow { first: First { row, d_scores, .. }, motion, x, .. } = second;
        let (scores, direction) = (&self.backward.forward.scores, &self.direction);
        let query = &row.query;
        let (q, ddq) = (scores.q.row(query.row), direction.ddq.row(query.row));
        for (t, &j) in row.keys.iter().enumerate() {
            let (k, ddk) = (scores.k.row(query.key(j)), direction.ddk.row(query.key(j)));
            let slope = scores.slope(row.s[t]);
            let ds = slope * d_scores[t]; // (B4)
            let bend = scores.curvature(row.s[t]) * motion.u0[t] * d_scores[t];
            let (x, ds) = ((slope * x[t] + bend).stored(), ds.stored()); // (D9)
            add_scaled(gq, scores.scale * x, k); // (D10)
            add_scaled(gq, scores.scale * ds, ddk);
            add_scaled(gk.row(j), scores.scale * x, q); // (D11)
            add_scaled(gk.row(j), scores.scale * ds, ddq);
        }
    }

    /// (D12), added to `gv`.
    fn add_value_gradient(&self, second: &SecondRow<'_, T>, gv: &mut MatrixMut<'_, T>) {
        let row = &second.first.row;
        for (t, (j, p)) in row.weights().enumerate() {
            add_scaled(gv.row(j), second.p_dot[t].stored(), self.backward.dout.row(row.query.row));
            add_scaled(gv.row(j), p.stored(), self.cot_o.row(row.query.row));
        }
    }

    /// The term of (D14).
    fn sink_part(&self, second: &SecondRow<'_, T>) -> T {
        let SecondRow { first, motion, z, .. } = second;
        let moved = self.direction.ddsink(&first.row.query) - motion.u;
        first.row.pi.map_or(T::ZERO, |pi| pi * (moved * first.delta + *z))
    }
}
