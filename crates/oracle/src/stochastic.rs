//! Correct kernels, simulated operation by operation: the reference over numbers of which every operation
//! rounds at random, as far as a profile lets it (Monte Carlo arithmetic, Parker 1997).
//!
//! A sum of n terms then errs as one in some order does, scores that are large err by more than small ones,
//! and an error of a score changes its weight as it would in a kernel. [`crate::typical`] simulates kernels
//! by errors of their operands instead: at the price of one evaluation each, but only where scores are of a
//! moderate size.

use crate::bounds::Bounds;
use crate::chunks::{chunks, over_chunks};
use crate::generate::Stream;
use crate::profile::Profile;
use crate::tensor::{Stored, Tensors, Values, values};
use crate::types::Types;
use etalon_problem::{Algorithm, Dtype, Error, Operand, Pass, Problem, Role};
use etalon_reference::scalar::Real;
use etalon_reference::{Arithmetic, evaluate, evaluate_in, operators};
use ndarray::{ArrayD, Axis};
use std::sync::{Mutex, PoisonError};

/// Number of simulated kernels.
pub const KERNELS: u32 = 16;

/// The errors of a simulated kernel, one of [`KERNELS`], on a pass: by output of floating-point numbers, got − exact
/// once it is stored. Where the exact result is not finite it is 0. No error is beyond its bound: farther off
/// no correct kernel is.
pub fn errors(
    problem: &Problem,
    pass: Pass,
    types: &Types,
    profile: &Profile,
    inputs: &Tensors,
    exact: &Bounds,
    kernel: u32,
) -> Result<Values, Error> {
    if pass == Pass::ForwardBackward {
        let of = |pass| errors(problem, pass, types, profile, inputs, exact, kernel);
        let mut both = of(Pass::Forward)?;
        both.extend(of(Pass::Backward)?);
        return Ok(both);
    }
    let inputs = values(problem, pass, inputs)?;
    let chunks = chunks(profile, &problem.operands(pass));
    let mut results = stored(problem, pass, types, &inputs, (profile, kernel))?;
    for name in ["dw", "dbias"].into_iter().filter(|_| chunks > 0.0) {
        let stream = Stream::new(u64::from(kernel), &format!("{name}, by chunks"));
        if let (Some(result), Some(bound)) = (results.get_mut(name), exact.outputs.get(name)) {
            over_chunks(&bound.value, result, chunks, stream);
        }
    }
    results.retain(|name, _| exact.outputs.contains_key(name));
    for (name, result) in &mut results {
        let (bound, largest) = (&exact.outputs[name], exact.outputs[name].largest);
        let elements = ndarray::Zip::from(result).and(&bound.value).and(&bound.bound);
        elements.for_each(|result, &exact, &bound| {
            let error = (saturated(*result, largest) - exact).clamp(-bound, bound);
            *result = if exact.is_finite() && error.is_finite() { error } else { 0.0 };
        });
    }
    Ok(results)
}

/// A result, or the largest number of its type where that overflows: as far off as it is known to be.
pub(crate) fn saturated(x: f64, largest: f64) -> f64 {
    if x.is_infinite() { largest.copysign(x) } else { x }
}

/// Errors of each output of a kernel whose stored weights underflow, and which rounds nothing else; `None` where the
/// types of the profile have the accumulator's exponents.
pub(crate) fn underflow(
    problem: &Problem,
    pass: Pass,
    profile: &Profile,
    inputs: &Values,
    exact: &Bounds,
) -> Result<Option<Values>, Error> {
    let rounding = Rounding::of_underflow(profile, problem.algorithm(), pass);
    // The largest weight of a row is 1 before a forward pass divides by their sum.
    if rounding.floor == 0.0 || pass == Pass::Forward {
        return Ok(None);
    }
    let rounding = rounding.kept();
    let number = |&x: &f64| Stochastic { rounding, ..Stochastic::from_f64(x) };
    let numbers = inputs.iter().map(|(name, x)| (name.clone(), x.map(number)));
    let results = evaluate(problem, pass, &numbers.collect())?;
    let error = |(name, x): (String, ArrayD<Stochastic>)| {
        let exact = &exact.outputs.get(&name)?.value;
        let mut error = x.mapv(|x| x.value) - exact;
        error.mapv_inplace(|error| if error.is_finite() { error } else { 0.0 });
        Some((name, error))
    };
    Ok(Some(results.into_iter().filter_map(error).collect()))
}

