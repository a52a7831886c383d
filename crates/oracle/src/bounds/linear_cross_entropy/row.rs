//! A row of logits: how far off each, its weight, and the row's lse and entropy may be.

use super::operands::Operands;
use crate::bounds::cap::Capped;
use crate::bounds::model::{floor, spread};
use crate::bounds::reach::Reach;
use crate::bounds::sum::dots;
use etalon_reference::scalar::Real;

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
    /// Of the logarithm of the streamed weight (N63).
    pub exponent: f64,
    /// Of the weight itself, in units of the normaliser.
    weight_error: f64,
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
    /// Λ: how far a running maximum may lag behind m.
    pub lag: f64,
}

impl Row {
    pub fn new(operands: &Operands<'_>, i: usize) -> Self {
        let (vocab, model) = (operands.problem.vocab, operands.model);
        let mut logits: Vec<Logit> = (0..vocab).map(|v| logit(operands, i, v)).collect();
        let m = logits.iter().fold(f64::NEG_INFINITY, |m, x| m.max(x.z));
        let l: f64 = logits.iter().map(|x| (x.z - m).exp()).sum();
        let rescales = model.profile.rescales(vocab);
        let lag = model.lag(logits.iter().map(|x| x.z));
        let log_l = l.ln();
        let (mut reach, mut a) = (Reach::new(vocab as f64 * model.eta), 0.0);
        let (mut mean, mut distance) = (0.0, 0.0);
        let visible = |x: &&mut Logit| x.z > f64::NEG_INFINITY;
        for x in logits.iter_mut().filter(visible) {
            let log = x.z - m - log_l;
            x.p = log.exp();
            x.exponent = x.error + model.streamed_exp((x.z - m).abs(), lag, rescales);
            x.weight_error = model.weight_error(log, x.exponent) + model.eta;
            a += x.weight_error;
            reach.add(log, x.exponent);
            mean += x.p * (x.z - m);
            distance += (x.p + x.weight_error) * ((x.z - m).abs() + x.error + 2.0 * lag);
        }
        let (moved, least) = (reach.moved(), reach.least().exp());
        let log = log_l + lag;
        let chain = model.profile.chain(vocab);
        let lse_error = model.lse_error(moved, model.gamma_of_sum(chain), m, log); // (N64)
        let (lse, entropy) = (m + log_l, log_l - mean);
        let mut apart = a * a;
        let (mut of_exp, mut classes) = (0.0f64, 0.0f64);
        for x in logits.iter().filter(|x| x.z > f64::NEG_INFINITY) {
            apart += x.weight_error * (1.0 - (x.z - m - mean)).abs();
            apart += (x.p + x.weight_error) * x.error;
            (of_exp, classes) = (of_exp.max(x.exponent - x.error), classes + 1.0);
        }
        // Whatever the logits are, the entropy of the weights lies between 0 and ln V, and so do the sums
        // that it is made of.
        let whole = classes.ln();
        let range = entropy.max(whole - entropy) + of_exp;
        let (apart, distance) = (apart / least, distance / least);
        let (apart, distance) = match a < f64::INFINITY {
            true => (range.min(apart), (whole + of_exp + 2.0 * lag).min(distance)),
            false => (apart, distance),
        };
        let entropy_error = apart
            + spread(model.gamma_of_sum(2 * chain), 1.0 + distance)
            + model.log_error(log)
            + 3.0 * model.u * (log + mean.abs() + m.abs() + lag)
            + model.base_2(m); // (N66)
        Row { logits, m, lse, entropy, lse_error, entropy_error, lag }
    }
}

fn logit(operands: &Operands<'_>, i: usize, v: usize) -> Logit {
    let (problem, model) = (operands.problem, operands.model);
    let (dim, u) = (problem.dim, model.u);
    let (h, w) = (&operands.h[i * dim..][..dim], &operands.w[v * dim..][..dim]);
    let (dot, absolute) = dots(h, w);
    let bias = operands.bias(v);
    let a = dot + bias;
    let mut a_error = spread(model.gamma(dim + 2), absolute + bias.abs()); // (N60)
    a_error += floor(absolute, dim as f64 * model.eta);
    let of_unread = |(&h, &w): (&f64, &f64)| model.unread(h) * w.abs() + h.abs() * model.unread(w);
    a_error += h.iter().zip(w).map(of_unread).sum::<f64>();
    let (scale, theta) = (problem.logit_scale, problem.temperature);
    let ratio = (scale / theta).abs();
    if a.is_infinite() && dot.is_finite() {
        a_error = 0.0; // an impossible class, exactly
    } else if (absolute + bias.abs()) * scale.abs().max(1.0) > model.limit {
        a_error = f64::INFINITY;
    }
    // (N93): what is stored on the way, each step that is one.
    let step = |is: bool, size: f64| if is { model.score.error(size.abs()) } else { 0.0 };
    if a.is_finite() {
        a_error += step(true, dot) + step(problem.bias, a);
    }
    let scaled = scale * a;
    let scaled_error = scale.abs() * a_error + step(scale != 1.0, scaled);
    let (z, error, bend, bend_error) = match problem.softcap {
        None => (scaled / theta, scaled_error / theta.abs(), 1.0, 0.0),
        Some(cap) => {
            let rounded = if scaled.is_finite() { 5.0 * u * scaled.abs() } else { 0.0 };
            let reached = scaled_error + rounded + cap * step(scaled.is_finite(), scaled / cap);
            let (tau, bend) = ((scaled / cap).tanh(), (scaled / cap).tanh_slope());
            let capped = Capped::new(model, cap, (tau, bend), reached);
            let error = (cap * capped.tau_error + step(true, cap * tau)) / theta.abs();
            (cap * tau / theta, error, bend, capped.slope_error)
        }
    };
    let slope = scale / theta * bend;
    Logit {
        z,
        error: if z.is_finite() { error + 5.0 * u * z.abs() + step(theta != 1.0, z) } else { 0.0 }, // (N61)
        slope,
        slope_error: ratio * bend_error + 5.0 * u * slope.abs(), // (N62)
        p: 0.0,
        exponent: 0.0,
        weight_error: 0.0,
    }
}
