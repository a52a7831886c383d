//! Tokens of one or two classes, each token a point, and tokens with more and more equal classes.

use super::super::inputs::fill;
use super::{
    BETWEEN, Errors, FACTORS, between_limit, exact_exp, factor, fractions, lse_limit, narrowed,
    rounded_exp, slope_limit, tanh_limit,
};
use crate::laws::flaw::Flaw;
use crate::laws::tensors::result;
use crate::laws::trial::Trial;
use etalon_problem::{Dtype, LinearCrossEntropy, Pass, Problem, Reduction};

/// Roundings behind a weight of a backward pass: of 1/Z, of β, of dz, of the slope and of the result.
const BEHIND: f64 = 6.0;

/// Unreduced losses of tokens over some classes, and lse.
fn problem(tokens: usize, dim: usize, classes: usize) -> LinearCrossEntropy {
    let mut problem = LinearCrossEntropy::new(tokens, dim, classes);
    (problem.reduction, problem.outputs.lse) = (Reduction::None, true);
    problem
}

/// lse of each token; its logits are h·w, element by element.
fn lse(
    trial: &Trial<'_>,
    problem: LinearCrossEntropy,
    element: impl Fn(&str, &[usize]) -> f64,
) -> Result<Vec<f64>, Flaw> {
    let problem = Problem::from(problem);
    let inputs = fill(trial.case, &problem, Pass::Forward, |x, at| match x.name {
        "h" | "w" | "bias" => element(x.name, at),
        _ => 0.0,
    });
    Ok(result(&trial.ask(&problem, &inputs)?, "lse")?.into_iter().collect())
}

/// Two classes with logits of 0 and −x: lse is ln(1 + e^−x).
pub(super) fn logarithms(
    trial: &Trial<'_>,
    points: &[f64],
    errors: &mut Errors,
) -> Result<(), Flaw> {
    let profile = trial.profile();
    let lse = lse(trial, problem(points.len(), FACTORS, 2), |name, at| match name {
        "h" => factor(points[at[0]], at[1]),
        _ => -(at[0] as f64),
    })?;
    for (&x, got) in points.iter().zip(lse) {
        let weight = (-x).exp();
        let of_sum = exact_exp(profile, x) * weight / (1.0 + weight) + 1.0;
        let limit = lse_limit(profile, 0.0, 1.0 + weight, of_sum);
        errors.add("ln(1 + e^−x)", x, got, weight.ln_1p(), limit);
    }
    Ok(())
}

/// Classes from one to the other, more than a tile has.
const APART: usize = 512;

/// Two classes in tiles of their own, with logits of 0 and ∓x: the others have a bias of −∞.
pub(super) fn logarithms_of_tiles(
    trial: &Trial<'_>,
    points: &[f64],
    errors: &mut Errors,
) -> Result<(), Flaw> {
    let profile = trial.profile();
    for sign in [-1.0, 1.0] {
        let mut problem = problem(points.len(), FACTORS, APART + 1);
        problem.bias = true;
        let lse = lse(trial, problem, |name, at| match name {
            "h" => factor(points[at[0]], at[1]),
            "w" => sign * f64::from(u8::from(at[0] == APART)),
            _ if at[0] == 0 || at[0] == APART => 0.0,
            _ => f64::NEG_INFINITY,
        })?;
        for (&x, got) in points.iter().zip(lse) {
            let (m, weight) = (sign.max(0.0) * x, (-x).exp());
            let of_sum = exact_exp(profile, x) * weight / (1.0 + weight) + 3.0;
            let limit = lse_limit(profile, m, 1.0 + weight, of_sum);
            errors.add("ln(1 + e^x) of two tiles", sign * x, got, m + weight.ln_1p(), limit);
        }
    }
    Ok(())
}

/// The same in one tile, with the first class as target: dz of the second is its weight p, and the column of w
/// that is 0 and 1 makes it dh; dz of the first is −p, in a column of its own.
pub(super) fn weights(trial: &Trial<'_>, points: &[f64], errors: &mut Errors) -> Result<(), Flaw> {
    let profile = trial.profile();
    let problem = Problem::from(problem(points.len(), FACTORS + 2, 2));
    let behind = BEHIND + narrowed(profile, Dtype::F32);
    for sign in [-1.0, 1.0] {
        let inputs = fill(trial.case, &problem, trial.pass, |x, at| match x.name {
            "h" if at[1] < FACTORS => factor(points[at[0]], at[1]),
            "w" if at[1] < FACTORS => sign * at[0] as f64,
            "w" => f64::from(u8::from(at[0] == FACTORS + 1 - at[1])),
            "dloss" => 1.0,
            _ => 0.0,
        });
        let dh = result(&trial.ask(&problem, &inputs)?, "dh")?;
        for (i, &x) in points.iter().enumerate() {
            let (size, weight) = (1.0 + (-sign * x).exp(), (-x).exp());
            let of_sum = exact_exp(profile, x) * weight / (1.0 + weight) + 1.0;
            // A weight may be that of a stored lse, beside a maximum of 0 or of x.
            let of_lse = lse_limit(profile, sign.max(0.0) * x, 1.0 + weight, of_sum);
            let own = if sign < 0.0 { x } else { 1.0 };
            let limit = rounded_exp(profile, own) + of_lse + behind;
            errors.add(
                "the weight of dh: e^x · exp",
                sign * x,
                dh[[i, FACTORS]] * size,
                1.0,
                limit,
            );
            // p − 1 of a target errs by what its logarithm does, and that by its own roundings.
            let of_logarithm = of_lse + 2.0 * own;
            let limit = of_logarithm + (rounded_exp(profile, own) + behind) / size;
            errors.add(
                "p − 1 of a target below",
                sign * x,
                dh[[i, FACTORS + 1]],
                -1.0 / size,
                limit,
            );
        }
    }
    Ok(())
}

