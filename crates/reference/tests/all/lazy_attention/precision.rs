//! Double-double arithmetic: how far off the f64 results are.

use super::cases::{cases, extents};
use super::tensors::{PASSES, convert, operands, run};
use crate::common::bounded::Bounded;
use etalon_problem::{LazyAttention, Pass};
use etalon_reference::scalar::{Quad, Real};

/// Every element of every result lies within the bound of its rounding errors, and that is, in
/// units of the largest element, about 10⁻¹⁵.
#[test]
fn results_are_as_exact_as_f64_allows() {
    let mut problems = cases();
    // Long enough for errors to gather: 64 keys, 32 elements.
    problems.push(("long", LazyAttention::new(extents([1, 2, 1, 48, 64, 32])).bias(20)));
    let unit = f64::EPSILON / 2.0;
    let (mut worst_share, mut worst_error) = (0.0f64, 0.0f64);
    for (name, problem) in problems {
        for pass in PASSES {
            let x = operands(&problem, pass, 8);
            let found = run(&problem, pass, &x).expect(name);
            let exact = run(&problem, pass, &convert(&x, Quad::from_f64)).expect(name);
            let bound = run(&problem, pass, &convert(&x, Bounded::from_f64)).expect(name);
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

/// On the kink every arithmetic must decide alike: e⁰ is 1 and 1/n − 1/n is 0 in each.
#[test]
fn rows_on_the_kink_lie_there_in_every_arithmetic() {
    let problem = LazyAttention::new(extents([1, 1, 1, 40, 40, 2]));
    let mut x = operands(&problem, Pass::Forward, 9);
    x.get_mut("q").expect("q").fill(0.0);
    x.get_mut("tau").expect("tau").fill(-1.0);
    fn dead<T: Real>(problem: &LazyAttention, x: &super::tensors::Tensors<T>) {
        let y = run(problem, Pass::Forward, x).expect("forward");
        assert!(y["o"].iter().all(|o| o.to_f64() == 0.0));
    }
    dead(&problem, &x);
    dead(&problem, &convert(&x, Quad::from_f64));
    dead(&problem, &convert(&x, |x| x as f32));
    dead(&problem, &convert(&x, etalon_reference::scalar::Dual::constant));
}
