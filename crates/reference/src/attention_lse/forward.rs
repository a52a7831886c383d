//! ```text
//! (L1)  lse_i = ln(Σ_j e^{S_ij} + e^{sink})        with S of (F1), (F2)
//! ```

use super::{Inputs, Output, score_operands};
use crate::heads::for_each_head;
use crate::named::{Named, check};
use crate::scalar::Real;
use crate::scores::Row;
use crate::tensor;
use etalon_problem::{AttentionLse, Error, Pass};

/// lse.
pub fn forward<T: Real>(
    problem: &AttentionLse,
    inputs: &Inputs<'_, T>,
) -> Result<Output<T>, Error> {
    problem.check()?;
    check(&problem.table(Pass::Forward), &[inputs.shapes()])?;
    // A row of no sequence sees nothing.
    let unseen = T::from_f64(f64::NEG_INFINITY);
    let mut lse = tensor::Output::new("lse", &problem.scores.row_shape(), unseen)?;
    let operands = score_operands(problem, inputs)?;
    for_each_head(&problem.scores, [&mut lse], [], |sequence, head, [mut lse], []| {
        let scores = operands.head(sequence, head);
        let mut row = Row::default();
        for i in 0..sequence.queries {
            scores.row(i, &mut row);
            lse.row(i)[0] = row.lse; // (L1)
        }
        T::ZERO
    })?;
    Ok(Output { lse: lse.finish()?, gradient: None })
}
