//! A number that carries its error along: equations (N80) to (N84).

use super::model::{LARGEST_RELATIVE, growth};
use crate::profile::Profile;
use etalon_reference::scalar::Real;
use std::cmp::Ordering;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub, SubAssign};

/// A value, and how far off a kernel may be that computes it by the same formula with sums in any
/// order. `F64`: the kernel sums in f64, otherwise in f32.
#[derive(Debug, Clone, Copy)]
pub(super) struct Uncertain<const F64: bool> {
    value: f64,
    /// What the terms of the sum that it is bring along, in roundoffs.
    error: f64,
    /// The sum of the sizes of these terms, and their number: how they are added is open.
    mass: f64,
    terms: f64,
    /// What underflow may have cost, in smallest numbers.
    tiny: f64,
}

/// exp, tanh and ln are the same in every profile.
const FUNCTIONS: Profile = Profile::ALL[1];

impl<const F64: bool> Uncertain<F64> {
    /// u
    pub const ROUNDOFF: f64 = if F64 { f64::EPSILON / 2.0 } else { (f32::EPSILON / 2.0) as f64 };

    /// A result that is no sum: its error stands, whatever it will be added to.
    fn term(value: f64, error: f64, tiny: f64) -> Self {
        Uncertain { value, error, mass: value.abs(), terms: 1.0, tiny }
    }

    /// Its error in roundoffs, the additions included (N80).
    fn settled(&self) -> f64 {
        if self.terms <= 1.0 { self.error } else { self.error + chain(self.terms) * self.mass }
    }

    /// Its error, given the smallest number of the accumulator.
    pub fn error(&self, eta: f64) -> f64 {
        self.settled() * Self::ROUNDOFF + self.tiny * eta
    }

    /// The relative error of a divisor, in roundoffs and from above; a sum of weights may have been
    /// streamed, and its weights with it (N83). ∞ where it might be 0.
    fn relative(&self) -> f64 {
        let Profile { exp_constant, exp_slope, rescale_lag, .. } = FUNCTIONS;
        let streamed = 2.0 * exp_slope * rescale_lag + exp_constant * rescales(self.terms);
        let streamed = if self.terms > 1.0 { 2.0 * streamed } else { 0.0 };
        let relative = self.settled() / self.value.abs() + streamed;
        match relative * Self::ROUNDOFF {
            small if small <= LARGEST_RELATIVE => relative / (1.0 - small),
            _ => f64::INFINITY,
        }
    }
}

fn rescales(terms: f64) -> f64 {
    (terms / FUNCTIONS.rescale_keys as f64).ceil() + 1.0
}

/// As `Model::chain`.
fn chain(terms: f64) -> f64 {
    terms + 2.0 * rescales(terms) + 1.0
}

/// a · b, where nothing times anything is nothing.
fn times(a: f64, b: f64) -> f64 {
    if a == 0.0 || b == 0.0 { 0.0 } else { a * b }
}

impl<const F64: bool> PartialEq for Uncertain<F64> {
    fn eq(&self, y: &Self) -> bool {
        self.value == y.value
    }
}

impl<const F64: bool> PartialOrd for Uncertain<F64> {
    fn partial_cmp(&self, y: &Self) -> Option<Ordering> {
        self.value.partial_cmp(&y.value)
    }
}

impl<const F64: bool> Neg for Uncertain<F64> {
    type Output = Self;
    fn neg(self) -> Self {
        Uncertain { value: -self.value, ..self }
    }
}

impl<const F64: bool> Add for Uncertain<F64> {
    type Output = Self;
    fn add(self, y: Self) -> Self {
        Uncertain {
            value: self.value + y.value,
            error: self.error + y.error,
            mass: self.mass + y.mass,
            // What is 0 is not added: empty sums and absent operands.
            terms: if self.mass == 0.0 { 0.0 } else { self.terms }
                + if y.mass == 0.0 { 0.0 } else { y.terms },
            tiny: self.tiny + y.tiny,
        }
    }
}

