//! Results of PyTorch's autograd for the same problems: `tests/fixtures/record_linear_attention.py` recorded
//! them.

use super::tensors::run;
use crate::common::fixtures::agree;
use etalon_problem::{Pass, Problem};

#[test]
fn every_pass_agrees_with_autograd() {
    agree(
        "linear_attention",
        24,
        &[Pass::Forward, Pass::Backward, Pass::DoubleBackward],
        |problem, pass, x| {
            let Problem::LinearAttention(problem) = problem else { panic!("{problem:?}") };
            run(problem, pass, &x).expect("a result")
        },
    );
}