/// The outputs of one kernel, in their storage types; whole numbers are left out. What a pass reads of the
/// forward pass is the kernel's own.
fn stored(
    problem: &Problem,
    pass: Pass,
    types: &Types,
    inputs: &Values,
    (profile, kernel): (&Profile, u32),
) -> Result<Values, Error> {
    let rounding = Rounding::new(profile, problem.algorithm(), pass, kernel).kept();
    let operands = problem.operands(pass);
    let mut inputs = inputs.clone();
    if operands.iter().any(|x| x.role == Role::Saved) {
        keep_saved(problem, types, &operands, &mut inputs, (profile, kernel))?;
    }
    // Equal operands err alike where a kernel treats all elements alike, and by themselves where some lie in
    // the last tile: every fourth kernel has a number for each place.
    let places = kernel % 4 == 3;
    let numbers = inputs.iter().map(|(name, x)| {
        let mut at = name.len() as u32;
        let number = |&x: &f64| {
            at = at.wrapping_add(if places { 0x9E37_79B1 } else { 0 });
            let place = if places { at } else { 0 };
            Stochastic { rounding, place, ..Stochastic::from_f64(x) }
        };
        (name.clone(), x.map(number))
    });
    let results = evaluate(problem, pass, &numbers.collect())?;
    let output = |(name, x): (String, ArrayD<Stochastic>)| {
        let operand = operands.iter().find(|operand| operand.name == name)?;
        match types.of(operand) {
            Stored::Float(dtype) => Some((name, x.mapv(|x| dtype.round(x.value)))),
            Stored::Integer => None,
        }
    };
    Ok(results.into_iter().filter_map(output).collect())
}

/// Puts what the kernel saved in its forward pass in the place of what is given. The reference takes δ of the
/// weights, where a kernel takes Σ o dout of its stored o: the difference enters as one of dlse, which is
/// subtracted from δ and read nowhere else.
fn keep_saved(
    problem: &Problem,
    types: &Types,
    operands: &[Operand],
    inputs: &mut Values,
    kernel: (&Profile, u32),
) -> Result<(), Error> {
    let forward = problem.operands(Pass::Forward);
    let own = |name: &String| forward.iter().any(|x| x.name == name && x.role.is_given());
    let given = inputs.iter().filter(|(name, _)| own(name));
    let given: Values = given.map(|(name, x)| (name.clone(), x.clone())).collect();
    let saved = stored(problem, Pass::Forward, types, &given, kernel)?;
    let reads = |name: &str| operands.iter().find(|operand| operand.name == name);
    if let (Some(o), Some(dout), Some(dlse)) = (saved.get("o"), inputs.get("dout"), reads("dlse")) {
        let exact = evaluate_in(Arithmetic::F64, problem, Pass::Forward, &given)?;
        let apart = exact.get("o").map(|exact| (o - exact) * dout);
        let absent = || ArrayD::zeros(dlse.shape.as_slice());
        let mut off = inputs.remove("dlse").unwrap_or_else(absent);
        if let Some(apart) = apart {
            let apart = apart.mapv(|x| if x.is_finite() { x } else { 0.0 });
            off -= &apart.sum_axis(Axis(apart.ndim() - 1));
        }
        inputs.insert("dlse".to_string(), off);
    }
    inputs.extend(saved.into_iter().filter(|(name, _)| reads(name).is_some()));
    Ok(())
}

