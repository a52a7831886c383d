//! Errors of f64: double-double arithmetic measures them, and a running error bound limits them.

use super::cases::{Gates, cases};
use super::tensors::{PASSES, assert_absolutely_close, convert, run, run_chunked};
use crate::common::bounded::Bounded;
use etalon_problem::Pass;
use etalon_reference::scalar::{Quad, Real};

/// Half a unit in the last place.
const UNIT: f64 = f64::EPSILON / 2.0;

#[test]
fn rounding_errors_stay_within_their_bound() {
    let (mut worst_share, mut worst_error) = (0.0f64, 0.0f64);
    for case in cases() {
        for pass in PASSES {
            let x = case.operands(pass, 5);
            let (exact, bounded) = (convert(&x, Quad::from_f64), convert(&x, Bounded::from_f64));
            let exact = run(&case.problem, pass, &exact).expect(&case.name);
            let mut forms = vec![run(&case.problem, pass, &bounded).expect(&case.name)];
            if [Pass::Forward, Pass::Backward].contains(&pass) {
                forms.push(run_chunked(&case.problem, pass, &bounded, 4).expect(&case.name));
            }
            for (result, exact) in &exact {
                let scale = exact.iter().fold(0.0f64, |scale, x| scale.max(x.to_f64().abs()));
                for form in &forms {
                    for (bound, &exact) in form[result].iter().zip(exact) {
                        let error = (Quad::from_f64(bound.value) - exact).to_f64().abs();
                        // 1 %: what the bound leaves out, the products of errors.
                        let allowed = 1.01 * UNIT * bound.error;
                        let what = format!("{}: {result}", case.name);
                        assert!(error <= allowed, "{what}: {error:e}, bound {allowed:e}");
                        if error > 0.0 {
                            worst_share = worst_share.max(error / allowed);
                            worst_error = worst_error.max(error / scale);
                        }
                    }
                }
            }
        }
    }
    println!("largest error: {worst_share:.2} of its bound; {worst_error:.1e} of its tensor");
    // A bound that nothing comes near would prove nothing.
    assert!(worst_share > 0.1, "the largest error is {worst_share} of its bound");
    assert!(worst_error < 2e-14, "the largest error is {worst_error:e} of its tensor");
}

/// f32 keeps what f32 can.
#[test]
fn the_formula_in_f32_is_near() {
    for case in cases().into_iter().filter(|case| case.gates == Gates::Usual) {
        for pass in PASSES {
            let x = convert(&case.operands(pass, 6), |x| x as f32);
            let found = convert(&run(&case.problem, pass, &x).expect(&case.name), f64::from);
            let expected = run(&case.problem, pass, &convert(&x, f64::from)).expect(&case.name);
            for (result, found) in &found {
                let expected = &expected[result];
                // 24 bits, of which sums of this size lose six; those that cancel, of units.
                let scale = expected.iter().fold(1.0f64, |scale, x| scale.max(x.abs()));
                let error = 64.0 * f64::from(f32::EPSILON) * scale;
                assert_absolutely_close(
                    found,
                    expected,
                    error,
                    &format!("{}: {result}", case.name),
                );
            }
        }
    }
}
