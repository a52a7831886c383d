//! Double-double arithmetic.

use super::Real;
use qd::Quad as Pair;

/// An unevaluated sum of two f64: about 31 digits over the range of an f64. The crate `qd` does
/// the arithmetic on finite numbers; this type adds what IEEE 754 says of infinities and NaN.
#[derive(Debug, Clone, Copy)]
pub struct Quad(Pair);

/// |x| below which sinh is summed as its series: eleven terms then reach 2·10⁻³² of it.
const SERIES_LIMIT: f64 = 0.25;
const SERIES_TERMS: u32 = 11;

impl Quad {
    const fn exact(x: f64) -> Self {
        Quad(Pair(x, 0.0))
    }

    /// `compute`, unless the f64 result already says that it is infinite or NaN.
    fn where_finite(plain: f64, compute: impl FnOnce() -> Pair) -> Self {
        if plain.is_finite() { Quad(compute()) } else { Quad::exact(plain) }
    }

    /// Σ x^(2t+1) / (2t+1)!
    fn sinh_series(self) -> Self {
        let square = self * self;
        let (mut term, mut sum) = (self, self);
        for t in 1..SERIES_TERMS {
            term = term * square / Quad::exact(f64::from(2 * t * (2 * t + 1)));
            sum += term;
        }
        sum
    }
}

crate::operators! {
    [] Quad, x, y;
    compare 0,
    neg Quad(-x.0),
    add Quad::where_finite(x.0.0 + y.0.0, || x.0.add_accurate(y.0)),
    sub x + -y,
    mul Quad::where_finite(x.0.0 * y.0.0, || x.0 * y.0),
    div match x.0.0 / y.0.0 {
        plain if y.0.0.is_infinite() => Quad::exact(plain),
        plain => Quad::where_finite(plain, || x.0 / y.0),
    }
}

impl Real for Quad {
    const ZERO: Self = Quad::exact(0.0);
    const ONE: Self = Quad::exact(1.0);

    fn from_f64(x: f64) -> Self {
        Quad::exact(x)
    }
    /// The second half is at most half a unit in the last place of the first.
    fn to_f64(self) -> f64 {
        self.0.0
    }
    /// Below −709 the result is 0, where f64 would still have subnormals.
    fn exp(self) -> Self {
        if self.0.0.is_nan() { self } else { Quad(self.0.exp()) }
    }
    fn ln(self) -> Self {
        Quad::where_finite(self.0.0.ln(), || self.0.ln())
    }
    fn sqrt(self) -> Self {
        Quad::where_finite(self.0.0.sqrt(), || self.0.sqrt())
    }
    fn tanh(self) -> Self {
        if self.0.0.abs() < SERIES_LIMIT {
            let sinh = self.sinh_series();
            return sinh / (Quad::ONE + sinh * sinh).sqrt();
        }
        if self < Quad::ZERO {
            return -(-self).tanh();
        }
        let e = (-(self + self)).exp();
        (Quad::ONE - e) / (Quad::ONE + e)
    }
}
