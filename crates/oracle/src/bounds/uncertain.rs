//! Bounds of passes whose kernels all compute the reference's formulas, whatever the order of their
//! sums: the reference itself, over numbers that carry their error, (N80) to (N84), (N89) and (N96).

use super::inputs::{Errors, Inputs};
use super::model::{BEYOND, Model, UNCERTAIN_DIVISOR, weight_error};
use crate::profile::Profile;
use etalon_problem::{Dtype, Error, Problem};
use etalon_reference::scalar::Real;
use etalon_reference::{evaluate, operators};

/// The errors of the outputs of such a pass.
pub(super) fn errors(problem: &Problem, inputs: &Inputs<'_>) -> Result<Errors, Error> {
    let model = inputs.model;
    let name = model.profile.name;
    // The reference says which numbers are weights; of linear cross-entropy da alone, and how it moves.
    let digits = model.digits(problem.scores().is_some());
    let reason = if model.stores_low() && digits.is_none() {
        format!("`{name}` stores weights in a low precision")
    } else if model.factors > 0.0 {
        format!("`{name}` narrows the factors of products")
    } else if !has_our_functions(&model.profile) {
        format!("`{name}` allows wider errors of functions or sums than `{}`", FUNCTIONS.name)
    } else {
        String::new()
    };
    if !reason.is_empty() {
        let what = format!("a bound of {} {}", problem.algorithm(), inputs.pass);
        return Err(Error::Unsupported { what, reason });
    }
    let single = model.profile.accumulator != Dtype::F64;
    let digits = digits.unwrap_or(0);
    let exact = |_: &str, x: f64| {
        let tiny = model.unread(x) / model.eta;
        Uncertain { single, digits, tiny, ..Uncertain::from_f64(x) }
    };
    let reference = |x: &_| evaluate(problem, inputs.pass, x);
    inputs.evaluated(problem, exact, reference, |_, x| x.error(model))
}

/// A value, and how far off a kernel may be that computes it by the same formula with sums in any
/// order.
#[derive(Debug, Clone, Copy)]
struct Uncertain {
    value: f64,
    /// Errors of the terms of the sum that it is, in roundoffs.
    error: f64,
    /// The sum of the sizes of these terms, and their number: how they are added is open.
    mass: f64,
    terms: u32,
    /// True where the kernel sums in f32, otherwise in f64. False for constants of the formula, until they
    /// meet an operand.
    single: bool,
    /// Possible error by underflow, in smallest numbers.
    tiny: f64,
    /// Digits of a stored weight: its roundoff is 2 to the power of −digits. 0: it is not stored; so also constants,
    /// until they meet an operand.
    digits: u8,
}

/// A decision by the sign of a number is open up to so many of its errors: more than the safety factor
/// (N4) lets an output have.
const DOUBT: f64 = 3.0;

/// exp, tanh and ln of every profile that is published, but for those of one tier, which are narrower.
const FUNCTIONS: Profile = Profile::ALL[1];

/// True where all that a profile grants is granted here: sums in f32 or f64 and the [`FUNCTIONS`].
fn has_our_functions(profile: &Profile) -> bool {
    matches!(profile.accumulator, Dtype::F32 | Dtype::F64)
        && profile.exp_constant <= FUNCTIONS.exp_constant
        && profile.exp_slope <= FUNCTIONS.exp_slope
        && profile.tanh <= FUNCTIONS.tanh
        && profile.log <= FUNCTIONS.log
        && profile.lse <= FUNCTIONS.lse
        && profile.rescale_keys >= FUNCTIONS.rescale_keys
        && profile.rescale_lag <= FUNCTIONS.rescale_lag
}

impl Uncertain {
    /// A result that is no sum: its error stands, whatever it will be added to.
    fn term(self, value: f64, error: f64, tiny: f64) -> Self {
        Uncertain { value, error, mass: value.abs(), terms: 1, tiny, ..self }
    }

