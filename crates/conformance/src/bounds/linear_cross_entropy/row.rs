//! A row of logits: how far off each, its weight, and the row's lse and entropy may be.

use super::super::model::{LARGEST_RELATIVE, Model, dots, growth};
use super::Operands;
use etalon_problem::Precision;

/// A logit.
pub(super) struct Logit {
    pub z: f64,
    /// (N61)
    pub error: f64,
    /// r, and its error (N62).
    pub slope: f64,
    pub slope_error: f64,
    /// p
    pub p: f64,
    /// Of the streamed weight, in units of the normaliser (N63).
    pub weight_error: f64,
}

/// A row, as far as classes of −∞ do not count.
pub(super) struct Row {
    pub logits: Vec<Logit>,
    pub m: f64,
    pub lse: f64,
    pub entropy: f64,
    /// Before they are stored: (N64), (N66).
    pub lse_error: f64,
    pub entropy_error: f64,
    /// Whether the row has no bound.
    pub lost: bool,
}

impl Row {
    pub fn new(operands: &Operands<'_>, model: &Model, i: usize) -> Self {
        let vocab = operands.problem.vocab;
        let mut logits: Vec<Logit> = (0..vocab).map(|v| logit(operands, model, i, v)).collect();
        let m = logits.iter().fold(f64::NEG_INFINITY, |m, x| m.max(x.z));
        let l: f64 = logits.iter().map(|x| (x.z - m).exp()).sum();
        let rescales = model.rescales(vocab);
        let (mut a, mut mean, mut distance) = (0.0, 0.0, 0.0);
        for x in logits.iter_mut().filter(|x| x.z > f64::NEG_INFINITY) {
            x.p = (x.z - m).exp() / l;
            let exponent = x.error + model.streamed_exp((x.z - m).abs(), rescales);
            x.weight_error = x.p * growth(exponent) + model.eta;
            a += x.weight_error;
            mean += x.p * (x.z - m);
            distance += x.p * ((x.z - m).abs() + 2.0 * model.profile.rescale_lag);
        }
        let (u, gamma) = (model.u, model.gamma(model.chain(vocab)));
        let log = l.ln() + model.profile.rescale_lag;
        let lse = m + l.ln();
        let rounding = model.profile.log * u * log.max(1.0);
        let lse_error = a / (1.0 - a) + gamma + rounding + 3.0 * u * (m.abs() + log); // (N64)
        let mut spread = 0.0;
        for x in logits.iter().filter(|x| x.z > f64::NEG_INFINITY) {
            spread += x.weight_error * (1.0 - (x.z - m - mean)).abs() + x.p * x.error;
        }
        let twice = model.gamma(2 * model.chain(vocab));
        let entropy_error = (1.0 + a) / (1.0 - a) * spread
            + twice * (1.0 + distance)
            + rounding
            + 3.0 * u * (log + mean.abs() + model.profile.rescale_lag); // (N66)
        let lost = a > LARGEST_RELATIVE || a.is_nan() || !lse_error.is_finite();
        Row { logits, m, lse, entropy: l.ln() - mean, lse_error, entropy_error, lost }
    }

    /// Of lse as a kernel finds it again.
    pub fn stored_lse_error(&self, model: &Model) -> f64 {
        self.lse_error + model.store(self.lse.abs(), Precision::Wide)
    }

    /// (N67)
    pub fn logprob_error(&self, model: &Model, y: usize) -> f64 {
        let target = &self.logits[y];
        self.lse_error + target.error + 2.0 * model.u * (target.z.abs() + self.lse.abs())
    }
}

fn logit(operands: &Operands<'_>, model: &Model, i: usize, v: usize) -> Logit {
    let problem = operands.problem;
    let (dim, u) = (problem.dim, model.u);
    let row = |x: &'_ [f64], at: usize| x[at * dim..][..dim].to_vec();
    let (dot, absolute) = dots(&row(operands.h, i), &row(operands.w, v));
    let bias = operands.bias.map_or(0.0, |bias| bias[v]);
    let a = dot + bias;
    let a_error = model.gamma(dim + 2) * (absolute + bias.abs()) + dim as f64 * model.eta; // (N60)
    let (scale, theta) = (problem.logit_scale, problem.temperature);
    let ratio = (scale / theta).abs();
    let scaled = scale * a;
    let (z, error, bend, bend_error) = match problem.softcap {
        None => (scaled / theta, ratio * a_error, 1.0, 0.0),
        Some(cap) => {
            let e = scale.abs() * a_error + 5.0 * u * scaled.abs();
            let (t, bend) = ((scaled / cap).tanh(), slope(scaled / cap));
            let moved = (bend * (2.0 * e / cap).exp()).min(1.0) * e / cap + model.profile.tanh * u;
            let z = cap * t / theta;
            (z, cap / theta * moved, bend, (2.0 * t.abs() + moved) * moved + u * (t * t + bend))
        }
    };
    let slope = scale / theta * bend;
    let finite = z.is_finite() && z != f64::NEG_INFINITY;
    Logit {
        z,
        error: if finite { error + 5.0 * u * z.abs() } else { 0.0 }, // (N61)
        slope,
        slope_error: ratio * bend_error + 5.0 * u * slope.abs(), // (N62)
        p: 0.0,
        weight_error: 0.0,
    }
}

/// 1 − tanh²(x), also where tanh is 1.
fn slope(x: f64) -> f64 {
    let e = (-2.0 * x.abs()).exp();
    4.0 * e / ((1.0 + e) * (1.0 + e))
}
