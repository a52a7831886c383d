//! The host of linear_cross_entropy.

use super::host::{Job, Results, no_host};
use etalon_problem::{Algorithm, Error, LinearCrossEntropy};

/// The outputs of a request.
pub(super) fn results(_: &LinearCrossEntropy, _: &Job<'_>) -> Result<Results, Error> {
    Err(no_host(Algorithm::LinearCrossEntropy))
}
