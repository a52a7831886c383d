//! The bounds of lazy_attention.

use super::{Asked, Errors};
use etalon_problem::{Algorithm, Error, LazyAttention};

/// The errors of its outputs.
pub(super) fn errors(_: &LazyAttention, asked: &Asked<'_>) -> Result<Errors, Error> {
    Err(asked.underived(Algorithm::LazyAttention))
}
