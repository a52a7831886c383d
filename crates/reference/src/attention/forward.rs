//! ```text
//! (F1)  s_ij  = σ q_i·k_j
//! (F2)  S_ij  = c·tanh(s_ij/c) + bias_ij
//! (F3)  lse_i = ln(Σ_j e^{S_ij} + e^{sink})
//! (F4)  P_ij  = e^{S_ij − lse_i}
//! (F5)  o_i   = Σ_j P_ij v_j
//! ```

use super::{Inputs, Output};
use crate::heads::each_query;
use crate::named::{Named, checked};
use crate::scalar::Real;
use crate::scores::{Bias, Row, ScoreOperands};
use crate::tensor::{HeadsMut, Rows, add_scaled};
use etalon_problem::{Attention, Error, Pass};

/// As [`forward`](super::forward()), of a problem that is sound but that values may have no elements.
pub(crate) fn any_width<T: Real>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
) -> Result<Output<T>, Error> {
    let mut output: Output<T> = checked(&problem.table(Pass::Forward), &[inputs.shapes()])?;
    output.lse.fill(T::from_f64(f64::NEG_INFINITY)); // a row of no sequence sees nothing
    let operands = Operands::new(problem, inputs)?;
    each_query(
        &problem.scores,
        [HeadsMut::new(&mut output.o), HeadsMut::new(&mut output.lse)],
        [],
        |_, _| (),
        |(), query, [o, lse], []| {
            let row = operands.scores.row(query); // (F1)–(F4)
            o.copy_from_slice(&operands.output(&row)); // (F5)
            lse[0] = row.lse;
        },
    );
    Ok(output)
}

/// The operands of the forward pass.
pub(super) struct Operands<'a, T: Real> {
    pub scores: ScoreOperands<'a, T>,
    pub v: Rows<'a, T>,
    value_dim: usize,
}

impl<'a, T: Real> Operands<'a, T> {
    pub fn new(problem: &'a Attention, inputs: &'a Inputs<'_, T>) -> Result<Self, Error> {
        let Inputs { q, k, v, sinks, bias } = inputs;
        let bias = Bias::ByPair(bias.as_ref().map(|bias| bias.view()));
        let scores = ScoreOperands::new(&problem.scores, q, k, sinks, bias)?;
        Ok(Operands { scores, v: Rows::new("v", v.view())?, value_dim: problem.value_dim })
    }

    /// (F5)
    pub fn output(&self, row: &Row<'_, T>) -> Vec<T> {
        let mut o = vec![T::ZERO; self.value_dim];
        for (j, p) in row.weights() {
            add_scaled(&mut o, p.stored(), self.v.row(row.query.key(j)));
        }
        o
    }
}
