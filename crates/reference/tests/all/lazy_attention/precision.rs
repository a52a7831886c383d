//! Double-double arithmetic: how far off the f64 results are.

use super::cases::{cases, extents};
use super::tensors::{PASSES, convert, operands, run};
use crate::common::bounded::Bounded;
use crate::common::precision::Precision;
use etalon_problem::{LazyAttention, Pass};
use etalon_reference::scalar::{Quad, Real};

/// Every element of every result lies within the bound of its rounding errors, and that is, in
/// units of the largest element, about 10⁻¹⁵.
#[test]
fn results_are_as_exact_as_f64_allows() {
    let mut problems = cases();
    // Long enough for errors to gather: 64 keys, 32 elements.
    problems.push(("long", LazyAttention::new(extents([1, 2, 1, 48, 64, 32])).bias(20)));
    let mut precision = Precision::default();
    for (name, problem) in problems {
        for pass in PASSES {
            let x = operands(&problem, pass, 8);
            let found = run(&problem, pass, &x).expect(name);
            let exact = run(&problem, pass, &convert(&x, Quad::from_f64)).expect(name);
            let bound = run(&problem, pass, &convert(&x, Bounded::from_f64)).expect(name);
            let same = convert(&bound, |y| y.value) == found;
            assert!(same, "{name}: {pass} in other arithmetic");
            // 1 %: what the bound leaves out, the products of errors.
            precision.hold(name, (&found, &exact, &bound), 1.01);
        }
    }
    precision.finish(2e-14);
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
