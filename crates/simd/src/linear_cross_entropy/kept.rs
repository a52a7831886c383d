//! Logits that are kept for their gradients.

use super::choice::Chosen;
use super::gradient::Pull;
use super::partial::Partial;
use super::second::motion::Motion;
use super::tokens::Token;
use std::ops::Range;

/// Some tokens of a sweep in a span of tiles, whose logits are kept.
pub struct Kept<'k> {
    pub tokens: &'k [Token],
    pub pulls: &'k [Pull],
    pub totals: &'k [Partial],
    /// In the second order how these move.
    pub pull_motions: &'k [Pull],
    pub motions: &'k [Motion],
    pub span: Range<usize>,
    /// True if some entropy has a cotangent, of either order.
    pub entropy: bool,
    /// The tiles that a filter leaves out of dh and dw.
    pub chosen: Option<Chosen<'k>>,
}
