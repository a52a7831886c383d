//! Errors of f64 results: double-double arithmetic measures them, and a running error bound limits them.

use super::bounded::Bounded;
use super::tensors::Tensors;
use etalon_reference::scalar::{Quad, Real};

/// The largest errors of f64 results so far.
#[derive(Default)]
pub struct Precision {
    /// As a share of the bound.
    share: f64,
    /// As a share of the largest element of the tensor.
    error: f64,
}

impl Precision {
    /// Every element errs by no more than `allowed` times its bound, and is of the class of the exact one.
    pub fn hold(
        &mut self,
        name: &str,
        (found, exact, bound): (&Tensors<f64>, &Tensors<Quad>, &Tensors<Bounded>),
        allowed: f64,
    ) {
        let unit = f64::EPSILON / 2.0;
        for (result, found) in found {
            let scale = exact[result].iter().map(|y| y.to_f64()).filter(|y| y.is_finite());
            let scale = scale.fold(0.0f64, |scale, y| scale.max(y.abs()));
            let elements = found.iter().zip(&exact[result]).zip(&bound[result]);
            for ((&found, &exact), bound) in elements {
                if exact.to_f64().is_nan() {
                    assert!(found.is_nan(), "{name}: {result} is {found}");
                    continue;
                }
                if found == f64::NEG_INFINITY {
                    assert_eq!(exact.to_f64(), found, "{name}: {result}");
                    continue;
                }
                let error = (Quad::from_f64(found) - exact).to_f64().abs();
                assert!(
                    error <= allowed * unit * bound.error,
                    "{name}: {result} is off by {error:e}, bound {:e}",
                    unit * bound.error
                );
                if error > 0.0 {
                    self.share = self.share.max(error / (unit * bound.error));
                    self.error = self.error.max(error / scale);
                }
            }
        }
    }

    /// The largest error is below `most` of its tensor. And a bound that nothing comes near would prove
    /// nothing: one case or another comes near it.
    pub fn finish(self, most: f64) {
        let Precision { share, error } = self;
        println!("largest error: {share:.2} of its bound; {error:.1e} of its tensor");
        assert!(share > 0.1, "the largest error is {share} of its bound");
        assert!(error < most, "the largest error is {error:e} of its tensor");
    }
}