    /// The same of a function of two numbers.
    fn term_with(self, y: Self, value: f64, error: f64, tiny: f64) -> Self {
        let (single, digits) = (self.single | y.single, self.digits.max(y.digits));
        Uncertain { single, digits, ..self.term(value, error, tiny) }
    }

    /// Its terms in a sum: 0 is not added, being an empty sum or an absent operand.
    fn added(&self) -> u32 {
        if self.mass == 0.0 { 0 } else { self.terms }
    }

    fn u(&self) -> f64 {
        roundoff(self.single)
    }

    /// Its error in roundoffs, the additions included (N80).
    fn settled(&self) -> f64 {
        if self.terms <= 1 {
            self.error
        } else {
            // γ, in roundoffs, of the terms and of their errors.
            let (n, u) = (FUNCTIONS.chain(self.terms as usize) as f64, self.u());
            let gamma = if n * u < 1.0 { n / (1.0 - n * u) } else { f64::INFINITY };
            self.error + gamma * (self.mass + self.error * u)
        }
    }

    /// The error of its tanh, in roundoffs (N84).
    fn tanh_error(&self) -> f64 {
        let (size, u) = (self.value.tanh().abs(), self.u());
        let reached = (self.settled() * u).tanh() / u;
        let moved = times(self.value.tanh_slope(), reached) / (1.0 - size * reached * u);
        moved.min((1.0 + size) / u) + FUNCTIONS.tanh
    }

    /// Its error, as a result of a kernel.
    fn error(&self, model: &Model) -> f64 {
        self.settled() * model.u + self.tiny * model.eta
    }

    /// The relative error of a divisor, in roundoffs `u` and from above; a sum of weights may have been
    /// streamed, and its weights with it (N83). ∞ where it might be 0.
    fn relative(&self, u: f64) -> f64 {
        let Profile { exp_constant, exp_slope, rescale_lag, .. } = FUNCTIONS;
        let rescales = FUNCTIONS.rescales(self.terms as usize) as f64;
        let streamed = 2.0 * exp_slope * rescale_lag + exp_constant * rescales;
        let streamed = if self.terms > 1 { 2.0 * streamed } else { 0.0 };
        let relative = self.settled() / self.value.abs() + streamed;
        match relative * u {
            small if small < 1.0 => relative / (1.0 - small),
            _ => UNCERTAIN_DIVISOR,
        }
    }
}

fn roundoff(single: bool) -> f64 {
    if single { f64::from(f32::EPSILON / 2.0) } else { f64::EPSILON / 2.0 }
}

/// a · b, where nothing times anything is nothing.
fn times(a: f64, b: f64) -> f64 {
    if a == 0.0 || b == 0.0 { 0.0 } else { a * b }
}

operators! {
    [] Uncertain, x, y;
    compare value,
    neg Uncertain { value: -x.value, ..x },
    add match x.value + y.value {
        infinite if infinite.is_infinite() => x.term_with(y, infinite, 0.0, 0.0),
        value => Uncertain {
            value,
            error: x.error + y.error,
            mass: x.mass + y.mass,
            terms: x.added().saturating_add(y.added()),
            single: x.single | y.single,
            tiny: x.tiny + y.tiny,
            digits: x.digits.max(y.digits),
        },
    },
    sub x + -y,
    mul { // (N81)
        let value = x.value * y.value;
        let product = if x.value == 0.0 || y.value == 0.0 { 0.0 } else { 1.0 };
        let (x_size, y_size) = (x.value.abs(), y.value.abs());
        let (ex, ey) = (x.settled(), y.settled());
        let mut error = times(x_size, ey) + times(ex, y_size);
        if ex != 0.0 && ey != 0.0 {
            error += ex * ey * roundoff(x.single | y.single);
        }
        let tiny = times(x_size, y.tiny) + times(x.tiny, y_size) + product;
        x.term_with(y, value, error + value.abs(), tiny)
    },
    div { // (N81): a division, or a product with a rounded reciprocal.
        let (value, y_size) = (x.value / y.value, y.value.abs());
        let u = roundoff(x.single | y.single);
        let relative = y.relative(u);
        let passed_on = x.settled() / y_size * (1.0 + relative * u) + times(value.abs(), relative);
        let tiny = (x.tiny + times(value.abs(), y.tiny)) / y_size;
        let division = f64::from(x.value != 0.0);
        x.term_with(y, value, passed_on + 2.0 * value.abs(), tiny + division)
    }
}

