//! Double-double arithmetic: how far off the f64 results are.

use super::cases::{Case, PASSES, cases, extents};
use super::tensors::{convert, operands, run};
use crate::common::bounded::Bounded;
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
    let unit = f64::EPSILON / 2.0;
    let (mut worst_share, mut worst_error) = (0.0f64, 0.0f64);
    for Case { name, problem } in problems() {
        for pass in PASSES {
            let x = operands(&problem, pass, 5);
            let found = run(&problem, pass, &x).expect(&name);
            let exact = run(&problem, pass, &convert(&x, Quad::from_f64)).expect(&name);
            let bound = run(&problem, pass, &convert(&x, Bounded::from_f64)).expect(&name);
            for (result, found) in &found {
                let scale = exact[result].iter().map(|y| y.to_f64()).filter(|y| y.is_finite());
                let scale = scale.fold(0.0f64, |scale, y| scale.max(y.abs()));
                let elements = found.iter().zip(&exact[result]).zip(&bound[result]);
                for ((&found, &exact), bound) in elements {
                    assert_eq!(found, bound.value, "{name}: {result} in other arithmetic");
                    if found == f64::NEG_INFINITY {
                        assert_eq!(exact.to_f64(), found, "{name}: {result}");
                        continue;
                    }
                    let error = (Quad::from_f64(found) - exact).to_f64().abs();
                    // 1 %: what the bound leaves out, the products of errors.
                    assert!(
                        error <= 1.01 * unit * bound.error,
                        "{name}: {result} is off by {error:e}, bound {:e}",
                        unit * bound.error
                    );
                    if error > 0.0 {
                        worst_share = worst_share.max(error / (unit * bound.error));
                        worst_error = worst_error.max(error / scale);
                    }
                }
            }
        }
    }
    println!("largest error: {worst_share:.2} of its bound; {worst_error:.1e} of its tensor");
    // A bound that nothing comes near would prove nothing; one case or another comes near it.
    assert!(worst_share > 0.1, "the largest error is {worst_share} of its bound");
    assert!(worst_error < 2e-14, "the largest error is {worst_error:e} of its tensor");
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
