//! Laws of linear_cross_entropy.

use super::Law;

pub(super) const LAWS: &[Law] = &[];
