//! The host of lazy_attention.

use super::host::{Job, Results, no_host};
use etalon_problem::{Algorithm, Error, LazyAttention};

/// The outputs of a request.
pub(super) fn results(_: &LazyAttention, _: &Job<'_>) -> Result<Results, Error> {
    Err(no_host(Algorithm::LazyAttention))
}
