//! ```text
//! (F1)  s_ij  = σ q_i·k_j
//! (F2)  S_ij  = c·tanh(s_ij/c) + bias_ij
//! (F3)  lse_i = ln(Σ_j e^{S_ij} + e^{sink})
//! (F4)  P_ij  = e^{S_ij − lse_i}
//! (F5)  o_i   = Σ_j P_ij v_j
//! ```

use super::{Inputs, Output};
use crate::heads::for_each_head;
use crate::named::{Named, check};
use crate::scalar::Real;
use crate::scores::{HeadScores, Row, ScoreOperands};
use crate::tensor::{self, Matrix, Rows, add_scaled};
use etalon_problem::{Attention, Error, Pass, Sequence};

/// o and lse.
pub fn forward<T: Real>(problem: &Attention, inputs: &Inputs<'_, T>) -> Result<Output<T>, Error> {
    problem.check()?;
    check(&problem.table(Pass::Forward), &[inputs.shapes()])?;
    let mut o = tensor::Output::zeros("o", &problem.o_shape())?;
    // A row of no sequence sees nothing.
    let unseen = T::from_f64(f64::NEG_INFINITY);
    let mut lse = tensor::Output::new("lse", &problem.scores.row_shape(), unseen)?;
    let operands = ForwardOperands::new(problem, inputs)?;
    for_each_head(
        &problem.scores,
        [&mut o, &mut lse],
        [],
        |sequence, head, [mut o, mut lse], []| {
            let values = operands.head(sequence, head);
            let mut row = Row::default();
            for i in 0..sequence.queries {
                values.scores.row(i, &mut row); // (F1)–(F4)
                values.output(&row, o.row(i)); // (F5)
                lse.row(i)[0] = row.lse;
            }
            T::ZERO
        },
    )?;
    Ok(Output { o: o.finish()?, lse: lse.finish()? })
}

/// The operands of the forward pass.
pub(super) struct ForwardOperands<'a, T: Real> {
    scores: ScoreOperands<'a, T>,
    v: Rows<'a, T>,
    group: usize,
}

impl<'a, T: Real> ForwardOperands<'a, T> {
    pub fn new(problem: &'a Attention, inputs: &'a Inputs<'_, T>) -> Result<Self, Error> {
        let Inputs { q, k, v, sinks, bias } = inputs;
        Ok(ForwardOperands {
            scores: ScoreOperands::new(&problem.scores, q, k, sinks, bias)?,
            v: Rows::new("v", v.view())?,
            group: problem.scores.group(),
        })
    }

    /// What one query head sees in one sequence.
    pub fn head<'b>(&'b self, sequence: &'b Sequence, head: usize) -> HeadValues<'b, T> {
        HeadValues {
            scores: self.scores.head(sequence, head),
            v: self.v.matrix(sequence.batch, head / self.group, sequence.key_start),
        }
    }
}

/// What one query head sees in one sequence.
pub(super) struct HeadValues<'a, T> {
    pub scores: HeadScores<'a, T>,
    pub v: Matrix<'a, T>,
}

impl<T: Real> HeadValues<'_, T> {
    /// (F5), added to `o`.
    pub fn output(&self, row: &Row<T>, o: &mut [T]) {
        for (&j, &p) in row.keys.iter().zip(&row.p) {
            add_scaled(o, p, self.v.row(j));
        }
    }
}
