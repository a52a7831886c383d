//! Forward-mode derivatives.

use super::Real;

/// `value + ε·tangent` with ε² = 0: a function of duals returns its derivative along the tangents
/// of its arguments. `Dual<Dual<T>>` gives second derivatives.
#[derive(Debug, Clone, Copy)]
pub struct Dual<T> {
    /// The value.
    pub value: T,
    /// Its derivative along the chosen direction.
    pub tangent: T,
}

impl<T: Real> Dual<T> {
    /// A number with its derivative.
    pub fn new(value: T, tangent: T) -> Self {
        Dual { value, tangent }
    }

    /// A number that does not move.
    pub fn constant(value: T) -> Self {
        Dual { value, tangent: T::ZERO }
    }
}

crate::operators! {
    [T: Real] Dual<T>, x, y;
    compare value,
    neg Dual::new(-x.value, -x.tangent),
    add Dual::new(x.value + y.value, x.tangent + y.tangent),
    sub Dual::new(x.value - y.value, x.tangent - y.tangent),
    mul Dual::new(x.value * y.value, x.value * y.tangent + x.tangent * y.value),
    div {
        let quotient = x.value / y.value;
        Dual::new(quotient, (x.tangent - quotient * y.tangent) / y.value)
    }
}

impl<T: Real> Real for Dual<T> {
    const ZERO: Self = Dual { value: T::ZERO, tangent: T::ZERO };
    const ONE: Self = Dual { value: T::ONE, tangent: T::ZERO };

    fn from_f64(x: f64) -> Self {
        Dual::constant(T::from_f64(x))
    }
    fn to_f64(self) -> f64 {
        self.value.to_f64()
    }
    fn exp(self) -> Self {
        let value = self.value.exp();
        Dual::new(value, value * self.tangent)
    }
    fn ln(self) -> Self {
        Dual::new(self.value.ln(), self.tangent / self.value)
    }
    fn sqrt(self) -> Self {
        let value = self.value.sqrt();
        Dual::new(value, self.tangent / (value + value))
    }
    fn tanh(self) -> Self {
        Dual::new(self.value.tanh(), self.value.tanh_slope() * self.tangent)
    }
    fn tanh_slope(self) -> Self {
        let slope = self.value.tanh_slope();
        Dual::new(slope, T::from_f64(-2.0) * self.value.tanh() * slope * self.tangent)
    }
    fn step(self) -> Option<Self> {
        self.value.step().map(Dual::constant)
    }
    fn stored(self) -> Self {
        Dual::new(self.value.stored(), self.tangent.stored())
    }
    fn times(self, c: Self) -> Self {
        Dual::new(self.value.times(c.value), self.tangent.times(c.value))
    }
    fn over(self, c: Self) -> Self {
        Dual::new(self.value.over(c.value), self.tangent.over(c.value))
    }
}
