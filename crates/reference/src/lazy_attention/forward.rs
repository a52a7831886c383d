//! With the weights e of (E1)–(E5):
//!
//! ```text
//! (E6)  o_i = Σ_j e_ij v_j        over the active j; not renormalised
//! ```

use super::row::{Operands, Row};
use super::{Inputs, Output};
use crate::heads::each_head;
use crate::named::{Named, check};
use crate::scalar::Real;
use crate::tensor::{self, add_scaled};
use etalon_problem::{Error, LazyAttention, Pass};

/// o and lse.
pub fn forward<T: Real>(
    problem: &LazyAttention,
    inputs: &Inputs<'_, T>,
) -> Result<Output<T>, Error> {
    problem.check()?;
    check(&problem.table(Pass::Forward), &[inputs.shapes()])?;
    let mut o = tensor::Output::zeros("o", &problem.o_shape())?;
    // A row of no sequence sees nothing.
    let unseen = T::from_f64(f64::NEG_INFINITY);
    let mut lse = tensor::Output::new("lse", &problem.scores.row_shape(), unseen)?;
    let operands = Operands::new(problem, inputs, None)?;
    each_head(&problem.scores, [&mut o, &mut lse], [], |sequence, head, [mut o, mut lse], []| {
        let (head, mut row) = (operands.head(sequence, head), Row::default());
        for i in 0..sequence.queries {
            head.row(i, &mut row); // (E1)–(E5)
            for (t, j) in row.active_keys() {
                add_scaled(o.row(i), row.e[t], head.v.row(j)); // (E6)
            }
            lse.row(i)[0] = row.softmax.lse;
        }
    });
    Ok(Output { o: o.finish()?, lse: lse.finish()?, v_sum: None })
}
