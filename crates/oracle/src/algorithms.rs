//! What there is: every algorithm with its passes and what its inputs are.

use etalon_problem::{Algorithm, Pass};

/// An algorithm as the suite knows it.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// What it computes, in one line.
    pub formula: &'static str,
    /// The passes that have proven bounds, and so can be judged element by element.
    pub judged: &'static [Pass],
}

const SECOND_ORDER: &[Pass] = &[Pass::Forward, Pass::Backward, Pass::DoubleBackward, Pass::Jvp];

/// Every algorithm.
pub const ALL: &[Entry] = &[
    Entry {
        algorithm: Algorithm::Attention,
        formula: "o = softmax(S) v and lse, with S = c·tanh(σ q·k / c) + bias",
        judged: SECOND_ORDER,
    },
    Entry {
        algorithm: Algorithm::AttentionLse,
        formula: "lse = ln Σ exp S, without values",
        judged: SECOND_ORDER,
    },
    Entry {
        algorithm: Algorithm::LinearAttention,
        formula: "H_t = e^{g_t} H_{t−1} + k_tᵀ v_t and o_t = σ q_t H_t",
        judged: &[Pass::Forward, Pass::Backward, Pass::DoubleBackward, Pass::Step],
    },
    Entry {
        algorithm: Algorithm::LazyAttention,
        formula: "o = Σ_j max(softmax(S)_j + τ/n, 0) v_j",
        judged: &[Pass::Forward, Pass::Backward],
    },
    Entry {
        algorithm: Algorithm::LinearCrossEntropy,
        formula: "loss = lse(z) − z_target with z = h·w, and relatives",
        judged: &[Pass::Forward, Pass::Backward, Pass::DoubleBackward, Pass::ForwardBackward],
    },
];

/// The passes of an algorithm that have proven bounds.
pub fn judged(algorithm: Algorithm) -> &'static [Pass] {
    ALL.iter().find(|entry| entry.algorithm == algorithm).map_or(&[], |entry| entry.judged)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_complete() {
        let listed: Vec<Algorithm> = ALL.iter().map(|entry| entry.algorithm).collect();
        assert_eq!(listed, Algorithm::ALL);
    }
}
