//! The pages of `docs/` that say what is computed: symbols and equations.

/// Symbols, shapes, roles and conventions.
///
#[doc = include_str!("../../../docs/notation.md")]
#[doc = include_str!("../../../docs/assets/katex.html")]
pub mod notation {}

/// The equations of attention.
///
#[doc = include_str!("../../../docs/attention.md")]
#[doc = include_str!("../../../docs/assets/katex.html")]
pub mod attention {}

/// The equations of attention_lse.
///
#[doc = include_str!("../../../docs/attention_lse.md")]
#[doc = include_str!("../../../docs/assets/katex.html")]
pub mod attention_lse {}

/// What the documents that this began with say wrongly.
///
#[doc = include_str!("../../../docs/errata.md")]
#[doc = include_str!("../../../docs/assets/katex.html")]
pub mod errata {}
