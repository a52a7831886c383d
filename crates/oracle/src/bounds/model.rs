//! The arithmetic of a profile: roundoffs, chains and floors, with the equations (N1) to (N4).

use crate::profile::Profile;
use crate::types::Types;
use etalon_problem::{Dtype, Precision, Stored};
use std::fmt;

/// Reasons why an element has no bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum NoBound {
    /// A sum may overflow its type, or has more terms than its roundoff can count (n u ≥ 1).
    Sum,
    /// The logarithm of a weight is so uncertain that e^ρ leaves the range of f64.
    Exponential,
    /// The error of a divisor reaches the divisor.
    Divisor,
}

impl NoBound {
    /// Its name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            NoBound::Sum => "sum",
            NoBound::Exponential => "exponential",
            NoBound::Divisor => "divisor",
        }
    }
}

/// As a reason: "no bound, since …".
impl fmt::Display for NoBound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            NoBound::Sum => "a sum may overflow its type or has too many terms",
            NoBound::Exponential => "the scores are too uncertain for any bound of a weight",
            NoBound::Divisor => "the error of a divisor reaches it",
        })
    }
}

/// The error of a weight P e^ρ that f64 cannot hold, and of a quotient whose divisor may be 0. Sums of
/// infinite terms are infinite. In between lie [`BEYOND`]s by which [`Model::no_bound`] tells them apart,
/// whatever operands of up to 10³⁸ they are multiplied by.
pub(super) const UNCERTAIN_WEIGHT: f64 = 1e170;
/// See [`UNCERTAIN_WEIGHT`].
pub(super) const UNCERTAIN_DIVISOR: f64 = 1e250;
pub(super) const BEYOND: [f64; 2] = [1e130, 1e210];

/// The numbers of a profile together with the storage type.
#[derive(Debug, Clone, Copy)]
pub(super) struct Model {
    pub profile: Profile,
    /// u: of the accumulator.
    pub u: f64,
    /// Relative error of a product whose two factors are narrowed: 0 where they are not.
    pub factors: f64,
    /// η: what underflow in the accumulator may cost, once.
    pub eta: f64,
    /// u_p and u_ds: of a stored P and dS, 0 where they stay in the accumulator's type.
    pub u_p: f64,
    pub u_ds: f64,
    /// η_p and η_ds: the absolute errors of a stored P and dS that underflow.
    pub eta_p: f64,
    pub eta_ds: f64,
    /// Operands below this may be read as 0: those that are subnormal in bf16, where dS is of bf16.
    least: f64,
    /// u_g and η_g: the same of the gradient of one head of a group.
    pub u_g: f64,
    pub eta_g: f64,
    /// u and η of what a profile may store besides: steps to a score, dP, normalised weights, p − [y], and the
    /// sums of dw over chunks.
    pub score: Kept,
    pub dp: Kept,
    pub weight: Kept,
    pub residual: Kept,
    pub chunk: Kept,
    /// Limit of sums of absolute terms: no intermediate result overflows as long as all of them stay below
    /// this, 2²⁴ under the accumulator's largest number. The room is for what a streaming softmax
    /// has not normalised yet: 2¹⁶ keys, each of weight up to 2⁸.
    pub limit: f64,
    /// The types in which the forward pass stores what a later pass of it reads.
    pub o: Dtype,
    pub lse: Dtype,
    pub entropy: Dtype,
    safety: f64,
}

/// Error of storing an intermediate value: u of itself and η, ∞ where it overflows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kept {
    pub u: f64,
    pub eta: f64,
    max: f64,
}

impl Kept {
    /// Of what is not stored, or in the accumulator's type.
    const NOTHING: Kept = Kept { u: 0.0, eta: 0.0, max: f64::INFINITY };

    /// The error of storing a number of this size; nothing is known of one that may overflow.
    pub fn error(&self, size: f64) -> f64 {
        if size > self.max { f64::INFINITY } else { self.u * size + floor(size, self.eta) }
    }
}

