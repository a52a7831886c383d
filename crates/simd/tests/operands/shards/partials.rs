//! Partials are a monoid, and travel as bytes.

use super::example;
use etalon_problem::LinearCrossEntropy;
use etalon_problem::linear_cross_entropy::Inputs;
use etalon_simd::Options;
use etalon_simd::linear_cross_entropy::shard::{Combine, Partial, Shard, forward_shard};
use ndarray::Array2;
use std::ops::Range;

/// Partials travel as bytes.
#[test]
fn bytes_of_partials_are_what_they_were() {
    let x = example::<f32>();
    let shard = Shard::new(&x.problem, 100..900).unwrap();
    let partials = forward_shard(&shard, &x.inputs(shard.classes()), &Options::default()).unwrap();
    assert!(partials.iter().any(|x| x.target.is_some()));
    for &partial in partials.iter().chain(&[Partial::identity()]) {
        assert_eq!(Partial::from_bytes(&partial.to_bytes()), Ok(partial));
    }
    let mut bytes = Partial::identity().to_bytes();
    bytes[28] = 2;
    let error = Partial::from_bytes(&bytes).unwrap_err().to_string();
    assert_eq!(error, "`bytes of a partial` must be with 0 or 1 as eighth word, found 2");
}

/// The partial of a row of logits, as biases of a problem of six classes.
pub fn partial(classes: Range<usize>, z: &[f32], target: i64) -> Partial {
    let problem = LinearCrossEntropy::new(1, 1, 6).bias();
    let (h, w) = (ndarray::array![[0f32]], Array2::zeros((classes.len(), 1)));
    let (bias, targets) = (ndarray::arr1(z), ndarray::array![target]);
    let inputs =
        Inputs { bias: Some(bias.view()), ..Inputs::new(h.view(), w.view(), targets.view()) };
    let shard = Shard::new(&problem, classes).unwrap();
    forward_shard(&shard, &inputs, &Options::default()).unwrap()[[0, 0]]
}

#[test]
fn partials_are_a_monoid() {
    let infinity = f32::INFINITY;
    let a = partial(0..2, &[0.5, -1.0], 1);
    let b = partial(2..4, &[3.0, -infinity], 1);
    let c = partial(4..6, &[-infinity, -infinity], 1);
    let identity = Partial::identity();
    for part in [a, b, c, identity] {
        assert_eq!(part.combine(identity), Ok(part));
        assert_eq!(identity.combine(part), Ok(part));
    }
    let left = a.combine(b).and_then(|ab| ab.combine(c)).unwrap();
    let turned = c.combine(b).and_then(|cb| cb.combine(a)).unwrap();
    let near = |x: f32, y: f32| x == y || (x - y).abs() <= 4.0 * f32::EPSILON * y.abs();
    for right in [b.combine(c).and_then(|bc| a.combine(bc)).unwrap(), turned] {
        assert!(near(left.l, right.l) && near(left.u, right.u) && near(left.s, right.s));
        assert_eq!((left.m, left.weight, left.classes), (right.m, right.weight, right.classes));
        assert_eq!((left.target, left.argmax), (right.target, right.argmax));
    }
    assert_eq!((left.m, left.weight, left.classes), (3.0, 6.0, 6));
    assert_eq!((left.target, left.argmax, left.s), (Some(-1.0), Some(2), -infinity));
    assert_eq!((c.m, c.l, c.argmax), (-infinity, 0.0, Some(4)));
    // The first of equals, and NaN before everything.
    let (d, e) = (partial(0..2, &[1.0, 2.0], 1), partial(2..4, &[2.0, 2.0], 1));
    assert_eq!([d.combine(e), e.combine(d)].map(|x| x.unwrap().argmax), [Some(1); 2]);
    let nan = partial(4..6, &[f32::NAN, infinity], 1);
    assert_eq!([d.combine(nan), nan.combine(d)].map(|x| x.unwrap().argmax), [Some(4); 2]);
}

/// In partials of other tiers m may lag behind the largest logit, and argmax may be left out.
#[test]
fn the_largest_logit_decides_argmax_whatever_m_is() {
    let own = partial(0..2, &[1.0, 0.5], 1);
    // Logits 0 and 1.5, relative to the first.
    let other = Partial { l: 1.0 + 1.5f32.exp(), ..partial(2..4, &[0.0, 0.0], 1) };
    let other = Partial { largest: 1.5, argmax: Some(3), ..other };
    for both in [own.combine(other).unwrap(), other.combine(own).unwrap()] {
        assert_eq!((both.m, both.largest, both.argmax), (1.0, 1.5, Some(3)));
        let wanted = [1.0f64, 0.5, 0.0, 1.5].map(f64::exp).iter().sum::<f64>().ln();
        let lse = f64::from(both.m) + f64::from(both.l).ln();
        assert!((lse - wanted).abs() < 1e-6, "{lse} for {wanted}");
        assert_eq!(Partial::from_bytes(&both.to_bytes()), Ok(both));
    }
    let unasked = Partial { largest: f32::NEG_INFINITY, argmax: None, ..other };
    let both = own.combine(unasked).unwrap();
    assert_eq!((both.classes, both.argmax), (4, None));
}
