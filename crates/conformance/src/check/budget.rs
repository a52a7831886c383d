//! Products that explanations may take, and what was found with them.

use super::Explanation;
use crate::cases::cost;
use etalon_problem::{Pass, Problem};

/// Evaluations of a pass that the check of right results takes: the exact results and those of the forward
/// pass, the bounds as three, and simulated kernels.
const RIGHT: f64 = 5.0 + crate::typical::KERNELS as f64;

/// Limit of the work on explanations, as a share of the work of the rest of the check.
pub(super) const SHARE: f64 = 0.4;

/// Products that nobody waits for: of a problem that takes fewer with all its candidates, everything is
/// evaluated.
pub(super) const FEW: f64 = 2e9;

/// So many candidates a problem has, about.
const CANDIDATES: f64 = 100.0;

/// True if a problem is so small that other readings of it are evaluated as a whole, several at once.
pub fn explains(problem: &Problem) -> bool {
    CANDIDATES * cost(problem) <= FEW
}

/// Products of an evaluation of a pass, in those of the forward pass.
pub(super) fn factor(pass: Pass) -> f64 {
    match pass {
        Pass::Forward | Pass::Step => 1.0,
        Pass::Jvp => 2.0,
        Pass::Backward => 2.5,
        Pass::ForwardBackward => 3.5,
        Pass::DoubleBackward => 6.0,
    }
}

/// Products that the check of right results takes.
pub(super) fn products_of_a_check(problem: &Problem, pass: Pass) -> f64 {
    RIGHT * factor(pass) * cost(problem)
}

/// Products that the check of a trace takes: the exact steps, and their bounds as three.
pub(super) fn products_of_a_trace(problem: &Problem, pass: Pass) -> f64 {
    4.0 * factor(pass) * cost(problem)
}

/// Explanations found.
#[derive(Default)]
pub(super) struct Found {
    pub explanations: Vec<Explanation>,
    /// The parts on which readings were evaluated, where they were not on everything.
    pub parts: Vec<String>,
    pub not_tried: Option<String>,
    /// Number of candidates that were tried.
    pub tried: usize,
    /// Products that they took.
    pub products: f64,
}