impl Real for Uncertain {
    const ZERO: Self = Uncertain { value: 0.0, mass: 0.0, terms: 0, ..Self::ONE };
    const ONE: Self = Uncertain {
        value: 1.0,
        error: 0.0,
        mass: 1.0,
        terms: 1,
        single: false,
        tiny: 0.0,
        digits: 0,
    };

    fn from_f64(x: f64) -> Self {
        Self::ONE.term(x, 0.0, 0.0)
    }

    fn to_f64(self) -> f64 {
        self.value
    }

    /// (N82). The argument is a logit less a maximum; a kernel may subtract a stored lse instead,
    /// whose roundings are of the size of the two.
    fn exp(self) -> Self {
        if self.value == f64::NEG_INFINITY {
            return self.term(0.0, 0.0, 0.0);
        }
        let value = self.value.exp();
        let own = FUNCTIONS.exp_constant + FUNCTIONS.exp_slope * self.value.abs();
        let lse = 4.0 * self.mass;
        let relative = (self.settled() + own + lse) * self.u();
        let error = weight_error(self.value, relative, BEYOND[0]) / self.u();
        self.term(value, error, times(value, self.tiny) + 1.0)
    }

    /// (N89) Where the error reaches 0 a kernel may decide either way: 1, and off by 1.
    fn step(self) -> Option<Self> {
        let smallest = if self.single { Dtype::F32 } else { Dtype::F64 }.underflow();
        let reach = DOUBT * (self.settled() * self.u() + self.tiny * smallest);
        if self.value.is_nan() || self.value > reach {
            return Some(Self::ONE);
        }
        let surely_not = self.value < -reach;
        (!surely_not).then(|| self.term(1.0, 1.0 / self.u(), 0.0))
    }

    /// (N96)
    fn stored(self) -> Self {
        if self.digits == 0 {
            return self;
        }
        let (settled, roundoff) = (self.settled(), 0.5f64.powi(self.digits.into()));
        let rounded = roundoff * (self.value.abs() / self.u() + settled);
        let tiny = self.tiny + f64::from(self.value != 0.0);
        self.term(self.value, settled + rounded, tiny)
    }

    /// (N83)
    fn ln(self) -> Self {
        let value = self.value.ln();
        let own = FUNCTIONS.log * value.abs().max(1.0);
        self.term(value, self.relative(self.u()) + own, self.tiny / self.value.abs())
    }

    fn sqrt(self) -> Self {
        let (value, reached) = (self.value.sqrt(), self.settled());
        let least = (self.value - reached * self.u()).max(0.0).sqrt();
        let error = times(reached, 1.0 / (value + least)) + value;
        self.term(value, error, self.tiny / (2.0 * value))
    }

    /// (N84)
    fn tanh(self) -> Self {
        let (error, tiny) = (self.tanh_error(), times(self.value.tanh_slope(), self.tiny));
        self.term(self.value.tanh(), error, tiny)
    }

    /// (N84): as 1 − τ², however small it is.
    fn tanh_slope(self) -> Self {
        let (tau, slope) = (self.value.tanh().abs(), self.value.tanh_slope());
        let of_tau = self.tanh_error();
        let error = 2.0 * tau * of_tau + of_tau * of_tau * self.u() + tau * tau + slope;
        self.term(slope, error, times(2.0 * slope, self.tiny))
    }
}
