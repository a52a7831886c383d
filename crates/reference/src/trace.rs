//! Traces: what a kernel that walks over tiles holds after each of them, as the formulas over what it has seen. No
//! sum is rescaled and none is kept from tile to tile, so that the end has the bits of the pass.

pub use crate::traced::{Piece, Pieces, Traced, place, wanted};

use crate::attention::trace::pieces;
use crate::linear_attention;
use crate::named::{ByName, Tensors};
use crate::traced::joined;
use etalon_problem::{Error, Pass, Problem, Walk};

/// The tensors `only` of the trace of a pass of attention or linear attention: `x` holds the inputs and cotangents of
/// the pass.
///
/// Fails where the walk does not fit the problem, where `x` is not what the pass needs, and where there is no memory.
pub fn trace(
    problem: &Problem,
    pass: Pass,
    x: &Tensors<f64>,
    walk: &Walk,
    only: &[&str],
) -> Result<Vec<Traced<f64>>, Error> {
    let wanted = wanted(problem, pass, walk, only)?;
    match problem {
        Problem::LinearAttention(own) => linear_attention::trace(own, pass, x, walk, only),
        Problem::Attention(own) => {
            let x = ByName::checked(problem, pass, x)?;
            let pieces = pieces(own, pass, &x, walk, &wanted)?;
            joined(wanted, pieces)
        }
        _ => Ok(Vec::new()), // refused already
    }
}
