//! With P and o of the forward pass, and tq for ddq and so on in (D1)–(D4):
//!
//! ```text
//! (J1)  to_i   = Σ_j P_ij (U_ij v_j + tv_j) − u_i o_i        which is (D5)
//! (J2)  tlse_i = u_i
//! ```

use super::forward::{ForwardOperands, HeadValues};
use super::{Inputs, OutputTangents, Tangents};
use crate::heads::for_each_head;
use crate::named::{Named, check};
use crate::scalar::Real;
use crate::scores::{Direction, Motion, Row};
use crate::tensor::{Matrix, Output, Rows, add_scaled};
use etalon_problem::{Attention, Error, Pass};

/// How o and lse move when the inputs move along the tangents.
pub fn jvp<T: Real>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    tangents: &Tangents<'_, T>,
) -> Result<OutputTangents<T>, Error> {
    let Tangents { tq, tk, tv, tsinks, tbias } = tangents;
    problem.check()?;
    check(&problem.table(Pass::Jvp), &[inputs.shapes(), tangents.shapes()])?;
    let mut to = Output::zeros("to", &problem.o_shape())?;
    let mut tlse = Output::zeros("tlse", &problem.scores.row_shape())?;
    let operands = ForwardOperands::new(problem, inputs)?;
    let direction = Direction::new(&problem.scores, tq, tk, tsinks, tbias)?;
    let tv = Rows::or_zero("tv", tv, problem.value_dim)?;
    for_each_head(
        &problem.scores,
        [&mut to, &mut tlse],
        [],
        |sequence, head, [mut to, mut tlse], []| {
            let values = operands.head(sequence, head);
            let tangents = direction.head(&values.scores);
            let tv = tv.matrix(sequence.batch, head / problem.scores.group(), sequence.key_start);
            let (mut row, mut motion) = (Row::default(), Motion::default());
            let mut o = vec![T::ZERO; problem.value_dim];
            for i in 0..sequence.queries {
                values.scores.row(i, &mut row);
                o.fill(T::ZERO);
                values.output(&row, &mut o);
                values.scores.tangent(i, &row, &tangents, &mut motion);
                values.output_tangent(&row, &motion, &tv, &o, to.row(i)); // (J1)
                tlse.row(i)[0] = motion.u; // (J2)
            }
            T::ZERO
        },
    )?;
    Ok(OutputTangents { to: to.finish()?, tlse: tlse.finish()? })
}

impl<T: Real> HeadValues<'_, T> {
    /// (D5), added to `to`: how o moves when the scores move by U and v by `tv`.
    pub(super) fn output_tangent(
        &self,
        row: &Row<T>,
        motion: &Motion<T>,
        tv: &Matrix<'_, T>,
        o: &[T],
        to: &mut [T],
    ) {
        if row.keys.is_empty() {
            return; // o stays 0
        }
        for (t, (&j, &p)) in row.keys.iter().zip(&row.p).enumerate() {
            add_scaled(to, p * motion.big_u[t], self.v.row(j));
            add_scaled(to, p, tv.row(j));
        }
        add_scaled(to, -motion.u, o);
    }
}
