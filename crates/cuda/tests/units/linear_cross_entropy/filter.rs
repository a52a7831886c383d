//! Unit tests of `src/linear_cross_entropy/filter.rs`.

use super::*;

#[test]
fn thresholds_are_rounded_to_the_safe_side() {
    let third = 1.0 / 3.0;
    assert!(f64::from(above(third)) > third && f64::from(below(third)) < third);
    assert_eq!((above(0.0), below(0.0), above(0.5), below(0.5)), (0.0, 0.0, 0.5, 0.5));
    assert_eq!((below(1e300), above(1e-300)), (f32::MAX, f32::from_bits(1)));
}
