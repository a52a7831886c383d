//! The chunked form: what kernels compute, as a second way to the same numbers.
//!
//! A chunk of L tokens, counted here from 1, begins with the state S = H_0 of its own. Every decay
//! is a product of those between two places, e to a sum of log-decays that are at most 0: no
//! difference of prefix sums, no division by a decay, nothing that overflows.
//!
//! ```text
//! (R20) P_ij = e^{g_{j+1} + … + g_i}    for j ≤ i: what token i sees of token j
//!       α_i  = e^{g_1 + … + g_i}        what token i sees of S
//!       ω_j  = P_Lj                     what the next chunk sees of token j
//! ```
//!
//! A reset between two places makes the decay 0; such pairs are left out.

mod backward;
mod forward;

pub use backward::backward;
pub use forward::forward;

use super::heads::Head;
use crate::scalar::Real;
use etalon_problem::Error;
use std::ops::Range;

/// Fails unless chunks have tokens.
fn check_chunk(chunk: usize) -> Result<(), Error> {
    if chunk == 0 { Err(Error::value("chunk", "at least 1", 0)) } else { Ok(()) }
}

/// The tokens of every chunk of a head; the last one may be shorter than the others.
fn chunks<T: Real>(head: &Head<'_, T>, chunk: usize) -> Vec<Range<usize>> {
    let starts = (0..head.tokens).step_by(chunk);
    starts.map(|start| start..head.tokens.min(start.saturating_add(chunk))).collect()
}

/// (R20): what one token sees of its chunk.
struct Seen<T> {
    /// The tokens j that it sees, from the last reset on.
    tokens: Range<usize>,
    /// P_ij of these tokens.
    weights: Vec<T>,
    /// α_i, unless there was a reset.
    state: Option<T>,
}

impl<T: Real> Seen<T> {
    /// The tokens that token `i` of a chunk that begins with `start` sees, and their weights.
    fn new(head: &Head<'_, T>, start: usize, i: usize) -> Self {
        let mut weights = Vec::new();
        let mut sum = Some(T::ZERO);
        let mut first = i + 1;
        while let Some(between) = sum.filter(|_| first > start) {
            weights.push(between.exp());
            first -= 1;
            sum = head.log_decay(first).map(|g| between + g);
        }
        weights.reverse();
        Seen { tokens: first..i + 1, weights, state: sum.map(T::exp) }
    }

    /// Every visible token j with its P_ij.
    fn pairs(&self) -> impl Iterator<Item = (usize, T)> {
        self.tokens.clone().zip(self.weights.iter().copied())
    }
}
