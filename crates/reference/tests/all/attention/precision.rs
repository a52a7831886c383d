//! Double-double arithmetic: how far off the f64 results are.

use super::cases::{Case, PASSES, cases, extents};
use super::tensors::{convert, operands, run};
use crate::common::bounded::Bounded;
use crate::common::precision::Precision;
use etalon_problem::{Attention, AttentionLse, Mask};
use etalon_reference::scalar::{Quad, Real};

/// The cases, and one long enough for errors to gather: 64 keys, 32 elements.
fn problems() -> Vec<Case> {
    let long = Attention::new(extents([1, 2, 1, 48, 64, 32])).mask(Mask::causal());
    let long = long.softcap(5.0).sinks().bias(1, 1);
    let lse = AttentionLse { scores: long.scores.clone() };
    let named = |name: &str, problem| Case { name: name.to_string(), problem };
    let mut problems = cases();
    problems.push(named("attention, long", long.into()));
    problems.push(named("attention_lse, long", lse.into()));
    problems
}

/// Every element of every result lies within the bound of its rounding errors, and that is, in
/// units of the largest element, about 10⁻¹⁵.
#[test]
fn results_are_as_exact_as_f64_allows() {
    let mut precision = Precision::default();
    for Case { name, problem } in problems() {
        for pass in PASSES {
            let x = operands(&problem, pass, 5);
            let found = run(&problem, pass, &x).expect(&name);
            let exact = run(&problem, pass, &convert(&x, Quad::from_f64)).expect(&name);
            let bound = run(&problem, pass, &convert(&x, Bounded::from_f64)).expect(&name);
            let same = convert(&bound, |y| y.value) == found;
            assert!(same, "{name}: {pass} in other arithmetic");
            // 1 %: what the bound leaves out, the products of errors.
            precision.hold(&name, (&found, &exact, &bound), 1.01);
        }
    }
    precision.finish(2e-14);
}

/// f32 keeps what f32 can: 24 bits, of which sums and exponentials of this size lose four.
#[test]
fn the_formula_in_f32_is_near() {
    for Case { name, problem } in problems() {
        for pass in PASSES {
            let x = convert(&operands(&problem, pass, 6), |x| x as f32);
            let found = convert(&run(&problem, pass, &x).expect(&name), f64::from);
            let expected = run(&problem, pass, &convert(&x, f64::from)).expect(&name);
            for (result, found) in &found {
                let tolerance = 16.0 * f64::from(f32::EPSILON);
                let what = format!("{name}: {result}");
                super::tensors::assert_close(found, &expected[result], tolerance, &what);
            }
        }
    }
}
