//! Probes of exp, ln and tanh through a kernel's own interface, over their whole range: every exponent, and
//! every multiple of 2⁻¹², in attention's forward pass; elsewhere every eighth of these. The scores are
//! exact, so that next to the error of the function there is only what a kernel rounds before and behind it.
//! A kernel that works to base 2 shows its 2ˣ in place of eˣ.
//!
//! Two keys with scores 0 and −x, or x and 0, and one-hot values: o is 1/(1 + e^−x) and e^−x/(1 + e^−x),
//! the sigmoid of x and of −x, whose quotient is the weight of the second key; lse is ln(1 + e^−x) more
//! than the larger score. A sink of 0 stands for one of the keys, and a key in another tile for a maximum that
//! grows. With a cotangent of lse alone the same weight is a column of dq. n equal keys: lse is ln n more than
//! their score; with one more key, ln(n + e^−x). One key with a softcap of 1: lse is tanh s, and dq its slope. A
//! state of 1 over one token without a key: o is e^g, and so it is of a key one token back. Two classes are two
//! keys, and dh is the column of dq.

mod cross_entropy;
mod decays;
mod softmax;

pub(crate) use decays::decay_probe;

use crate::cases::Case;
use crate::laws::flaw::{Flaw, Judgement};
use crate::laws::trial::Trial;
use crate::profile::Profile;
use etalon_problem::{Dtype, Pass, Problem};

/// The largest x for which e^−x is a normal number of f32.
const NORMAL: f64 = 87.3;

/// Of the points of a walk every so many are asked of weights beside a sink, or beside a maximum that grows.
const BESIDE: usize = 8;

/// The steps of a walk, 2⁻¹².
const STEP: f64 = 1.0 / 4096.0;

/// The factors of which a point is the sum: each has at most eight bits, so that no kernel narrows it, in
/// whatever type it multiplies.
const FACTORS: usize = 3;

/// Every exponent of f32 below [`STEP`], as far as a number is normal, then multiples of that up to `most`: every
/// one where attention itself is asked, which shows most of a function and answers soonest.
fn walk(trial: &Trial<'_>, most: f64) -> Vec<f64> {
    let dense = matches!(trial.case.problem, Problem::Attention(_)) && trial.pass == Pass::Forward;
    let steps = match dense {
        _ if trial.tier.is_slow() => 256,
        true => 1,
        false => 8,
    };
    let exponents = (13..=126).rev().map(|e| 0.5f64.powi(e));
    let multiples = (1..=(most / STEP) as u32).step_by(steps);
    exponents.chain(multiples.map(|i| f64::from(i) * STEP)).collect()
}

/// The part with this number of a point of a walk, which has at most 19 bits.
fn factor(x: f64, number: usize) -> f64 {
    if x < STEP {
        return if number == 0 { x } else { 0.0 };
    }
    let upper = |x: f64, unit: f64| (x / unit).trunc() * unit;
    let (high, middle) = (upper(x, 0.5), upper(x, 0.5 / 256.0));
    [high, middle - high, x - middle][number]
}

/// Errors at many points: the worst share of the limit, as a judgement.
pub(super) struct Errors {
    roundoff: f64,
    margin: f64,
    worst: Option<String>,
}

impl Errors {
    /// Of results that are computed and stored in a type.
    pub(super) fn of(dtype: Dtype) -> Self {
        Errors { roundoff: dtype.unit_roundoff(), margin: 0.0, worst: None }
    }

    /// `got` may be off by `limit` roundoffs.
    pub(super) fn add(&mut self, what: &str, x: f64, got: f64, exact: f64, limit: f64) {
        let limit = limit * self.roundoff;
        let share = (got - exact).abs() / limit;
        // NaN is more than anything.
        if share.is_nan() || share > self.margin {
            self.margin = if share.is_nan() { f64::INFINITY } else { share };
            if self.margin > 1.0 {
                let text = format!("{what}({x}) = {got:e}, exact is {exact:e} ± {limit:e}");
                self.worst = Some(text);
            }
        }
    }

    pub(super) fn judgement(self) -> Judgement {
        self.worst.map_or(Ok(Some(self.margin)), |text| Err(Flaw::Fail(text)))
    }
}

/// The error of e^−x in roundoffs, where −x is exact.
fn exact_exp(profile: &Profile, x: f64) -> f64 {
    profile.exp_constant + profile.exp_slope_exact * x.abs()
}