/// dz of the second class is p times the slope of the softcap, 1; the column of w that is 0 and 1 makes it dh.
pub(super) fn slopes(
    trial: &Trial<'_>,
    points: &[f64],
    sign: f64,
    errors: &mut Errors,
) -> Result<(), Flaw> {
    let profile = trial.profile();
    let mut problem = problem(points.len(), FACTORS + 1, 2);
    problem.softcap = Some(1.0);
    let problem = Problem::from(problem);
    let inputs = fill(trial.case, &problem, trial.pass, |x, at| match x.name {
        "h" if at[1] < FACTORS => factor(points[at[0]], at[1]),
        "w" if at[1] < FACTORS => sign * at[0] as f64,
        "w" => at[0] as f64,
        "dloss" => 1.0,
        _ => 0.0,
    });
    let dh = result(&trial.ask(&problem, &inputs)?, "dh")?;
    for (i, &x) in points.iter().enumerate() {
        let (logit, slope) = (sign * x.tanh(), 1.0 - x.tanh() * x.tanh());
        let p = 1.0 / (1.0 + (-logit).exp());
        // (N6) of the logit; p may be that of a stored lse.
        let of_lse = lse_limit(profile, 1.0, 2.0, rounded_exp(profile, 2.0));
        let weight = tanh_limit(profile, x) + rounded_exp(profile, 2.0) + of_lse;
        let behind = BEHIND + narrowed(profile, Dtype::F32);
        let limit = p * (slope_limit(profile, x) + slope * (weight + behind));
        errors.add("p times the slope of tanh", sign * x, dh[[i, FACTORS]], p * slope, limit);
    }
    Ok(())
}

/// The logit of a class that a token does not have: its weight is 0 in f32.
const AWAY: f64 = -200.0;

/// lse and logprob of tokens with n classes of logit 0 and one of logit −x.
pub(super) fn between(trial: &Trial<'_>, errors: &mut Errors) -> Result<(), Flaw> {
    let rows = fractions(trial);
    let mut problem = problem(rows.len(), FACTORS + BETWEEN, BETWEEN + 1);
    problem.outputs.logprob = true;
    let problem = Problem::from(problem);
    // Each class but the first, which has the fraction, has a column that takes it away.
    let inputs = fill(trial.case, &problem, Pass::Forward, |x, at| match x.name {
        "h" if at[1] < FACTORS => factor(rows[at[0]].1, at[1]),
        "h" if at[1] - FACTORS >= rows[at[0]].0 => AWAY,
        "w" if at[1] < FACTORS => -f64::from(u8::from(at[0] == 0)),
        "w" => f64::from(u8::from(at[0] == at[1] - FACTORS + 1)),
        "targets" => 1.0,
        _ => 0.0,
    });
    let outputs = trial.ask(&problem, &inputs)?;
    for (name, sign) in [("lse", 1.0), ("logprob", -1.0)] {
        let got = result(&outputs, name)?;
        for (&(n, x), got) in rows.iter().zip(got) {
            let l = n as f64 + (-x).exp();
            let limit = between_limit(trial.profile(), n, x);
            errors.add(&format!("{name}: ln"), l, got, sign * l.ln(), limit);
        }
    }
    Ok(())
}

/// The most equal classes of which every number is tried; beyond, each is an eighth more than the one before.
const EVERY: usize = 40;

/// As many classes at the most, and as many tokens each time.
const CLASSES: usize = 5000;
const TOKENS: usize = 3;

/// lse of tokens with 1, 2, … classes of this logit.
pub(super) fn equal(trial: &Trial<'_>, logit: f64) -> Result<Vec<(f64, f64)>, Flaw> {
    let (mut found, mut classes) = (Vec::new(), 1);
    while classes <= CLASSES {
        let element = |name: &str, _: &[usize]| if name == "h" { logit } else { 1.0 };
        let lse = lse(trial, problem(TOKENS, 1, classes), element)?;
        found.extend(lse.into_iter().map(|lse| (classes as f64, lse)));
        classes += (classes / 8).max(1).min(if classes < EVERY { 1 } else { CLASSES });
    }
    Ok(found)
}

/// lse of tokens of one class with a softcap of 1.
pub(super) fn capped(trial: &Trial<'_>, points: &[f64], sign: f64) -> Result<Vec<f64>, Flaw> {
    let mut problem = problem(points.len(), FACTORS, 1);
    problem.softcap = Some(1.0);
    lse(trial, problem, |name, at| if name == "h" { factor(points[at[0]], at[1]) } else { sign })
}
