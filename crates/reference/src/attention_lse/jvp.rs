//! With P of the forward pass, and tq for ddq and so on in (D1)–(D4):
//!
//! ```text
//! (J2)  tlse_i = u_i
//! ```

use super::{Inputs, OutputTangents, Tangents, score_operands};
use crate::heads::for_each_head;
use crate::named::{Named, check};
use crate::scalar::Real;
use crate::scores::{Direction, Motion, Row};
use crate::tensor::Output;
use etalon_problem::{AttentionLse, Error, Pass};

/// How lse moves when the inputs move along the tangents.
pub fn jvp<T: Real>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
    tangents: &Tangents<'_, T>,
) -> Result<OutputTangents<T>, Error> {
    let Tangents { tq, tk, tsinks, tbias } = tangents;
    problem.check()?;
    check(&problem.table(Pass::Jvp), &[inputs.shapes(), tangents.shapes()])?;
    let mut tlse = Output::zeros("tlse", &problem.scores.row_shape())?;
    let operands = score_operands(problem, inputs)?;
    let direction = Direction::new(&problem.scores, tq, tk, tsinks, tbias)?;
    for_each_head(&problem.scores, [&mut tlse], [], |sequence, head, [mut tlse], []| {
        let scores = operands.head(sequence, head);
        let tangents = direction.head(&scores);
        let (mut row, mut motion) = (Row::default(), Motion::default());
        for i in 0..sequence.queries {
            scores.row(i, &mut row);
            scores.tangent(i, &row, &tangents, &mut motion);
            tlse.row(i)[0] = motion.u; // (J2)
        }
        T::ZERO
    })?;
    Ok(OutputTangents { tlse: tlse.finish()? })
}