/// The largest errors of operations, relative to their results.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Rounding {
    /// Of the accumulator.
    unit: f32,
    /// Of a product.
    product: f32,
    /// Of a product of two factors which are narrowed, if these lose digits.
    factors: f32,
    /// The bits of f64 that a narrowed factor does not keep: one in which they are 0 loses nothing.
    lost: u64,
    /// Of a score, if it is stored.
    score: f32,
    /// Of a weight, if it is stored.
    weight: f32,
    /// Of a weight that is made anew from lse, relative to the largest logit, lse and 1: of three sums, the storing,
    /// and the function.
    lse: f32,
    /// Numbers below this are lost: every other kernel keeps no subnormal ones.
    least: f64,
    /// The error of a weight, or a product of weights, that underflows where it is stored before it is multiplied; 0
    /// where the type has the accumulator's exponents. Weights of linear attention are products themselves.
    floor: f64,
    product_floor: f64,
    /// Factor of every error. Weights of lazy attention jump where they become 0: a jump that one kernel
    /// in fifty makes is seen in one whose errors are larger.
    factor: f32,
    kernel: u32,
}

impl Rounding {
    const NONE: &'static Rounding = &Rounding {
        unit: 0.0,
        product: 0.0,
        factors: 0.0,
        lost: 0,
        score: 0.0,
        weight: 0.0,
        lse: 0.0,
        least: 0.0,
        floor: 0.0,
        product_floor: 0.0,
        factor: 1.0,
        kernel: 0,
    };

    /// The same for as long as the process lives, so that numbers carry one word of it: there are as many as simulated
    /// kernels of profiles, algorithms and passes.
    fn kept(self) -> &'static Rounding {
        static KEPT: Mutex<Vec<&Rounding>> = Mutex::new(Vec::new());
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = kept.iter().find(|known| ***known == self) {
            return known;
        }
        let new = Box::leak(Box::new(self));
        kept.push(new);
        new
    }

    fn new(profile: &Profile, algorithm: Algorithm, pass: Pass, kernel: u32) -> Self {
        let unit = profile.accumulator.unit_roundoff();
        let narrow = |u: f64| if u > unit { u } else { 0.0 };
        // The weights of linear_cross_entropy multiply nothing in its forward pass. dS and da are products
        // of weights, and gradients of heads are sums of these.
        let multiplies = pass != Pass::Forward || algorithm != Algorithm::LinearCrossEntropy;
        let Profile { p_store, weight_store, ds_store, score_store, .. } = *profile;
        let mut stores = vec![p_store, weight_store];
        let mut roundoffs = vec![profile.p_roundoff(), weight_store.unit_roundoff()];
        if pass != Pass::Forward {
            let besides = [profile.dp_store, profile.residual_store, score_store];
            stores.extend([ds_store].into_iter().chain(besides));
            roundoffs.extend(
                [profile.ds_roundoff()].into_iter().chain(besides.map(Dtype::unit_roundoff)),
            );
        }
        let stored = roundoffs.into_iter().map(narrow).fold(0.0, f64::max);
        let weight = if multiplies { stored } else { 0.0 };
        let floor = floor(profile, &stores);
        let product_floor = if algorithm == Algorithm::LinearAttention { floor } else { 0.0 };
        let mut product = unit;
        if algorithm == Algorithm::LinearAttention {
            // Its weights and states are products.
            product += 2f64.sqrt() * stored;
        }
        // The forward pass of lazy attention reads its own lse.
        let streams = pass == Pass::Forward && algorithm != Algorithm::LazyAttention;
        let lse = if streams { 0.0 } else { 4.0 * unit };
        let score = narrow(score_store.unit_roundoff());
        let [unit, product, factors, score, weight, lse] =
            [unit, product, profile.factor, score, weight, lse].map(|x| x as f32);
        // A factor that errs by 2⁻ᵐ has m digits at least.
        let digits = -profile.factor.log2().ceil();
        let lost = match kernel % 4 {
            _ if profile.factor == 0.0 => 0,
            // One that multiplies q with σ first.
            1 => u64::MAX,
            _ => u64::MAX >> (11.0 + digits).min(63.0) as u32,
        };
        let least = if kernel % 2 == 1 { profile.accumulator.min_positive() } else { 0.0 };
        let factor = match (algorithm, kernel % 8) {
            (Algorithm::LazyAttention, 2) => 4.0,
            (Algorithm::LazyAttention, 6) => 8.0,
            _ => 1.0,
        };
        Rounding {
            unit,
            product,
            factors,
            lost,
            score,
            weight,
            lse,
            least,
            floor,
            product_floor,
            factor,
            kernel,
        }
    }

    /// Of the underflow of stored weights alone.
    fn of_underflow(profile: &Profile, algorithm: Algorithm, pass: Pass) -> Self {
        let Rounding { floor, product_floor, .. } = Rounding::new(profile, algorithm, pass, 0);
        let unit = Dtype::F64.unit_roundoff() as f32;
        Rounding { unit, product: unit, floor, product_floor, ..*Rounding::NONE }
    }

    /// Of a product of factors that are stored before. Two that are narrowed err each by itself.
    fn of_product(&self, x: Stochastic, y: Stochastic) -> f32 {
        let loses = |x: Stochastic| x.value.to_bits() & self.lost != 0;
        let factors = match u8::from(loses(x)) + u8::from(loses(y)) {
            0 => 0.0,
            1 => self.factors,
            _ => std::f32::consts::SQRT_2 * self.factors,
        };
        self.product + factors + x.stored + y.stored
    }

    /// Of a division, or of a product with a rounded reciprocal.
    fn of_quotient(&self) -> f32 {
        2.0 * self.unit
    }

    /// The same number for the same operation on the same operands at the same place, from −1 to 1.
    fn random(&self, operation: u64, x: f64, y: f64, place: u32) -> f64 {
        let seed = (u64::from(self.kernel) << 8 | operation).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut word = x.to_bits() ^ y.to_bits().rotate_left(29) ^ seed;
        word = word.wrapping_add(u64::from(place) << 17);
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((word ^ (word >> 31)) >> 11) as f64 * 0.5f64.powi(52) - 1.0
    }
}

