//! Some tokens of linear cross-entropy. The normaliser of a mean is that of all.

use super::super::answer::Judged;
use super::{OFF, Part, Piece, RIGHT, some, words};
use crate::conventions::{Reading, gather};
use crate::tensor::Values;
use etalon_problem::{Axis, LinearCrossEntropy, Operand, Problem, Reduction};

/// Some tokens.
pub(in super::super) struct Losses {
    rows: Vec<usize>,
}

/// The parts in which outputs with a row for each token are off: one.
pub(super) fn parts(problem: &LinearCrossEntropy, off: &[&Judged<'_>], products: f64) -> Vec<Part> {
    let mut is_off = vec![false; problem.tokens];
    for output in off.iter().filter(|x| x.operand.axes.first() == Some(&Axis::Targets)) {
        is_off.iter_mut().zip(output.own_rows()).for_each(|(all, own)| *all |= own);
    }
    let (off, right): (Vec<usize>, Vec<usize>) = (0..problem.tokens).partition(|&row| is_off[row]);
    if off.is_empty() {
        return Vec::new();
    }
    let most = (products / (problem.dim * problem.vocab) as f64) as usize;
    let mut rows = some(&off, (4 * OFF).min(most).max(4));
    rows.extend(some(&right, RIGHT.min(most)));
    rows.sort_unstable();
    vec![Part::Losses(Losses { rows })]
}

impl Losses {
    /// Outputs that have a row for each token.
    pub fn picks(&self, operand: &Operand) -> Option<Vec<Vec<usize>>> {
        let (first, rest) = operand.axes.split_first()?;
        let inner = operand.shape[1..].iter().map(|&extent| (0..extent).collect());
        (*first == Axis::Targets && !rest.contains(&Axis::Classes))
            .then(|| [self.rows.clone()].into_iter().chain(inner).collect())
    }

    pub fn describe(&self) -> String {
        format!("tokens {}", words(&self.rows))
    }

    pub fn cost(&self, problem: &Problem) -> f64 {
        (self.rows.len() * problem.extent(Axis::Dim) * problem.extent(Axis::Classes)) as f64
    }

    pub fn piece(&self, reading: &Reading, inputs: &Values) -> Option<Piece> {
        let Problem::LinearCrossEntropy(own) = &reading.problem else { return None };
        let mut problem = LinearCrossEntropy { tokens: self.rows.len(), ..own.clone() };
        if own.reduction == Reduction::Mean {
            let (z, z_lse) = normalisers(own, reading, inputs)?;
            if z == 0.0 || (z != z_lse && own.lse_square_scale != 0.0) {
                return None;
            }
            problem.reduction = Reduction::By { normaliser: z };
        }
        let rows = self.rows.clone();
        let picks = move |axis: Axis, _: usize| (axis == Axis::Targets).then(|| rows.clone());
        Some(Piece { problem: problem.into(), picks: Box::new(picks), wanted: Box::new(|_| None) })
    }
}

/// Z and Z_z of all tokens.
fn normalisers(own: &LinearCrossEntropy, reading: &Reading, inputs: &Values) -> Option<(f64, f64)> {
    let of = |name: &str| gather(inputs.get(name), &reading.edits_of(name), None);
    let (targets, tokens, classes) = (of("targets")?, of("token_weights"), of("class_weights"));
    let ignored = own.ignore_index as f64;
    let weights: Vec<f64> = targets
        .iter()
        .enumerate()
        .filter(|(_, target)| **target != ignored)
        .map(|(i, &target)| {
            let token = tokens.as_ref().filter(|_| own.token_weights).map_or(1.0, |x| x[[i]]);
            let class = classes.as_ref().filter(|_| own.class_weights);
            token * class.and_then(|x| x.get([target as usize]).copied()).unwrap_or(1.0)
        })
        .collect();
    own.normalisers(weights.len(), weights.into_iter()).ok()
}
