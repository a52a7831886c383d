//! The bounds of linear_cross_entropy.

use super::{Asked, Errors};
use etalon_problem::{Algorithm, Error, LinearCrossEntropy};

/// The errors of its outputs.
pub(super) fn errors(_: &LinearCrossEntropy, asked: &Asked<'_>) -> Result<Errors, Error> {
    Err(asked.underived(Algorithm::LinearCrossEntropy))
}
