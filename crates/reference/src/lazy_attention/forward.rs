//! With the weights e of (E1)–(E5):
//!
//! ```text
//! (E6)  o_i = Σ_j e_ij v_j        over the active j; not renormalised
//! ```

use super::row::Operands;
use super::{Inputs, Output};
use crate::heads::each_query;
use crate::scalar::Real;
use crate::tensor::{self, add_scaled};
use etalon_problem::{Error, LazyAttention};

/// o and lse.
pub fn forward<T: Real>(
    problem: &LazyAttention,
    inputs: &Inputs<'_, T>,
) -> Result<Output<T>, Error> {
    let operands = Operands::checked(problem, inputs)?;
    let mut o = tensor::Output::zeros("o", &problem.o_shape())?;
    // A row of no sequence sees nothing.
    let unseen = T::from_f64(f64::NEG_INFINITY);
    let mut lse = tensor::Output::new("lse", &problem.scores.row_shape(), unseen)?;
    each_query(
        &problem.scores,
        [&mut o, &mut lse],
        [],
        |_, _| (),
        |(), query, [o, lse], []| {
            let row = operands.row(query); // (E1)–(E5)
            for (t, j) in row.active_keys() {
                add_scaled(o, row.e[t], operands.v.row(query.key(j))); // (E6)
            }
            lse[0] = row.softmax.lse;
        },
    );
    Ok(Output { o: o.finish()?, lse: lse.finish()?, v_sum: None })
}
