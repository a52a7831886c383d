//! Results of PyTorch's autograd for the same problems: `tests/fixtures/record_lazy_attention.py` recorded
//! them.

use super::tensors::{PASSES, run};
use crate::common::fixtures::agree;
use etalon_problem::Problem;

#[test]
fn every_pass_agrees_with_autograd() {
    agree("lazy_attention", 26, &PASSES, |problem, pass, x| {
        let Problem::LazyAttention(problem) = problem else { panic!("{problem:?}") };
        run(problem, pass, &x).expect("a result")
    });
}
