//! The host of linear_attention.

use super::host::{Job, Results, no_host};
use etalon_problem::{Algorithm, Error, LinearAttention};

/// The outputs of a request.
pub(super) fn results(_: &LinearAttention, _: &Job<'_>) -> Result<Results, Error> {
    Err(no_host(Algorithm::LinearAttention))
}