/// The error of a number that underflows in one of these types, where that is larger than the accumulator's.
fn floor(profile: &Profile, stores: &[Dtype]) -> f64 {
    let least = profile.accumulator.underflow();
    let floors = stores.iter().map(|dtype| dtype.underflow());
    floors.filter(|floor| *floor > least).fold(0.0, f64::max)
}

/// A number whose operations round at random.
#[derive(Debug, Clone, Copy)]
struct Stochastic {
    value: f64,
    /// The size of the largest term of the sum that it is; of others their own.
    size: f64,
    /// Of a sum of exponentials 1 more than the largest [`size`](Self::size) of an argument; else 0.
    logit: f64,
    /// Rounding of its operations: of a constant of the formula [`Rounding::NONE`] until it meets an operand.
    rounding: &'static Rounding,
    /// Rounding of a weight before it is multiplied. The sum of weights that divides is that of
    /// weights which are not rounded.
    stored: f32,
    /// Its error by underflow where it is stored before it is multiplied; else 0.
    floor: f64,
    /// Place of its operands, in kernels whose errors depend on that; else 0.
    place: u32,
}

impl Stochastic {
    /// A result of an operation on this number, off by up to `error`.
    fn off(self, value: f64, error: f64, operation: u64, other: f64) -> Self {
        let random = self.rounding.random(operation, self.value, other, self.place);
        let error = error * f64::from(self.rounding.factor);
        // An infinite result is so in every kernel.
        let rounded = value + error * random;
        let value = if value.is_finite() && error.is_finite() { rounded } else { value };
        let value = if value.abs() < self.rounding.least { 0.0 } else { value };
        Stochastic { value, size: value.abs(), logit: 0.0, stored: 0.0, floor: 0.0, ..self }
    }

    /// A result of two numbers, off by up to `units` roundoffs of itself.
    fn with(
        self,
        y: Self,
        value: f64,
        relative: impl Fn(&Rounding) -> f32,
        operation: u64,
    ) -> Self {
        let rounding = if self.rounding.unit > 0.0 { self.rounding } else { y.rounding };
        let place = self.place.rotate_left(7) ^ y.place.wrapping_mul(0x85EB_CA6B);
        let x = Stochastic { rounding, place, ..self };
        x.off(value, value.abs() * f64::from(relative(rounding)), operation, y.value)
    }