/// The same where −x is what roundings leave of it.
pub(super) fn rounded_exp(profile: &Profile, x: f64) -> f64 {
    profile.exp_constant + profile.exp_slope * x.abs()
}

/// The error of a stored lse = m + ln l in roundoffs, where l errs by so many of its own.
fn lse_limit(profile: &Profile, m: f64, l: f64, of_sum: f64) -> f64 {
    let log = l.ln();
    let computed = of_sum + profile.log * log.max(1.0) + profile.lse * (m.abs() + log);
    computed + (m + log).abs()
}

/// Loss of a product from its narrowed factors, in roundoffs of a type.
pub(super) fn narrowed(profile: &Profile, dtype: Dtype) -> f64 {
    2.0 * profile.factor / dtype.unit_roundoff()
}

/// Loss of a weight to underflow in a product, in its own roundoffs: one that is the sum of numbers in bf16 loses
/// the part below the least of them.
fn lost(profile: &Profile, weight: f64) -> f64 {
    let least = if profile.factor > 0.0 { Dtype::Bf16.underflow() } else { 0.0 };
    least / weight / Dtype::F32.unit_roundoff()
}

/// True if weights are kept as exactly as they are computed.
pub(super) fn keeps_weights(profile: &Profile) -> bool {
    let f32s = |dtype: &Dtype| *dtype == Dtype::F32;
    profile.accumulator == Dtype::F32 && profile.stores().iter().all(f32s)
}

/// True if weights can be read from the results of a pass.
pub(super) fn has_weights(case: &Case, pass: Pass) -> bool {
    let by_lse = case.inputs.contains_key("dlse");
    let of_scores = case.problem.scores().is_some();
    case.dtype == Dtype::F32 && (pass == Pass::Forward || by_lse || !of_scores)
}

pub(super) fn exp_probe(trial: &Trial<'_>) -> Judgement {
    if !keeps_weights(trial.profile()) {
        return Ok(None);
    }
    let mut errors = Errors::of(Dtype::F32);
    let points = walk(trial, NORMAL);
    match (&trial.case.problem, trial.pass) {
        (Problem::LinearCrossEntropy(_), Pass::Forward) => {
            cross_entropy::logarithms(trial, &points, &mut errors)?;
        }
        (Problem::LinearCrossEntropy(_), _) => {
            cross_entropy::weights(trial, &points, &mut errors)?;
        }
        (_, Pass::Forward) => softmax::weights(trial, &points, &mut errors)?,
        _ => softmax::weights_again(trial, &points, &mut errors)?,
    }
    errors.judgement()
}

/// Equal keys of [`log_probe`], at the most: from 1024 on 2⁻¹⁰ of their number, or less, lies between two of
/// its rows. Between one and two keys [`exp_probe`] takes logarithms of all numbers.
const KEYS: usize = 2048;

/// The scores that equal keys have, one after the other.
const SCORES: [f64; 3] = [0.0, -20.0, 77.0];

pub(super) fn log_probe(trial: &Trial<'_>) -> Judgement {
    let mut errors = Errors::of(Dtype::F32);
    for score in SCORES {
        let lse = match trial.case.problem {
            Problem::LinearCrossEntropy(_) => cross_entropy::equal(trial, score)?,
            _ => softmax::equal(trial, score)?,
        };
        for (n, got) in lse {
            let limit = lse_limit(trial.profile(), score, n, 0.0);
            errors.add(&format!("{score} + ln"), n, got, score + n.ln(), limit);
        }
    }
    errors.judgement()
}

pub(super) fn fraction_probe(trial: &Trial<'_>) -> Judgement {
    if !keeps_weights(trial.profile()) {
        return Ok(None);
    }
    let mut errors = Errors::of(Dtype::F32);
    match trial.case.problem {
        Problem::LinearCrossEntropy(_) => cross_entropy::between(trial, &mut errors)?,
        _ => softmax::between(trial, &mut errors)?,
    }
    errors.judgement()
}

pub(super) fn sink_probe(trial: &Trial<'_>) -> Judgement {
    if !keeps_weights(trial.profile()) {
        return Ok(None);
    }
    let mut errors = Errors::of(Dtype::F32);
    softmax::weights_of_sinks(trial, &thin(trial), &mut errors)?;
    errors.judgement()
}

