//! Results of PyTorch's autograd for the same problems: `tests/fixtures/record_linear_cross_entropy.py`
//! recorded them.

use super::tensors::{Operands, PASSES, run};
use crate::common::fixtures::agree;
use etalon_problem::Problem;

#[test]
fn every_pass_agrees_with_autograd() {
    agree("linear_cross_entropy", 27, &PASSES, |problem, pass, mut floats| {
        let Problem::LinearCrossEntropy(problem) = problem else { panic!("{problem:?}") };
        let targets = floats.remove("targets").expect("targets");
        let targets = targets.iter().map(|&y| y as i64).collect();
        run(problem, pass, &Operands { floats, targets }).expect("a result")
    });
}
