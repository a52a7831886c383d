//! lazy_attention by name.

use super::{Arrays, no_pass};
use etalon_problem::{Algorithm, Error, LazyAttention, Pass};
use etalon_reference::scalar::Real;

/// The outputs of a pass.
pub(super) fn pass<T: Real>(
    _: &LazyAttention,
    pass: Pass,
    _: &Arrays<T>,
) -> Result<Arrays<T>, Error> {
    Err(no_pass(Algorithm::LazyAttention, pass))
}
