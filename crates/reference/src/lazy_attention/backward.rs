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

use super::row::{Head, Operands, Row};
use super::{Cotangents, Gradients, Inputs};
use crate::heads::each_head;
use crate::named::{Named, check};
use crate::scalar::Real;
use crate::tensor::{Matrix, Output, Rows, add_scaled, dot};
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
    let [batch, heads, queries] = problem.scores.row_shape();
    let expected = [batch, heads, queries, problem.scores.extents.keys];
    Error::expect_shape("activity", &expected, activity.shape())?;
    gradients(problem, inputs, cotangents, Some(activity))
}

fn gradients<T: Real>(
    problem: &LazyAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    activity: Option<&ArrayView4<'_, bool>>,
) -> Result<Gradients<T>, Error> {
    problem.check()?;
    check(&problem.table(Pass::Backward), &[inputs.shapes(), cotangents.shapes()])?;
    let mut dq = Output::zeros("dq", &problem.scores.q_shape())?;
    let mut dk = Output::zeros("dk", &problem.scores.k_shape())?;
    let mut dv = Output::zeros("dv", &problem.v_shape())?;
    let shape = problem.bias_shape();
    let mut dbias = shape.map(|shape| Output::zeros("dbias", &shape)).transpose()?;
    let mut dtau = Output::zeros("dtau", &[problem.scores.extents.query_heads])?;
    let operands = BackwardOperands::new(problem, inputs, cotangents, activity)?;
    let parts = each_head(
        &problem.scores,
        [&mut dq],
        [&mut dk, &mut dv],
        |sequence, h, [mut dq], [dk, dv]| {
            let (head, mut first) = (operands.head(sequence, h), First::default());
            let mut part = HeadPart::new(problem.bias, sequence);
            for i in 0..sequence.queries {
                head.row(i, &mut first); // (E7)–(E9)
                let First { row, d_scores, .. } = &first;
                head.values.scores.pull_back(i, &row.softmax, d_scores, dq.row(i), dk); // (E10), (E11)
                for (t, j) in row.active_keys() {
                    add_scaled(dv.row(j), row.e[t], head.dout.row(i)); // (E12)
                }
                part.add(sequence, i, &first);
            }
            part
        },
    );
    for (part, h) in parts.into_iter().zip((0..problem.scores.extents.query_heads).cycle()) {
        dtau.elements()[h] += part.dtau;
        if let (Some(dbias), Some(reach)) = (&mut dbias, problem.bias) {
            let row = &mut dbias.elements()[h * reach.width..];
            row.iter_mut().zip(part.dbias).for_each(|(sum, part)| *sum += part);
        }
    }
    Ok(Gradients {
        dq: dq.finish()?,
        dk: dk.finish()?,
        dv: dv.finish()?,
        dbias: dbias.map(Output::finish).transpose()?,
        dtau: dtau.finish()?,
    })
}

/// What one sequence adds to the gradients that a head's sequences share.
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

    fn add(&mut self, sequence: &Sequence, i: usize, first: &First<T>) {
        self.dtau += first.t; // (E14)
        let Some(reach) = self.reach else { return };
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

impl<'a, T: Real> BackwardOperands<'a, T> {
    fn new(
        problem: &'a LazyAttention,
        inputs: &'a Inputs<'_, T>,
        cotangents: &'a Cotangents<'_, T>,
        activity: Option<&'a ArrayView4<'_, bool>>,
    ) -> Result<Self, Error> {
        Ok(BackwardOperands {
            forward: Operands::new(problem, inputs, activity)?,
            dout: Rows::new("dout", cotangents.dout.view())?,
            dlse: Rows::scalars("dlse", &cotangents.dlse)?,
        })
    }

    /// What one query head sees in one sequence.
    fn head<'b>(&'b self, sequence: &'b Sequence, head: usize) -> HeadCotangents<'b, T> {
        let &Sequence { batch, query_start, .. } = sequence;
        HeadCotangents {
            values: self.forward.head(sequence, head),
            dout: self.dout.matrix(batch, head, query_start),
            dlse: self.dlse.matrix(batch, head, query_start),
        }
    }
}

/// What one query head sees in one sequence.
struct HeadCotangents<'a, T> {
    values: Head<'a, T>,
    dout: Matrix<'a, T>,
    dlse: Matrix<'a, T>,
}

/// A row of the first order; the vectors hold one number for each visible key.
struct First<T> {
    row: Row<T>,
    /// a_ij g_ij
    g: Vec<T>,
    /// (1/n_i) Σ_j a_ij g_ij
    t: T,
    /// dS_ij
    d_scores: Vec<T>,
}

impl<T: Real> Default for First<T> {
    fn default() -> Self {
        First { row: Row::default(), g: Vec::new(), t: T::ZERO, d_scores: Vec::new() }
    }
}

impl<T: Real> HeadCotangents<'_, T> {
    /// Computes row `i`.
    fn row(&self, i: usize, first: &mut First<T>) {
        let First { row, g, t: t_i, d_scores } = first;
        self.values.row(i, row);
        let keys = row.softmax.keys.len();
        g.clear();
        g.resize(keys, T::ZERO);
        let (mut delta, mut sum) = (T::ZERO, T::ZERO);
        for (t, j) in row.active_keys() {
            g[t] = dot(self.dout.row(i), self.values.v.row(j)); // (E7)
            delta += row.softmax.p[t] * g[t]; // (E8)
            sum += g[t];
        }
        *t_i = if keys > 0 { sum / row.n } else { T::ZERO };
        d_scores.clear();
        let dlse = self.dlse.scalar(i);
        let d_score = |(&p, &g): (&T, &T)| p * (g - delta + dlse); // (E9)
        d_scores.extend(row.softmax.p.iter().zip(&*g).map(d_score));
    }
}