pub(super) fn rescale_probe(trial: &Trial<'_>) -> Judgement {
    if !keeps_weights(trial.profile()) {
        return Ok(None);
    }
    let (mut errors, points) = (Errors::of(Dtype::F32), thin(trial));
    match trial.case.problem {
        Problem::LinearCrossEntropy(_) => {
            cross_entropy::logarithms_of_tiles(trial, &points, &mut errors)?;
        }
        _ => softmax::weights_that_grow(trial, &points, &mut errors)?,
    }
    errors.judgement()
}

/// The points of a walk that are asked beside a sink, or beside a maximum that grows.
fn thin(trial: &Trial<'_>) -> Vec<f64> {
    let every = if trial.tier.is_slow() { 1 } else { BESIDE };
    walk(trial, NORMAL).into_iter().step_by(every).collect()
}

/// The rows of [`fraction_probe`]: numbers of keys or classes, and a point of each.
fn fractions(trial: &Trial<'_>) -> Vec<(usize, f64)> {
    (1..=BETWEEN).flat_map(|n| between(trial, n).into_iter().map(move |x| (n, x))).collect()
}

/// Numbers between two integers of which logarithms are asked, up to this one: beyond, integers lie close enough.
const BETWEEN: usize = 64;

/// The fewest of them from one power of two to the next.
const OCTAVE: usize = 1024;

/// The points x with n + e^−x between n and n + 1, as close as [`OCTAVE`] wants.
fn between(trial: &Trial<'_>, n: usize) -> Vec<f64> {
    let octave = if trial.tier.is_slow() { OCTAVE / 64 } else { OCTAVE };
    let count = octave.div_ceil(n);
    let weight = |i: usize| (i as f64 + 0.5) / count as f64;
    (0..count).map(|i| (-weight(i).ln() / STEP).round() * STEP).collect()
}

/// The errors of lse of n equal logits of 0 and of one of −x, in roundoffs: each of n sums may be rounded.
fn between_limit(profile: &Profile, n: usize, x: f64) -> f64 {
    let (count, weight) = (n as f64, (-x).exp());
    let of_sum = exact_exp(profile, x) * weight / (count + weight) + count;
    lse_limit(profile, 0.0, count + weight, of_sum)
}

/// Beyond, tanh x is 1 in f32.
const TANH_ENDS: f64 = 10.0;

pub(super) fn tanh_probe(trial: &Trial<'_>) -> Judgement {
    let mut errors = Errors::of(Dtype::F32);
    let points = walk(trial, TANH_ENDS);
    for sign in [-1.0, 1.0] {
        match (&trial.case.problem, trial.pass) {
            (Problem::LinearCrossEntropy(_), Pass::Forward) => {
                let got = cross_entropy::capped(trial, &points, sign)?;
                judge_tanh(trial, sign, points.iter().copied().zip(got), &mut errors);
            }
            (_, Pass::Forward) => {
                let got = softmax::capped(trial, &points, sign)?;
                judge_tanh(trial, sign, points.iter().copied().zip(got), &mut errors);
            }
            _ if !keeps_weights(trial.profile()) => return Ok(None),
            (Problem::LinearCrossEntropy(_), _) => {
                cross_entropy::slopes(trial, &points, sign, &mut errors)?;
            }
            _ => softmax::slopes(trial, &points, sign, &mut errors)?,
        }
    }
    errors.judgement()
}

fn judge_tanh(
    trial: &Trial<'_>,
    sign: f64,
    rows: impl Iterator<Item = (f64, f64)>,
    errors: &mut Errors,
) {
    for (x, got) in rows {
        // To base 2 three more roundings, and that of the result.
        let limit = tanh_limit(trial.profile(), x) + 4.0 * x.tanh();
        errors.add("tanh", sign * x, got, sign * x.tanh(), limit);
    }
}

/// (N6) Error of the tanh of a score that is exact: a reciprocal of the cap, the product with the cap, and two
/// roundings behind it.
fn tanh_limit(profile: &Profile, x: f64) -> f64 {
    let tau = x.tanh();
    3.0 * x * (1.0 - tau * tau) + profile.tanh + 2.0 * tau
}

/// Error of 1 − tanh², with the rounding of the square and of the difference.
fn slope_limit(profile: &Profile, x: f64) -> f64 {
    2.0 * x.tanh() * tanh_limit(profile, x) + 2.0
}
