//! With the weights e of (E1)–(E5):
//!
//! ```text
//! (E6)  o_i = Σ_j e_ij v_j        over the active j; not renormalised
//! ```

use super::row::Operands;
use super::{Inputs, Output};
use crate::heads::each_query;
use crate::named::zeros;
use crate::scalar::Real;
use crate::tensor::{HeadsMut, add_scaled};
use etalon_problem::{Error, LazyAttention, Pass};

/// o and lse.
pub fn forward<T: Real>(
    problem: &LazyAttention,
    inputs: &Inputs<'_, T>,
) -> Result<Output<T>, Error> {
    let operands = Operands::checked(problem, inputs)?;
    let mut output: Output<T> = zeros(&problem.table(Pass::Forward))?;
    output.lse.fill(T::from_f64(f64::NEG_INFINITY)); // a row of no sequence sees nothing
    each_query(
        &problem.scores,
        [HeadsMut::new(&mut output.o), HeadsMut::new(&mut output.lse)],
        [],
        |_, _| (),
        |(), query, [o, lse], []| {
            let row = operands.row(query); // (E1)–(E5)
            for (t, j, _) in row.active_keys() {
                add_scaled(o, row.e[t].stored(), operands.v.row(query.key(j))); // (E6)
            }
            lse[0] = row.softmax.lse;
        },
    );
    Ok(output)
}
