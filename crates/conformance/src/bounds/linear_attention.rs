//! The bounds of linear_attention.

use super::{Asked, Errors};
use etalon_problem::{Algorithm, Error, LinearAttention};

/// The errors of its outputs.
pub(super) fn errors(_: &LinearAttention, asked: &Asked<'_>) -> Result<Errors, Error> {
    Err(asked.underived(Algorithm::LinearAttention))
}
