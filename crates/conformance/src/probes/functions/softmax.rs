//! Rows of one or two keys, each row a point, and rows that see more and more equal keys.

use super::super::inputs::{fill, fill_beside};
use super::{
    BETWEEN, Errors, FACTORS, KEYS, between_limit, exact_exp, factor, fractions, lost, lse_limit,
    narrowed, rounded_exp, slope_limit, tanh_limit,
};
use crate::cases::Case;
use crate::laws::flaw::Flaw;
use crate::laws::tensors::result;
use crate::laws::trial::Trial;
use etalon_problem::{
    Algorithm, Attention, AttentionLse, Dtype, Extents, LazyAttention, Mask, NamedArray, Pass,
    Problem, Scores,
};

/// Roundings behind a weight: of each element of o a product with a rounded reciprocal and the rounding of
/// the result, of their quotient twice as many; and of one a rescale.
const BEHIND: f64 = 6.0;

/// Scores of one head of one batch element, with a scale of 1.
fn scores(queries: usize, keys: usize, dim: usize) -> Scores {
    let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries, keys, dim };
    let mut scores = Scores::new(extents);
    scores.softmax_scale = Some(1.0);
    scores
}

/// The algorithm of the case with these scores, and values of as many elements.
fn problem(case: &Case, scores: Scores, value_dim: usize) -> Problem {
    match case.problem {
        Problem::AttentionLse(_) => AttentionLse { scores }.into(),
        Problem::LazyAttention(_) => LazyAttention { scores, bias: None, value_dim }.into(),
        _ => Attention { scores, value_dim }.into(),
    }
}

/// The scores of a point x: with the larger first, so that no maximum grows.
#[derive(Clone, Copy)]
struct Two {
    /// Of the first and of the second key, in units of x.
    of: [f64; 2],
}

const TWO: [Two; 2] = [Two { of: [0.0, -1.0] }, Two { of: [1.0, 0.0] }];

impl Two {
    /// An element of a key; behind its factors 1 for the second alone.
    fn key(self, at: &[usize]) -> f64 {
        if at[3] < FACTORS { self.of[at[2]] } else { at[2] as f64 }
    }
}

pub(super) fn weights(trial: &Trial<'_>, points: &[f64], errors: &mut Errors) -> Result<(), Flaw> {
    let profile = trial.profile();
    for two in TWO {
        let problem = problem(trial.case, scores(points.len(), 2, FACTORS), 2);
        let inputs = fill(trial.case, &problem, Pass::Forward, |x, at| match x.name {
            "q" => factor(points[at[2]], at[3]),
            "k" => two.key(at),
            "v" => f64::from(u8::from(at[2] == at[3])),
            _ => 0.0, // τ, with which lazy attention weighs as attention does
        });
        let outputs = trial.ask(&problem, &inputs)?;
        let lse = result(&outputs, "lse")?;
        for (&x, &got) in points.iter().zip(&lse) {
            let (m, weight) = (two.of[0] * x, (-x).exp());
            let l = 1.0 + weight;
            let of_sum = exact_exp(profile, x) * weight / l + 1.0;
            let exact = m + weight.ln_1p();
            errors.add("ln(1 + e^−x) beside m: ", x, got, exact, lse_limit(profile, m, l, of_sum));
        }
        let Some(o) = outputs.get("o") else { continue };
        let o = o.to_f64("o")?;
        let behind = BEHIND + narrowed(profile, Dtype::F32);
        // The weights of lazy attention are made of a stored lse, whose rounding all of a row share.
        let normalised = trial.case.spec.algorithm != Algorithm::LazyAttention;
        for (i, &x) in points.iter().enumerate() {
            let (got, size) = ([o[[0, 0, i, 0]], o[[0, 0, i, 1]]], x.exp());
            let own = exact_exp(profile, x);
            let behind = behind + lost(profile, 1.0 / size);
            errors.add("e^−x · exp", -x, got[1] / got[0] * size, 1.0, own + behind);
            // The error of the sum of the weights is in both.
            let shares = [1.0 / (1.0 + (-x).exp()), 1.0 / (1.0 + size)];
            let limit = |other: f64| own * other + behind;
            if normalised {
                errors.add("sigmoid", x, got[0] / shares[0], 1.0, limit(shares[1]));
                errors.add("sigmoid", -x, got[1] / shares[1], 1.0, limit(shares[0]));
            }
        }
    }
    Ok(())
}

