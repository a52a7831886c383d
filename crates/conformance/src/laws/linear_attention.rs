//! Laws of linear_attention.

use super::Law;

pub(super) const LAWS: &[Law] = &[];