    /// A product of two numbers, of which those that are stored before may underflow. A constant of the formula
    /// multiplies what was stored.
    fn times(self, y: Self) -> Self {
        let constant = |x: Self| x.rounding.unit == 0.0;
        let (x, floor) = match (constant(self), constant(y)) {
            _ if self.floor == 0.0 && y.floor == 0.0 => (self.value * y.value, 0.0),
            (true, _) => (self.value * y.value, y.floor * self.value.abs()),
            (_, true) => (self.value * y.value, self.floor * y.value.abs()),
            _ => (on_grid(self) * on_grid(y), self.floor.max(y.floor)),
        };
        let product = self.with(y, x, |of| of.of_product(self, y), 2);
        Stochastic { floor: floor.max(product.rounding.product_floor), ..product }
    }

    fn unit(self) -> f64 {
        f64::from(self.rounding.unit)
    }

    /// The rounding of lse, where this is a sum of exponentials.
    fn of_lse(self) -> f64 {
        let size = if self.logit > 0.0 { self.logit + self.value.ln().abs() } else { 0.0 };
        f64::from(self.rounding.lse) * size
    }
}

/// A number as its type holds it if it is subnormal there: the significand of f16 has 11 bits.
fn on_grid(x: Stochastic) -> f64 {
    let step = 2.0 * x.floor;
    if x.value.abs() < 1024.0 * step { (x.value / step).round_ties_even() * step } else { x.value }
}

operators! {
    [] Stochastic, x, y;
    compare value,
    neg Stochastic { value: -x.value, ..x },
    add Stochastic {
        size: x.size.max(y.size),
        logit: x.logit.max(y.logit),
        stored: x.stored.max(y.stored),
        floor: x.floor.max(y.floor),
        ..x.with(y, x.value + y.value, |of| of.unit, 1)
    },
    sub x + -y,
    mul x.times(y),
    div {
        // By an l that a kernel keeps in lse, whose rounding all quotients share.
        let y = y.off(y.value, y.value * y.of_lse(), 10, 0.0);
        let quotient = x.with(y, x.value / y.value, Rounding::of_quotient, 3);
        Stochastic { stored: x.stored, floor: x.floor, ..quotient }
    }
}

impl Real for Stochastic {
    const ZERO: Self = Stochastic {
        value: 0.0,
        size: 0.0,
        logit: 0.0,
        rounding: Rounding::NONE,
        stored: 0.0,
        floor: 0.0,
        place: 0,
    };
    const ONE: Self = Stochastic { value: 1.0, size: 1.0, ..Self::ZERO };

    fn from_f64(x: f64) -> Self {
        Stochastic { value: x, size: x.abs(), ..Self::ZERO }
    }

    fn to_f64(self) -> f64 {
        self.value
    }

    /// A polynomial and a rounded argument. The argument is a logit less a maximum; a kernel may subtract a stored
    /// lse instead, whose rounding is of the size of the two.
    fn exp(self) -> Self {
        let value = self.value.exp();
        let score = f64::from(self.rounding.score) * self.size;
        let function = (2.0 + self.value.abs() + self.size) * self.unit() + score;
        let computed = self.off(value, value * function, 4, 0.0);
        let Rounding { weight: stored, floor, .. } = *self.rounding;
        Stochastic { logit: 1.0 + self.size, stored, floor, ..computed }
    }

    fn ln(self) -> Self {
        let value = self.value.ln();
        self.off(value, value.abs().max(1.0) * self.unit() + self.of_lse(), 6, 0.0)
    }

    fn sqrt(self) -> Self {
        let value = self.value.sqrt();
        self.off(value, value * self.unit(), 7, 0.0)
    }

    fn tanh(self) -> Self {
        let value = self.value.tanh();
        self.off(value, 4.0 * self.unit(), 8, 0.0)
    }

    /// As 1 − τ².
    fn tanh_slope(self) -> Self {
        let value = self.value.tanh_slope();
        self.off(value, 8.0 * self.unit(), 9, 0.0)
    }
}
