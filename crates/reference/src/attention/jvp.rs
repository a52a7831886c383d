//! With P and o of the forward pass, and tq for ddq and so on:
//!
//! ```text
//! (D1)  u⁰_ij  = σ (ddq_i·k_j + q_i·ddk_j)
//! (D2)  U_ij   = S'_ij u⁰_ij + ddbias_ij
//! (D4)  u_i    = Σ_j P_ij U_ij + π_i ddsink
//! (J1)  to_i   = Σ_j P_ij (U_ij v_j + tv_j) − u_i o_i        which is (D5)
//! (J2)  tlse_i = u_i
//! ```

use super::forward::Operands;
use super::{Inputs, OutputTangents, Tangents};
use crate::heads::{Query, each_query, width_of_rows};
use crate::named::{Named, checked};
use crate::scalar::Real;
use crate::scores::{Row, bias_row};
use crate::tensor::{HeadsMut, Rows, add_scaled, dot};
use etalon_problem::{Attention, Error, Pass};
use ndarray::{ArrayView1, ArrayView4};

/// As [`jvp`](super::jvp()), of a problem that is sound but that values may have no elements.
pub(crate) fn any_width<T: Real>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    tangents: &Tangents<'_, T>,
) -> Result<OutputTangents<T>, Error> {
    let given = [inputs.shapes(), tangents.shapes()];
    let mut moves: OutputTangents<T> = checked(&problem.table(Pass::Jvp), &given)?;
    let operands = Operands::new(problem, inputs)?;
    let direction = Direction::new(problem, tangents)?;
    each_query(
        &problem.scores,
        [HeadsMut::new(&mut moves.to), HeadsMut::new(&mut moves.tlse)],
        [],
        |_, _| (),
        |(), query, [to, tlse], []| {
            let row = operands.scores.row(query);
            let motion = direction.motion(&operands, &row); // (D1), (D2), (D4)
            let o = operands.output(&row);
            to.copy_from_slice(&direction.of_output(&operands, &row, &motion, &o)); // (J1)
            tlse[0] = motion.u; // (J2)
        },
    );
    Ok(moves)
}

/// A direction in which the inputs move: tangents, or cotangents of their gradients. An absent
/// input stands still.
pub(super) struct Direction<'a, T: Real> {
    pub ddq: Rows<'a, T>,
    pub ddk: Rows<'a, T>,
    pub ddv: Rows<'a, T>,
    ddsinks: Option<ArrayView1<'a, T>>,
    ddbias: Option<ArrayView4<'a, T>>,
}

/// Motion of a row of scores along a direction.
pub(super) struct Motion<T> {
    /// u⁰_ij
    pub u0: Vec<T>,
    /// U_ij
    pub big_u: Vec<T>,
    /// u_i: the motion of lse_i.
    pub u: T,
}

impl<'a, T: Real> Direction<'a, T> {
    pub fn new(problem: &Attention, tangents: &'a Tangents<'_, T>) -> Result<Self, Error> {
        let Tangents { tq, tk, tv, tsinks, tbias } = tangents;
        let dim = problem.scores.extents.dim;
        let width = |elements| width_of_rows(&problem.scores, elements);
        Ok(Direction {
            ddq: Rows::or_zero("the direction of q", tq, width(dim))?,
            ddk: Rows::or_zero("the direction of k", tk, width(dim))?,
            ddv: Rows::or_zero("the direction of v", tv, width(problem.value_dim))?,
            ddsinks: tsinks.as_ref().map(|tsinks| tsinks.view()),
            ddbias: tbias.as_ref().map(|tbias| tbias.view()),
        })
    }

    /// Its part in the sink that a query sees.
    pub fn ddsink(&self, query: &Query<'_>) -> T {
        self.ddsinks.map_or(T::ZERO, |ddsinks| ddsinks[query.head])
    }

    /// The motion of the scores of a row.
    pub fn motion(&self, forward: &Operands<'_, T>, row: &Row<'_, T>) -> Motion<T> {
        let (scores, query) = (&forward.scores, &row.query);
        let (q, ddq) = (scores.q.row(query.row), self.ddq.row(query.row));
        let ddbias = bias_row(&self.ddbias, query);
        let (mut u0, mut big_u) = (Vec::new(), Vec::new());
        let mut u = row.pi.map_or(T::ZERO, |pi| pi * self.ddsink(query));
        for (t, (j, p)) in row.weights().enumerate() {
            let (k, ddk) = (scores.k.row(query.key(j)), self.ddk.row(query.key(j)));
            u0.push(scores.scale * (dot(ddq, k) + dot(q, ddk))); // (D1)
            big_u.push(scores.slope(row.s[t]) * u0[t] + ddbias(j)); // (D2)
            u += p * big_u[t]; // (D4)
        }
        Motion { u0, big_u, u }
    }

    /// (D5): how o moves.
    pub fn of_output(
        &self,
        forward: &Operands<'_, T>,
        row: &Row<'_, T>,
        motion: &Motion<T>,
        o: &[T],
    ) -> Vec<T> {
        let mut to = vec![T::ZERO; o.len()];
        if row.keys.is_empty() {
            return to; // o stays 0
        }
        for ((j, p), &big_u) in row.weights().zip(&motion.big_u) {
            add_scaled(&mut to, (p * big_u).stored(), forward.v.row(row.query.key(j)));
            add_scaled(&mut to, p.stored(), self.ddv.row(row.query.key(j)));
        }
        add_scaled(&mut to, -motion.u, o);
        to
    }
}
