//! Double-double arithmetic: how far off the f64 results are.

use super::cases::{cases, everything};
use super::tensors::{PASSES, operands, run};
use crate::common::bounded::Bounded;
use crate::common::precision::Precision;
use etalon_problem::LinearCrossEntropy;
use etalon_reference::scalar::{Quad, Real};

/// The cases, and one long enough for errors to gather.
fn problems() -> Vec<(&'static str, LinearCrossEntropy)> {
    let long = LinearCrossEntropy { tokens: 20, dim: 64, vocab: 300, ..everything() }.softcap(40.0);
    cases().into_iter().chain([("long", long)]).collect()
}

/// Every element of every result lies within the bound of its rounding errors, and that is, in units of the
/// largest element, below 10⁻¹³ (weights of either sign cancel). f64 multiplies matrices in another order
/// than the formula that the bound is run over: each sum may then err by the bound once more.
#[test]
fn results_are_as_exact_as_f64_allows() {
    let mut precision = Precision::default();
    for (name, problem) in problems() {
        for pass in PASSES {
            let x = operands(&problem, pass, 5);
            let found = run(&problem, pass, &x).expect(name);
            let exact = run(&problem, pass, &x.convert(Quad::from_f64)).expect(name);
            let bound = run(&problem, pass, &x.convert(Bounded::from_f64)).expect(name);
            precision.hold(name, (&found, &exact, &bound), 2.0);
        }
    }
    precision.finish(1e-13);
}

/// f32 keeps what f32 can: 24 bits, of which sums and exponentials of this size lose five.
#[test]
fn the_formula_in_f32_is_near() {
    for (name, problem) in cases() {
        for pass in PASSES {
            let x = operands(&problem, pass, 6).convert(|x| x as f32);
            let found = run(&problem, pass, &x).expect(name);
            let found = super::tensors::convert(&found, f64::from);
            let expected = run(&problem, pass, &x.convert(f64::from)).expect(name);
            let tolerance = 32.0 * f64::from(f32::EPSILON);
            super::tensors::assert_close(&found, &expected, tolerance, name);
        }
    }
}
