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

/// The equations of linear attention.
///
#[doc = include_str!("../../../docs/linear_attention.md")]
#[doc = include_str!("../../../docs/assets/katex.html")]
pub mod linear_attention {}

/// The equations of lazy attention.
///
#[doc = include_str!("../../../docs/lazy_attention.md")]
#[doc = include_str!("../../../docs/assets/katex.html")]
pub mod lazy_attention {}

/// The equations of linear cross-entropy.
///
#[doc = include_str!("../../../docs/linear_cross_entropy.md")]
#[doc = include_str!("../../../docs/assets/katex.html")]
pub mod linear_cross_entropy {}

/// What the documents that this began with say wrongly.
///
#[doc = include_str!("../../../docs/errata.md")]
#[doc = include_str!("../../../docs/assets/katex.html")]
pub mod errata {}