impl<const F64: bool> Sub for Uncertain<F64> {
    type Output = Self;
    fn sub(self, y: Self) -> Self {
        self + -y
    }
}

impl<const F64: bool> Mul for Uncertain<F64> {
    type Output = Self;
    /// (N81)
    fn mul(self, y: Self) -> Self {
        let value = self.value * y.value;
        let (ex, ey) = (self.settled(), y.settled());
        let passed_on =
            times(self.value.abs(), ey) + times(ex, y.value.abs()) + times(ex, ey) * Self::ROUNDOFF;
        let tiny = times(self.value.abs(), y.tiny) + times(self.tiny, y.value.abs());
        let product = if self.value == 0.0 || y.value == 0.0 { 0.0 } else { 1.0 };
        Self::term(value, passed_on + value.abs(), tiny + product)
    }
}

impl<const F64: bool> Div for Uncertain<F64> {
    type Output = Self;
    /// (N81): a division, or a product with a rounded reciprocal.
    fn div(self, y: Self) -> Self {
        let value = self.value / y.value;
        let passed_on = self.settled() / y.value.abs() + times(value.abs(), y.relative());
        let tiny = (self.tiny + times(value.abs(), y.tiny)) / y.value.abs();
        Self::term(value, passed_on + 2.0 * value.abs(), tiny + f64::from(self.value != 0.0))
    }
}

impl<const F64: bool> AddAssign for Uncertain<F64> {
    fn add_assign(&mut self, y: Self) {
        *self = *self + y;
    }
}

impl<const F64: bool> SubAssign for Uncertain<F64> {
    fn sub_assign(&mut self, y: Self) {
        *self = *self - y;
    }
}

impl<const F64: bool> Real for Uncertain<F64> {
    const ZERO: Self = Uncertain { value: 0.0, error: 0.0, mass: 0.0, terms: 0.0, tiny: 0.0 };
    const ONE: Self = Uncertain { value: 1.0, error: 0.0, mass: 1.0, terms: 1.0, tiny: 0.0 };

    fn from_f64(x: f64) -> Self {
        Self::term(x, 0.0, 0.0)
    }

    fn to_f64(self) -> f64 {
        self.value
    }

    /// (N82). The argument is a logit less a maximum; a kernel may subtract a stored lse instead,
    /// whose roundings are of the size of the two.
    fn exp(self) -> Self {
        let value = self.value.exp();
        let own = FUNCTIONS.exp_constant + FUNCTIONS.exp_slope * self.value.abs();
        let lse = 4.0 * self.mass;
        let relative = (self.settled() + own + lse) * Self::ROUNDOFF;
        let error = times(value, growth(relative) / Self::ROUNDOFF);
        Self::term(value, error, times(value, self.tiny) + 1.0)
    }

    /// (N83)
    fn ln(self) -> Self {
        let value = self.value.ln();
        let own = FUNCTIONS.log * value.abs().max(1.0);
        Self::term(value, self.relative() + own, self.tiny / self.value.abs())
    }

    fn sqrt(self) -> Self {
        let value = self.value.sqrt();
        Self::term(value, self.settled() / (2.0 * value) + value, self.tiny / (2.0 * value))
    }

    /// (N84)
    fn tanh(self) -> Self {
        let slope = self.value.tanh_slope();
        let error = slope * self.settled() + FUNCTIONS.tanh;
        Self::term(self.value.tanh(), error, slope * self.tiny)
    }

    /// (N84): as 1 − τ², however small it is.
    fn tanh_slope(self) -> Self {
        let (tau, slope) = (self.value.tanh().abs(), self.value.tanh_slope());
        let of_tau = slope * self.settled() + FUNCTIONS.tanh;
        let error = 2.0 * tau * of_tau + of_tau * of_tau * Self::ROUNDOFF + tau * tau + slope;
        Self::term(slope, error, 2.0 * slope * self.tiny)
    }
}
