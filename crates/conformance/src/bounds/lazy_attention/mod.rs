//! The bounds of lazy_attention: equations (N40) to (N51), after those of attention for the scores
//! and lse.

mod backward;
mod forward;
mod row;

use super::{Asked, Errors};
use etalon_problem::{Algorithm, Error, LazyAttention, Pass};
use row::Operands;
use std::collections::BTreeMap;

/// The errors of its outputs.
pub(super) fn errors(problem: &LazyAttention, asked: &Asked<'_>) -> Result<Errors, Error> {
    let operands = Operands::new(problem, asked)?;
    let lists = match asked.pass {
        Pass::Forward => {
            let errors = forward::errors(&operands);
            BTreeMap::from([("o", errors.o), ("lse", errors.lse)])
        }
        Pass::Backward => {
            let (dout, dlse) = (asked.input("dout")?, asked.optional("dlse")?);
            backward::errors(&operands, dout, dlse, asked.output("o")?)
        }
        _ => return Err(asked.underived(Algorithm::LazyAttention)),
    };
    Ok(Errors { lists, power: None })
}
