//! The scalars themselves.

use etalon_reference::scalar::{Dual, Quad, Real};
use ndarray::{Array2, ShapeBuilder};

/// 31 digits, of which each function may lose two or three.
const QUAD_TOLERANCE: f64 = 1e-28;

fn quad(x: f64) -> Quad {
    Quad::from_f64(x)
}

fn assert_near(found: Quad, expected: Quad, what: &str) {
    let error = ((found - expected) / expected).to_f64().abs();
    assert!(error <= QUAD_TOLERANCE, "{what}: {found:?}, expected {expected:?}");
}

/// Small enough for every series, on both sides of the limit where tanh changes its method, and
/// large enough to saturate.
const POINTS: [f64; 12] =
    [1e-12, 1e-5, 0.01, 0.1, 0.124, 0.126, 0.249, 0.2501, 0.7, 3.0, 17.0, 40.0];

#[test]
fn quad_functions_satisfy_their_equations() {
    for x in POINTS.into_iter().flat_map(|x| [x, -x]).map(quad) {
        let what = format!("at {x:?}");
        assert_near(x.exp() * (-x).exp(), Quad::ONE, &what);
        assert_near((x * x).sqrt() * (x * x).sqrt(), x * x, &what);
        let tanh = x.tanh();
        assert_near((x + x).tanh() * (Quad::ONE + tanh * tanh), tanh + tanh, &what);
        let slope = Quad::ONE - tanh * tanh;
        let error = (x.tanh_slope() - slope).to_f64().abs();
        assert!(error <= QUAD_TOLERANCE, "slope {what}: {error:e}");
    }
    for x in [0.5, 2.0, 3.0, 1e10] {
        assert_near(quad(x).ln().exp(), quad(x), "e^ln");
    }
}

#[test]
fn quad_has_digits_beyond_f64() {
    // e − fl(e): the next 17 digits of e.
    let rest = (Quad::ONE.exp() - quad(std::f64::consts::E)).to_f64();
    assert!((rest - 1.445_646_891_729_250_2e-16).abs() < 1e-31, "{rest:e}");
    let rest = (quad(2.0).ln() - quad(std::f64::consts::LN_2)).to_f64();
    assert!((rest - 2.319_046_813_846_299_6e-17).abs() < 1e-31, "{rest:e}");
}