/// One key of score x or −x, and a sink of 0.
pub(super) fn weights_of_sinks(
    trial: &Trial<'_>,
    points: &[f64],
    errors: &mut Errors,
) -> Result<(), Flaw> {
    let profile = trial.profile();
    for sign in [-1.0, 1.0] {
        let mut scores = scores(points.len(), 1, FACTORS);
        scores.sinks = true;
        let problem = problem(trial.case, scores, 1);
        let inputs =
            fill_beside(trial.case, &problem, Pass::Forward, &|_, _| 0.0, &|x, at| match x.name {
                "q" => factor(points[at[2]], at[3]),
                "k" => sign,
                "v" => 1.0,
                _ => 0.0,
            });
        let outputs = trial.ask(&problem, &inputs)?;
        let lse = result(&outputs, "lse")?;
        let o = outputs.get("o").map(|o| o.to_f64("o")).transpose()?;
        for (i, (&x, &got)) in points.iter().zip(&lse).enumerate() {
            let (m, weight) = (sign.max(0.0) * x, (-x).exp());
            let l = 1.0 + weight;
            let of_sum = exact_exp(profile, x) * weight / l + 1.0;
            let (what, exact) = ("with a sink of 0, lse of a score of", m + weight.ln_1p());
            errors.add(what, sign * x, got, exact, lse_limit(profile, m, l, of_sum));
            let Some(o) = &o else { continue };
            let exact = 1.0 / (1.0 + (-sign * x).exp());
            // The weight of the key itself is an exponential where the sink is larger.
            let own = if sign < 0.0 { exact_exp(profile, x) } else { 0.0 };
            let behind = BEHIND + narrowed(profile, Dtype::F32) + lost(profile, exact);
            let limit = own + exact_exp(profile, x) * (1.0 - exact) + of_sum + behind;
            let got = o[[0, 0, i, 0]] / exact;
            errors.add("with a sink of 0, the sigmoid", sign * x, got, 1.0, limit);
        }
    }
    Ok(())
}

/// Keys from one to the other, more than a tile has.
const APART: usize = 256;

/// A key of score 0 and one of score x that lies in another tile: what the first has is rescaled by e^−x. The keys
/// between them belong to another segment.
pub(super) fn weights_that_grow(
    trial: &Trial<'_>,
    points: &[f64],
    errors: &mut Errors,
) -> Result<(), Flaw> {
    let profile = trial.profile();
    let mut scores = scores(points.len(), APART + 1, FACTORS);
    let ids = |name: &str, count: usize, id: fn(usize) -> i64| {
        NamedArray::new(name, &[1, count], (0..count).map(id).collect::<Vec<_>>())
    };
    let key = ids("key_ids", APART + 1, |key| i64::from(key != 0 && key != APART));
    scores.mask = Mask::Segments { query: ids("query_ids", points.len(), |_| 0), key };
    let problem = problem(trial.case, scores, 2);
    let inputs = fill(trial.case, &problem, Pass::Forward, |x, at| match x.name {
        "q" => factor(points[at[2]], at[3]),
        "k" => f64::from(u8::from(at[2] == APART)),
        "v" => f64::from(u8::from(at[2] == APART * at[3])),
        _ => 0.0,
    });
    let outputs = trial.ask(&problem, &inputs)?;
    let lse = result(&outputs, "lse")?;
    let o = outputs.get("o").map(|o| o.to_f64("o")).transpose()?;
    for (i, (&x, &got)) in points.iter().zip(&lse).enumerate() {
        let weight = (-x).exp();
        let l = 1.0 + weight;
        let of_sum = exact_exp(profile, x) * weight / l + 3.0;
        let (what, exact) = ("x + ln(1 + e^−x), the larger score last", x + weight.ln_1p());
        errors.add(what, x, got, exact, lse_limit(profile, x, l, of_sum));
        let Some(o) = &o else { continue };
        // Each is e^(s − m) of an m that is not the last, times a factor.
        let behind = BEHIND + narrowed(profile, Dtype::F32) + lost(profile, weight);
        let limit = 2.0 * exact_exp(profile, x) + behind + 4.0;
        let got = o[[0, 0, i, 0]] / o[[0, 0, i, 1]] / weight;
        errors.add("e^−x · exp, the larger score last", -x, got, 1.0, limit);
    }
    Ok(())
}

/// Roundings behind a weight of a backward pass: of dP − δ, of its product with the weight, of the scale and
/// of the result.
const BEHIND_AGAIN: f64 = 6.0;

/// With a cotangent of 1 of lse alone, dS is P: the column of the keys that is 0 and 1 makes it dq.
pub(super) fn weights_again(
    trial: &Trial<'_>,
    points: &[f64],
    errors: &mut Errors,
) -> Result<(), Flaw> {
    let profile = trial.profile();
    let behind = BEHIND_AGAIN + narrowed(profile, Dtype::F32);
    for two in TWO {
        let problem = problem(trial.case, scores(points.len(), 2, FACTORS + 1), 1);
        let inputs = fill(trial.case, &problem, trial.pass, |x, at| match x.name {
            "q" if at[3] < FACTORS => factor(points[at[2]], at[3]),
            "k" => two.key(at),
            "dlse" => 1.0,
            _ => 0.0,
        });
        let dq = result(&trial.ask(&problem, &inputs)?, "dq")?;
        for (i, &x) in points.iter().enumerate() {
            let weight = (-x).exp();
            // Distance of the second score below lse, which is stored before.
            let below = x + weight.ln_1p();
            let of_sum = exact_exp(profile, x) * weight / (1.0 + weight) + 1.0;
            let of_lse = lse_limit(profile, two.of[0] * x, 1.0 + weight, of_sum);
            let got = dq[[0, 0, i, FACTORS]] * below.exp();
            let behind = behind + lost(profile, weight);
            let limit = rounded_exp(profile, below) + of_lse + behind;
            errors.add("the weight of dq: e^−x · exp", -x, got, 1.0, limit);
        }
    }
    Ok(())
}