impl Model {
    pub fn new(profile: &Profile, types: &Types) -> Self {
        let u = profile.accumulator.unit_roundoff();
        let largest = profile
            .stores()
            .into_iter()
            .chain(types.all())
            .map(Dtype::unit_roundoff)
            .fold(u.max(profile.factor), f64::max);
        // An f64 kernel is compared with an f64 reference: each may err by the bound.
        let twice = if profile.accumulator == Dtype::F64 { 2.0 } else { 1.0 };
        let eta = profile.accumulator.underflow();
        let stored = |dtype: Dtype, u: f64| {
            let u = if dtype == profile.accumulator { 0.0 } else { u };
            (u, dtype.underflow().max(eta))
        };
        let (u_p, eta_p) = stored(profile.p_store, profile.p_roundoff());
        let (u_ds, eta_ds) = stored(profile.ds_store, profile.ds_roundoff());
        let stored = |dtype: Dtype| stored(dtype, dtype.unit_roundoff());
        let (u_g, eta_g) = stored(profile.group_store);
        let kept = |dtype: Dtype| match stored(dtype) {
            (0.0, _) => Kept::NOTHING,
            (u, eta) => Kept { u, eta, max: dtype.max() },
        };
        Model {
            profile: *profile,
            u,
            factors: 2.0 * profile.factor,
            eta,
            u_p,
            u_ds,
            eta_p,
            eta_ds,
            least: if profile.ds_store == Dtype::Bf16 { f32::MIN_POSITIVE.into() } else { 0.0 },
            u_g,
            eta_g,
            score: kept(profile.score_store),
            dp: kept(profile.dp_store),
            weight: kept(profile.weight_store),
            residual: kept(profile.residual_store),
            chunk: kept(profile.chunk_store),
            limit: profile.accumulator.max() * 0.5f64.powi(24),
            o: types.stored("o", Precision::Storage).dtype().unwrap_or(types.storage),
            lse: types.stored("lse", Precision::Wide).dtype().unwrap_or(types.storage),
            entropy: types.stored("entropy", Precision::Wide).dtype().unwrap_or(types.storage),
            safety: twice * (1.01 + 4.0 * largest), // (N4)
        }
    }

    /// γ_n = n u / (1 − n u) + 2 u_f: the relative error of a chain of n roundings, one of them of a
    /// product (N1).
    pub fn gamma(&self, n: usize) -> f64 {
        self.gamma_of_sum(n) + self.factors
    }

    /// The same of a chain of sums alone.
    pub fn gamma_of_sum(&self, n: usize) -> f64 {
        let nu = n as f64 * self.u;
        if nu < 1.0 { nu / (1.0 - nu) } else { f64::INFINITY }
    }

    /// The error of the logarithm of exp(x), `distance` = |x| (N3).
    pub fn exp(&self, distance: f64) -> f64 {
        (self.profile.exp_constant + self.profile.exp_slope * distance) * self.u
    }

    /// The same of a streamed weight exp(S − m) with `rescales` rescales behind it, where the running
    /// maximum lags by at most `lag`.
    pub fn streamed_exp(&self, distance: f64, lag: f64, rescales: usize) -> f64 {
        self.exp(distance + 2.0 * lag) + self.profile.exp_constant * self.u * rescales as f64
    }

    /// The largest lag of the running maximum of some logits, which is one of them, behind the true one.
    pub fn lag(&self, logits: impl Iterator<Item = f64>) -> f64 {
        let finite = logits.filter(|x| x.is_finite());
        let ends = (f64::INFINITY, f64::NEG_INFINITY);
        let (least, most) = finite.fold(ends, |(least, most), x| (least.min(x), most.max(x)));
        self.profile.rescale_lag.min((most - least).max(0.0))
    }

    /// The error of lse = m + ln l before it is stored (N9). Errors of the weights move ln l by at most
    /// `moved`, and |ln l| is at most `log`, however far the maximum lags.
    pub fn lse_error(&self, moved: f64, gamma: f64, max: f64, log: f64) -> f64 {
        moved + gamma + self.log_error(log) + self.profile.lse * self.u * (max.abs() + log)
    }

    /// Error of a logarithm of this size that is taken to base 2: of log₂ e and the product with it.
    pub fn base_2(&self, log: f64) -> f64 {
        if log.is_finite() { 2.0 * self.u * log.abs() } else { 0.0 }
    }

    /// The error of a logarithm of size `log`.
    pub fn log_error(&self, log: f64) -> f64 {
        self.profile.log * self.u * log.max(1.0)
    }

