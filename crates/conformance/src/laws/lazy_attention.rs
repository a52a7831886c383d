//! Laws of lazy_attention.

use super::Law;

pub(super) const LAWS: &[Law] = &[];
