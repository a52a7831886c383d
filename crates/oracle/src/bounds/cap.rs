//! Errors that a softcap lets through: equation (N6).

use super::model::Model;

/// Errors behind a softcap c: (N6).
pub(super) struct Capped {
    /// Error of c·tanh(s/c), as far as it moves with s.
    pub moved: f64,
    /// Of τ = tanh(s/c).
    pub tau_error: f64,
    /// Of S′ = 1 − τ².
    pub slope_error: f64,
}

impl Capped {
    /// `error` is that of s, with the roundings of s/c.
    pub fn new(model: &Model, cap: f64, (tau, slope): (f64, f64), error: f64) -> Self {
        let (u, kappa, size) = (model.u, model.profile.tanh * model.u, tau.abs());
        // tanh(x + y) − tanh x = tanh y (1 − tanh² x) / (1 + tanh x tanh y), towards 0 the most. Where f64
        // cannot tell it from the end of the range, that end.
        let reached = (error / cap).tanh();
        let of_tau = reached * slope / (1.0 - size * reached);
        let of_tau = if error < f64::INFINITY { of_tau.min(1.0 + size) } else { f64::INFINITY };
        let tau_error = of_tau + kappa + model.score.error(size);
        // 1 − τ² stays between 0 and 1 for all that is a tanh.
        let range = slope.max(1.0 - slope) + (2.0 + kappa) * kappa;
        let moved = ((2.0 * size + tau_error) * tau_error).min(range);
        let slope_error = moved + u * (tau * tau + slope + moved);
        Capped { moved: cap * of_tau, tau_error, slope_error }
    }
}