    /// γ of a sum of `terms` terms, each of which may pass through a partial sum of its own and
    /// through so many roundings more.
    pub fn gamma_by_parts(&self, terms: usize, more: usize) -> f64 {
        self.gamma(terms + self.profile.rescales(terms) + more)
    }

    /// The size of an operand that may be read as 0, else 0.
    pub fn unread(&self, x: f64) -> f64 {
        if x.abs() < self.least { x.abs() } else { 0.0 }
    }

    /// Reach of an error in a decision: as far as (N4) lets it reach in an output.
    pub fn widened(&self, error: f64) -> f64 {
        self.safety * error
    }

    /// The relative error of a term P v of a sum: the rounding of a stored P, and γ of the sum.
    pub fn rounded_weight(&self, gamma: f64) -> f64 {
        gamma + self.u_p * (1.0 + gamma)
    }

    /// True where weights or dS are rounded to less than the accumulator's type.
    pub fn stores_low(&self) -> bool {
        let kept = [self.score, self.dp, self.weight, self.residual, self.chunk];
        self.u_p > 0.0 || self.u_ds > 0.0 || kept.iter().any(|kept| kept.u > 0.0)
    }

    /// Digits of stored weights: of dS, or with P the fewer of both. `None` where they have another range than the
    /// accumulator, or more is stored in less.
    pub fn digits(&self, has_p: bool) -> Option<u8> {
        let kept = [self.score, self.dp, self.weight, self.residual, self.chunk];
        let wide = [self.profile.p_store, self.profile.ds_store];
        let wide =
            wide.iter().all(|&store| store == self.profile.accumulator || store == Dtype::Bf16);
        let known = wide && kept.iter().all(|kept| kept.u == 0.0);
        let roundoff = if has_p { self.u_p.max(self.u_ds) } else { self.u_ds };
        let digits = if roundoff == 0.0 { 0.0 } else { -roundoff.log2() };
        known.then_some(digits as u8)
    }

    /// Steps of the gradient between P and the products with q and k that are stored: dS, and where the steps
    /// to a score are, those back through a cap and the scale (N14).
    pub fn steps_back(&self, capped: bool) -> f64 {
        match self.score.u > 0.0 {
            true if capped => 5.0,
            true => 2.0,
            false => 1.0,
        }
    }

    /// The absolute error of storing one number of about this size.
    pub fn store(&self, magnitude: f64, dtype: Dtype) -> f64 {
        magnitude * dtype.unit_roundoff() + floor(magnitude, dtype.underflow())
    }

    /// Error of Σ_c x_c o_c from storing the elements of o.
    pub fn stored_product(&self, x: &[f64], o: &[f64]) -> f64 {
        let stored = |(x, o): (&f64, &f64)| x.abs() * self.store(o.abs(), self.o);
        x.iter().zip(o).map(stored).sum()
    }

    /// Error of storing numbers of o whose sizes add up to `magnitude`, without underflow.
    pub fn storage_error(&self, magnitude: f64) -> f64 {
        magnitude * self.o.unit_roundoff()
    }

    /// The bound of an output `value` whose computation errs by `error`: storing it rounds once
    /// more, and the safety factor stands for products of errors (N4). ∞, no requirement, where
    /// a sum may have overflowed on the way: `error` holds at least u times its absolute terms.
    pub fn finish(&self, value: f64, error: f64, stored: Stored) -> f64 {
        if !value.is_finite() {
            return 0.0; // its class decides, not its distance
        }
        let Stored::Float(dtype) = stored else {
            return error; // 0, or ∞ where rounding decides which number it is
        };
        if self.no_bound(error).is_some() {
            return f64::INFINITY;
        }
        self.safety * (error + self.store(value.abs() + error, dtype))
    }

    /// The largest error of a result that has a bound: sums beyond it may have overflowed.
    fn largest_error(&self) -> f64 {
        self.u * self.limit.min(BEYOND[0])
    }

    /// The error of a weight e^`log` whose logarithm errs by `rho` (N2).
    pub fn weight_error(&self, log: f64, rho: f64) -> f64 {
        weight_error(log, rho, self.largest_error())
    }