/// Infinities and NaN behave as those of f64 do, in every operation.
fn behaves_as_f64<T: Real>() {
    let points = [0.0, 1.0, -2.5, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
    let check = |found: T, expected: f64, what: String| {
        let (found, scale) = (found.to_f64(), 1e-6 * expected.abs());
        let same = found == expected || (found.is_nan() && expected.is_nan());
        assert!(same || (found - expected).abs() <= scale, "{what}: {found}, not {expected}");
    };
    for x in points {
        let real = T::from_f64(x);
        check(real.exp(), x.exp(), format!("exp {x}"));
        check(real.ln(), x.ln(), format!("ln {x}"));
        check(real.sqrt(), x.sqrt(), format!("sqrt {x}"));
        check(real.tanh(), x.tanh(), format!("tanh {x}"));
        check(real.exp_m1(), x.exp_m1(), format!("exp − 1 of {x}"));
        check(real.tanh_slope(), 1.0 - x.tanh() * x.tanh(), format!("slope {x}"));
        check(-real, -x, format!("-{x}"));
        assert_eq!(real.is_nan(), x.is_nan());
        assert_eq!(real.is_finite(), x.is_finite());
        for y in points {
            let other = T::from_f64(y);
            check(real + other, x + y, format!("{x} + {y}"));
            check(real - other, x - y, format!("{x} - {y}"));
            check(real * other, x * y, format!("{x} · {y}"));
            check(real / other, x / y, format!("{x} / {y}"));
            assert_eq!(real.partial_cmp(&other), x.partial_cmp(&y), "{x} against {y}");
            assert_eq!(real == other, x == y, "{x} and {y}");
        }
    }
    // Below the range, where double-double has no second half left.
    check(T::from_f64(-800.0).exp(), 0.0, "exp -800".to_string());
}

#[test]
fn every_scalar_behaves_as_f64_at_infinity() {
    behaves_as_f64::<f64>();
    behaves_as_f64::<f32>();
    behaves_as_f64::<Quad>();
    behaves_as_f64::<Dual<f64>>();
    behaves_as_f64::<Dual<Dual<Quad>>>();
}

/// The slope keeps all but one or two of its digits even at x at which 1 − tanh² has none left in f64.
#[test]
fn tanh_slope_keeps_its_digits() {
    for x in [0.0, 1e-9, 0.3, 2.0, 9.0, 18.0, 19.5, 100.0, 300.0] {
        let (found, exact) = (x.tanh_slope(), quad(x).tanh_slope());
        let error = ((quad(found) - exact) / exact).to_f64().abs();
        // Six roundings, one of them of exp, which is good to a unit in the last place.
        assert!(error <= 8.0 * f64::EPSILON / 2.0, "at {x}: {error:e}");
    }
}

/// Near 0, where e^x − 1 has no digits left, as well as on both sides of where that no longer
/// matters.
#[test]
fn exp_m1_keeps_its_digits() {
    let points = [1e-300f64, 1e-17, 1e-9, 0.3, 0.4999, 0.5001, 2.0, 9.0, 30.0];
    for x in points.into_iter().flat_map(|x| [x, -x]) {
        let exact = match x.abs() < 0.01 {
            // Its series: the next term is below 10⁻³⁰ of the first.
            true => {
                let (x, powers) = (quad(x), [1.0, 2.0, 6.0, 24.0]);
                let series =
                    powers.iter().rev().fold(Quad::ZERO, |sum, &n| sum * x + Quad::ONE / quad(n));
                series * x
            }
            false => quad(x).exp() - Quad::ONE,
        };
        let relative = |found: Quad| ((found - exact) / exact).to_f64().abs();
        let error = relative(quad(x.exp_m1()));
        // tanh is good to two units in the last place, and three roundings follow.
        assert!(error <= 8.0 * f64::EPSILON / 2.0, "f64 at {x}: {error:e}");
        let error = relative(quad(x).exp_m1());
        assert!(error <= 10.0 * QUAD_TOLERANCE, "double-double at {x}: {error:e}");
    }
    let moving: Dual<f64> = Dual::new(0.125, 1.0).exp_m1();
    assert!((moving.tangent - 0.125f64.exp()).abs() < 1e-15, "{moving:?}");
}

/// Products of whole numbers are exact whatever the order of their sums. They are added to what is
/// there; of extents that differ, the smaller counts; strides are free.
fn multiplies<T: Real>() {
    let number = |i: usize, j: usize| ((3 * i + 5 * j) % 7) as f64 - 3.0;
    // Rows beyond what kernels take at once, and none at all.
    for [m, n, k] in [[1, 1, 1], [2, 3, 4], [65, 9, 17], [64, 0, 3], [0, 2, 2], [2, 2, 0]] {
        for [more_rows, more_columns, more_terms] in [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]] {
            let a = Array2::from_shape_fn((m + more_rows, k), |(i, j)| T::from_f64(number(i, j)));
            let b = Array2::from_shape_fn((k + more_terms, n + more_columns), |(i, j)| {
                T::from_f64(number(2 * i, j))
            });
            let turned = |x: &Array2<T>| x.t().as_standard_layout().into_owned();
            let (a_turned, b_turned) = (turned(&a), turned(&b));
            let a_padded = ndarray::concatenate![ndarray::Axis(1), a, a];
            let ways = [
                (a.view(), b.view()),
                (a_turned.t(), b.view()),
                (a.view(), b_turned.t()),
                (a_padded.slice(ndarray::s![.., ..k]), b.view()),
            ];
            for (way, (a, b)) in ways.into_iter().enumerate() {
                for by_columns in [false, true] {
                    let mut c = Array2::from_elem((m, n).set_f(by_columns), T::from_f64(2.0));
                    T::add_product(c.view_mut(), a, b);
                    for ((i, j), c) in c.indexed_iter() {
                        let sum: f64 = (0..k).map(|l| number(i, l) * number(2 * l, j)).sum();
                        let what = format!("{m}×{k}×{n}, {way}, by columns {by_columns}");
                        assert_eq!(c.to_f64(), 2.0 + sum, "{what} at {i}, {j}");
                    }
                }
            }
        }
    }
}

#[test]
fn every_scalar_multiplies_matrices() {
    multiplies::<f64>();
    multiplies::<f32>();
    multiplies::<Quad>();
    multiplies::<Dual<f64>>();
}

/// f, f′, f″ of a function that uses every operation, by nested duals and by hand.
#[test]
fn duals_differentiate() {
    let function = |x: Dual<Dual<f64>>| (x * x).exp().ln() / x - x.sqrt() + x.tanh() * (-x).exp();
    for x in [0.2f64, 1.0, 2.5] {
        let moving = Dual::new(Dual::new(x, 1.0), Dual::constant(1.0));
        let found = function(moving);
        // ln e^{x²} / x = x; and with t = tanh x, t′ = 1 − t²: (t e^{−x})′ = (t′ − t) e^{−x}.
        let (t, e) = (x.tanh(), (-x).exp());
        let slope = 1.0 - t * t;
        let first = 1.0 - 0.5 / x.sqrt() + (slope - t) * e;
        let second = 0.25 / (x * x.sqrt()) + (-2.0 * t * slope - 2.0 * slope + t) * e;
        for (what, found, expected) in [
            ("f", found.value.value, x - x.sqrt() + t * e),
            ("f′", found.value.tangent, first),
            ("f′", found.tangent.value, first),
            ("f″", found.tangent.tangent, second),
        ] {
            assert!((found - expected).abs() < 1e-13, "{what}({x}): {found}, not {expected}");
        }
    }
}

/// The slope of tanh is even: taking |x| in it leaves no kink.
#[test]
fn tanh_slope_is_smooth_at_zero() {
    let moving = Dual::new(Dual::new(0.0, 1.0), Dual::constant(1.0));
    let slope: Dual<Dual<f64>> = moving.tanh_slope();
    assert_eq!(slope.value.value, 1.0);
    assert_eq!(slope.value.tangent, 0.0);
    assert_eq!(slope.tangent.tangent, -2.0); // (1 − tanh²)″ at 0
}
