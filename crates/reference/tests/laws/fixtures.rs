//! What PyTorch's autograd says of the same problems: `tests/fixtures/record.py` wrote it
//! down.

use crate::cases::PASSES;
use crate::common::fixtures::agree;
use crate::tensors::run;

/// 24 problems of each algorithm.
#[test]
fn every_pass_agrees_with_autograd() {
    agree(".", 48, &PASSES, |problem, pass, x| run(problem, pass, &x).expect("a result"));
}
