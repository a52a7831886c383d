//! Tokens of one or two classes, each token a point, and tokens with more and more equal classes.

use super::super::inputs::fill;
use super::{Errors, FACTORS, exact_exp, factor, lse_limit, narrowed, rounded_exp};
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
        "h" | "w" => element(x.name, at),
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

/// The same with the first class as target: dz of the second is its weight, and the column of w that is 0
/// and 1 makes it dh.
pub(super) fn weights(trial: &Trial<'_>, points: &[f64], errors: &mut Errors) -> Result<(), Flaw> {
    let profile = trial.profile();
    let problem = Problem::from(problem(points.len(), FACTORS + 1, 2));
    let inputs = fill(trial.case, &problem, trial.pass, |x, at| match x.name {
        "h" if at[1] < FACTORS => factor(points[at[0]], at[1]),
        "w" if at[1] < FACTORS => -(at[0] as f64),
        "w" => at[0] as f64,
        "dloss" => 1.0,
        _ => 0.0,
    });
    let dh = result(&trial.ask(&problem, &inputs)?, "dh")?;
    let behind = BEHIND + narrowed(profile, Dtype::F32);
    for (i, &x) in points.iter().enumerate() {
        let got = dh[[i, FACTORS]] * (1.0 + x.exp());
        let of_sum = exact_exp(profile, x) / (1.0 + x.exp()) + 1.0;
        let limit = rounded_exp(profile, x) + of_sum + profile.log + behind;
        errors.add("the weight of dh: e^−x · exp", -x, got, 1.0, limit);
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
