//! Results of PyTorch's autograd for the same problems: `tests/fixtures/record.py` recorded them.

use super::cases::PASSES;
use super::tensors::run;
use crate::common::fixtures::agree;

/// 24 problems of each algorithm.
#[test]
fn every_pass_agrees_with_autograd() {
    agree(".", 48, &PASSES, |problem, pass, x| run(problem, pass, &x).expect("a result"));
}
