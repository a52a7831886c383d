//! With P and e of (E1)–(E5), computed again, and a_ij = 1 where the pair is active, else 0:
//!
//! ```text
//! (E7)  g_ij    = dout_i·v_j                        for active pairs
//! (E8)  Δ_i     = Σ_j a_ij P_ij g_ij
//! (E9)  dS_ij   = P_ij (a_ij g_ij − Δ_i + dlse_i)   for every visible pair, active or not
//! (E10) dq_i    = σ Σ_j dS_ij k_j
//! (E11) dk_j    = σ Σ_i dS_ij q_i                   over the query heads of the group
//! (E12) dv_j    = Σ_i e_ij dout_i                   over the query heads of the group
//! (E13) dbias_d = Σ dS_ij                           over the pairs at distance d of all batch elements
//! (E14) dtau    = Σ_i (1/n_i) Σ_j a_ij g_ij         over all batch elements
//! ```
//!
//! A pair that is not active reads neither its value nor, by itself, dout: a value that nothing
//! attends to may hold anything.

use super::row::{Operands, Row};
use super::{Cotangents, Gradients, Inputs};
use crate::heads::{Query, each_query, sum_by_head};
use crate::named::{Named, checked};
use crate::scalar::Real;
use crate::tensor::{HeadsMut, Rows, add_scaled, dot};
use etalon_problem::{DistanceBias, Error, LazyAttention, Pass, Sequence};
use ndarray::ArrayView4;

/// The gradients of <dout, o> + <dlse, lse> by the inputs. Where a pair lies exactly on the kink,
/// P_ij + τ/n_i = 0, it counts as inactive: of the sub-gradients this is the one of relu′(0) = 0.
pub fn backward<T: Real>(
    problem: &LazyAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
) -> Result<Gradients<T>, Error> {
    gradients(problem, inputs, cotangents, None)
}

/// As [`backward`], with the visible pairs that `activity` `[B, Hq, N, M]` names as the active
/// ones, and e_ij = P_ij + τ/n_i for those, be it negative: the gradients of the smooth piece to
/// which these pairs belong. Of pairs that are not visible it is not read.
///
/// So a kernel that decides otherwise within its rounding errors can be compared tightly, and its
/// decisions apart from that: see [`ambiguous`](super::ambiguous).
pub fn backward_under<T: Real>(
    problem: &LazyAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    activity: &ArrayView4<'_, bool>,
) -> Result<Gradients<T>, Error> {
    problem.check()?;
    Error::expect_shape("activity", &problem.scores.pair_shape(), activity.shape())?;
    gradients(problem, inputs, cotangents, Some(activity))
}

fn gradients<T: Real>(
    problem: &LazyAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    activity: Option<&ArrayView4<'_, bool>>,
) -> Result<Gradients<T>, Error> {
    problem.check()?;
    let given = [inputs.shapes(), cotangents.shapes()];
    let mut gradients: Gradients<T> = checked(&problem.table(Pass::Backward), &given)?;
    let Gradients { dq, dk, dv, dbias, dtau } = &mut gradients;
    let operands = BackwardOperands {
        forward: Operands::new(problem, inputs, activity)?,
        dout: Rows::new("dout", cotangents.dout.view())?,
        dlse: Rows::or_zero("dlse", &cotangents.dlse, 1)?,
    };
    let parts = each_query(
        &problem.scores,
        [HeadsMut::new(dq)],
        [HeadsMut::new(dk), HeadsMut::new(dv)],
        |sequence, _| HeadPart::new(problem.bias, sequence),
        |part, query, [dq], [dk, dv]| {
            let first = operands.row(query); // (E7)–(E9)
            let First { row, d_scores, .. } = &first;
            operands.forward.scores.pull_back(&row.softmax, d_scores, dq, dk); // (E10), (E11)
            for (t, j, _) in row.active_keys() {
                add_scaled(dv.row(j), row.e[t].stored(), operands.dout.row(query.row)); // (E12)
            }
            part.add(&first);
        },
    );
    sum_by_head(dbias.as_mut(), parts.iter().map(|part| &part.dbias));
    sum_by_head(Some(dtau), parts.iter().map(|part| [part.dtau]));
    Ok(gradients)
}

/// The contribution of one sequence to the gradients that a head's sequences share.
struct HeadPart<T> {
    reach: Option<DistanceBias>,
    /// Of the distances that occur in the sequence.
    dbias: Vec<T>,
    dtau: T,
}

impl<T: Real> HeadPart<T> {
    fn new(reach: Option<DistanceBias>, sequence: &Sequence) -> Self {
        let (n, m) = (sequence.queries, sequence.keys);
        let distances = reach.map_or(0, |reach| reach.width.min(n.max(m)));
        HeadPart { reach, dbias: vec![T::ZERO; distances], dtau: T::ZERO }
    }

    fn add(&mut self, first: &First<'_, T>) {
        self.dtau += first.t; // (E14)
        let Some(reach) = self.reach else { return };
        let Query { sequence, i, .. } = first.row.softmax.query;
        for (&j, &d_score) in first.row.softmax.keys.iter().zip(&first.d_scores) {
            if let Some(d) = reach.distance(sequence, i, j) {
                self.dbias[d] += d_score; // (E13)
            }
        }
    }
}

/// The operands of the backward pass.
struct BackwardOperands<'a, T: Real> {
    forward: Operands<'a, T>,
    dout: Rows<'a, T>,
    dlse: Rows<'a, T>,
}

/// A row of the first order.
struct First<'a, T> {
    row: Row<'a, T>,
    /// (1/n_i) Σ_j a_ij g_ij
    t: T,
    /// dS_ij of each visible key.
    d_scores: Vec<T>,
}

impl<T: Real> BackwardOperands<'_, T> {
    /// The row of a query.
    fn row<'q>(&self, query: &Query<'q>) -> First<'q, T> {
        let (row, dout) = (self.forward.row(query), self.dout.row(query.row));
        let p = &row.softmax.p;
        let mut g = vec![T::ZERO; p.len()]; // a_ij g_ij
        let (mut delta, mut sum) = (T::ZERO, T::ZERO);
        for (t, j, a) in row.active_keys() {
            g[t] = a * dot(dout, self.forward.v.row(query.key(j))); // (E7)
            delta += p[t] * g[t]; // (E8)
            sum += g[t];
        }
        let t = if p.is_empty() { T::ZERO } else { sum / row.n };
        let dlse = self.dlse.scalar(query.row);
        let d_scores = p.iter().zip(&g).map(|(&p, &g)| p * (g - delta + dlse)).collect(); // (E9)
        First { row, t, d_scores }
    }
}