/// lse of rows that see 1, 2, … keys with this score.
pub(super) fn equal(trial: &Trial<'_>, score: f64) -> Result<Vec<(f64, f64)>, Flaw> {
    let keys = if trial.tier.is_slow() { KEYS / 8 } else { KEYS };
    let mut scores = scores(keys, keys, 1);
    scores.mask = Mask::causal();
    let lse = lse(trial, scores, |name, _| if name == "q" { score } else { 1.0 })?;
    Ok(lse.into_iter().enumerate().map(|(i, lse)| ((i + 1) as f64, lse)).collect())
}

/// lse of rows that see n keys of score 0 and one of score −x.
pub(super) fn between(trial: &Trial<'_>, errors: &mut Errors) -> Result<(), Flaw> {
    let rows = fractions(trial);
    let mut scores = scores(rows.len(), BETWEEN + 1, FACTORS);
    let seen = rows.iter().flat_map(|&(n, _)| (0..=BETWEEN).map(move |key| key <= n));
    let shape = [1, 1, rows.len(), BETWEEN + 1];
    scores.mask = Mask::Array(NamedArray::new("seen", &shape, seen.collect::<Vec<_>>()));
    let lse = lse(trial, scores, |name, at| match name {
        "q" => factor(rows[at[2]].1, at[3]),
        _ => -f64::from(u8::from(at[2] == 0)),
    })?;
    for (&(n, x), got) in rows.iter().zip(lse) {
        let l = n as f64 + (-x).exp();
        errors.add("ln", l, got, l.ln(), between_limit(trial.profile(), n, x));
    }
    Ok(())
}

/// dq of rows of one key with a softcap of 1 and a cotangent of lse: the slope of the cap.
pub(super) fn slopes(
    trial: &Trial<'_>,
    points: &[f64],
    sign: f64,
    errors: &mut Errors,
) -> Result<(), Flaw> {
    let profile = trial.profile();
    let mut scores = scores(points.len(), 1, FACTORS + 1);
    scores.softcap = Some(1.0);
    let problem = problem(trial.case, scores, 1);
    let inputs = fill(trial.case, &problem, trial.pass, |x, at| match x.name {
        "q" if at[3] < FACTORS => factor(points[at[2]], at[3]),
        "k" if at[3] < FACTORS => sign,
        "k" | "dlse" => 1.0,
        _ => 0.0,
    });
    let dq = result(&trial.ask(&problem, &inputs)?, "dq")?;
    for (i, &x) in points.iter().enumerate() {
        let slope = 1.0 - x.tanh() * x.tanh();
        // P is e^(S − lse), of which both err.
        let of_lse = lse_limit(profile, x.tanh(), 1.0, 0.0);
        let weight = 2.0 * tanh_limit(profile, x) + of_lse + rounded_exp(profile, 0.0);
        let behind = BEHIND_AGAIN + narrowed(profile, Dtype::F32);
        let limit = slope_limit(profile, x) + slope * (weight + behind);
        errors.add("the slope of tanh", sign * x, dq[[0, 0, i, FACTORS]], slope, limit);
    }
    Ok(())
}

/// lse of rows of one key with a softcap of 1.
pub(super) fn capped(trial: &Trial<'_>, points: &[f64], sign: f64) -> Result<Vec<f64>, Flaw> {
    let mut scores = scores(points.len(), 1, FACTORS);
    scores.softcap = Some(1.0);
    let row = |name: &str, at: &[usize]| match name {
        "q" => factor(points[at[2]], at[3]),
        _ => sign,
    };
    lse(trial, scores, row)
}

/// lse of every row; every value is 0.
fn lse(
    trial: &Trial<'_>,
    scores: Scores,
    element: impl Fn(&str, &[usize]) -> f64,
) -> Result<Vec<f64>, Flaw> {
    let problem = problem(trial.case, scores, 1);
    let inputs = fill(trial.case, &problem, Pass::Forward, |x, at| match x.name {
        "q" | "k" => element(x.name, at),
        _ => 0.0,
    });
    Ok(result(&trial.ask(&problem, &inputs)?, "lse")?.into_iter().collect())
}