    /// The reason why a result of such an error has no bound, if it has none.
    pub fn no_bound(&self, error: f64) -> Option<NoBound> {
        if error <= self.largest_error() {
            return None;
        }
        Some(match error {
            error if error > BEYOND[1] && error < f64::INFINITY => NoBound::Divisor,
            error if error > BEYOND[0] && error < f64::INFINITY => NoBound::Exponential,
            _ => NoBound::Sum,
        })
    }
}

/// The error of a weight e^`log` whose logarithm errs by `rho` (N2): e^log (e^ρ − 1), also where e^log is less
/// than f64 can hold. ∞ where nothing is known of the logarithm, [`UNCERTAIN_WEIGHT`] where the weight may
/// exceed `limit`.
pub(super) fn weight_error(log: f64, rho: f64, limit: f64) -> f64 {
    if rho <= 1.0 {
        return log.exp() * rho.exp_m1();
    }
    if rho.is_nan() || rho == f64::INFINITY {
        return f64::INFINITY;
    }
    match (log + rho).exp() {
        most if most > limit => UNCERTAIN_WEIGHT,
        most => most - log.exp(),
    }
}

/// The product of an error and of what it multiplies, of which either may say that there is no bound: then
/// the product says the same. An error times a 0 that is certain is 0.
pub(super) fn spread(error: f64, factor: f64) -> f64 {
    let most = error.max(factor);
    if error == 0.0 || factor == 0.0 {
        0.0
    } else if error.is_nan() || factor.is_nan() {
        f64::INFINITY
    } else if most > BEYOND[0] {
        most
    } else {
        error * factor
    }
}

/// The relative error of a quotient whose divisor errs by `relative` of itself: r / (1 − r).
pub(super) fn divided(relative: f64) -> f64 {
    if relative < 1.0 { relative / (1.0 - relative) } else { UNCERTAIN_DIVISOR }
}

/// `eta` where something can underflow: a sum of nothing but zeros is exact.
pub(super) fn floor(magnitude: f64, eta: f64) -> f64 {
    if magnitude > 0.0 { eta } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_err_by_what_their_logarithms_do() {
        for rho in [0.0, 1e-9, 1e-3, 0.1, 0.5, 1.0, 1.0 + 1e-9, 3.0] {
            let error = weight_error(-1.0, rho, 1e24);
            let exact = f64::exp(-1.0) * f64::exp_m1(rho);
            assert!((error - exact).abs() <= 1e-15 * (1.0 + exact), "{rho}");
        }
        // A weight that f64 takes for 0 may be large all the same.
        assert_eq!(weight_error(-2000.0, 2000.0, 1e24), 1.0);
        assert_eq!(weight_error(0.0, 60.0, 1e24), UNCERTAIN_WEIGHT);
        assert_eq!(weight_error(f64::NEG_INFINITY, f64::INFINITY, 1e24), f64::INFINITY);
    }

    #[test]
    fn a_product_keeps_the_reason() {
        let model = Model::new(&Profile::by_name("f32-strict").unwrap(), &Dtype::F32.into());
        let reason = |x: f64| model.no_bound(x);
        assert_eq!(reason(spread(UNCERTAIN_WEIGHT, UNCERTAIN_WEIGHT)), Some(NoBound::Exponential));
        assert_eq!(reason(spread(UNCERTAIN_WEIGHT, 1e-45)), Some(NoBound::Exponential));
        assert_eq!(reason(spread(UNCERTAIN_WEIGHT, UNCERTAIN_DIVISOR)), Some(NoBound::Divisor));
        assert_eq!(reason(spread(f64::INFINITY, 1e-45)), Some(NoBound::Sum));
        assert_eq!(reason(spread(f64::NAN, 1.0)), Some(NoBound::Sum));
        assert_eq!(spread(f64::INFINITY, 0.0), 0.0);
        assert_eq!(spread(2.0, 3.0), 6.0);
    }

    #[test]
    fn an_exact_zero_needs_no_bound() {
        let model = Model::new(&Profile::by_name("f32-strict").unwrap(), &Dtype::Bf16.into());
        let [narrow, wide] = [Dtype::Bf16, Dtype::F32].map(Stored::Float);
        assert_eq!(model.finish(0.0, 0.0, narrow), 0.0);
        assert!(model.finish(1.0, 0.0, narrow) >= 0.5f64.powi(8));
        assert!(model.finish(1.0, 0.0, wide) < 0.5f64.powi(23));
    }
}
