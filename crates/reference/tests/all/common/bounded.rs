//! A number that knows how wrong it may be.

use etalon_reference::scalar::Real;
use std::cmp::Ordering;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub, SubAssign};

/// An f64 and a bound on its rounding error, in units of 2⁻⁵³ and to first order: each operation
/// passes on what its operands have and adds its own half unit in the last place. The terms
/// summed here are absolute, so that a formula that cancels needlessly shows by its bound, and
/// one that is evaluated wrongly exceeds it.
#[derive(Debug, Clone, Copy)]
pub struct Bounded {
    pub value: f64,
    pub error: f64,
}

impl Bounded {
    /// A result with what its operands pass on and `roundings` half units of its own.
    fn new(value: f64, passed_on: f64, roundings: f64) -> Self {
        Bounded { value, error: passed_on + roundings * value.abs() }
    }
}

/// A library function is taken to be right within one unit in the last place (glibc: exp and ln
/// are, tanh is within two).
const LIBRARY: f64 = 2.0;

impl PartialEq for Bounded {
    fn eq(&self, y: &Self) -> bool {
        self.value == y.value
    }
}

impl PartialOrd for Bounded {
    fn partial_cmp(&self, y: &Self) -> Option<Ordering> {
        self.value.partial_cmp(&y.value)
    }
}

impl Neg for Bounded {
    type Output = Self;
    fn neg(self) -> Self {
        Bounded { value: -self.value, error: self.error }
    }
}

impl Add for Bounded {
    type Output = Self;
    fn add(self, y: Self) -> Self {
        Bounded::new(self.value + y.value, self.error + y.error, 1.0)
    }
}

impl Sub for Bounded {
    type Output = Self;
    fn sub(self, y: Self) -> Self {
        self + -y
    }
}

impl Mul for Bounded {
    type Output = Self;
    fn mul(self, y: Self) -> Self {
        let passed_on = self.value.abs() * y.error + self.error * y.value.abs();
        Bounded::new(self.value * y.value, passed_on, 1.0)
    }
}

impl Div for Bounded {
    type Output = Self;
    fn div(self, y: Self) -> Self {
        let value = self.value / y.value;
        Bounded::new(value, (self.error + value.abs() * y.error) / y.value.abs(), 1.0)
    }
}

impl AddAssign for Bounded {
    fn add_assign(&mut self, y: Self) {
        *self = *self + y;
    }
}

impl SubAssign for Bounded {
    fn sub_assign(&mut self, y: Self) {
        *self = *self - y;
    }
}

impl etalon_problem::Scalar for Bounded {
    type Wide = Self;
}

impl Real for Bounded {
    const ZERO: Self = Bounded { value: 0.0, error: 0.0 };
    const ONE: Self = Bounded { value: 1.0, error: 0.0 };

    fn from_f64(x: f64) -> Self {
        Bounded { value: x, error: 0.0 }
    }
    fn to_f64(self) -> f64 {
        self.value
    }
    fn exp(self) -> Self {
        let value = self.value.exp();
        Bounded::new(value, value * self.error, LIBRARY)
    }
    fn ln(self) -> Self {
        Bounded::new(self.value.ln(), self.error / self.value.abs(), LIBRARY)
    }
    fn sqrt(self) -> Self {
        let value = self.value.sqrt();
        Bounded::new(value, self.error / (2.0 * value), 1.0)
    }
    fn tanh(self) -> Self {
        let passed_on = self.value.tanh_slope() * self.error;
        Bounded::new(self.value.tanh(), passed_on, 2.0 * LIBRARY)
    }
}
