//! Probes of exp, ln and tanh in the rows of a problem that somebody brings: its mask, its heads, its D and its scale
//! stay as they are, and every row is a point of the function. The probes of `functions` have problems of their own,
//! which a kernel need not take.
//!
//! ln: with q = 0 a row that sees n keys has lse = ln n. exp: two keys of a row count, of scores 0 and ∓x; the others
//! have scores so low that their weights are 0. Of one-hot values o is 1/(1 + e^−x) and e^−x/(1 + e^−x). tanh: all
//! keys are equal, so that lse is c·tanh(s/c) + ln n. Scores are what q, as it is stored, and σ make of them in f64; a
//! kernel rounds σ and the product.

use super::functions::{Errors, keeps_weights, narrowed, rounded_exp};
use super::inputs::{fill, is_dyadic, skeleton, value_columns};
use crate::laws::flaw::{Flaw, Judgement, worst};
use crate::laws::law::laws;
use crate::laws::tensors::result;
use crate::laws::trial::Trial;
use crate::laws::visible::Visible;
use crate::tensor::Tensors;
use etalon_problem::{Dtype, Pass, Problem, Scores};
use std::collections::BTreeMap;

laws! {
    ATTENTION;
    /// In the rows of the problem the exponential is as exact as declared.
    Probe exp_of_rows on Forward;
    /// In the rows of the problem the logarithm is as exact as declared.
    Probe log_of_rows on Forward;
    /// In the rows of the problem the hyperbolic tangent is as exact as declared.
    Probe tanh_of_rows on Forward;
}

/// Roundings behind a weight that do not cancel in the quotient of two elements of o: of each, a product
/// with a rounded reciprocal and the rounding of the result, and of one a rescale.
const BEHIND: f64 = 6.0;

/// From 0 to 2 in steps of 1/256; then, as far as e^−x is a normal number of f32, in steps of 1/16.
fn points() -> Vec<f64> {
    let near = (1..=512).map(|i| f64::from(i) / 256.0);
    near.chain((1..=1248).map(|i| 2.0 + f64::from(i) / 16.0)).collect()
}

/// A row: batch element, query head, query.
type Row = [usize; 3];

fn not_asked(reason: impl Into<String>) -> Flaw {
    Flaw::NotAsked(reason.into())
}

/// The lse of every row; where the kernel returns none, there is nothing to look at.
fn with_lse(trial: &Trial<'_>) -> Result<(Problem, Scores), Flaw> {
    match trial.tier.returns("lse") {
        true => Ok(skeleton(trial.case)?),
        false => Err(not_asked("lse is not returned")),
    }
}

/// Roundings of a score whose σ is rounded, as is the product with it, and that of a rescaled q: relative to its size.
fn scaled(sigma: f64) -> f64 {
    if is_dyadic(sigma) { 0.0 } else { 3.0 }
}

pub(super) fn log_of_rows(trial: &Trial<'_>) -> Judgement {
    let (problem, scores) = with_lse(trial)?;
    let inputs = fill(trial.case, &problem, Pass::Forward, |x, at| match x.name {
        "q" => 0.0,
        "k" => (at[2] % 7) as f64,
        _ => 1.0,
    });
    let counts = Visible::new(&scores, &inputs).counts();
    let lse = result(&trial.ask(&problem, &inputs)?, "lse")?;
    let mut errors = Errors::of(trial.profile().accumulator);
    let rows = counts.indexed_iter().filter(|(_, n)| **n > 0);
    for ((b, h, i), &n) in rows {
        let n = n as f64;
        // To base 2 a product with ln 2, which is rounded; and the result is.
        let limit = trial.profile().log * n.ln().max(1.0) + 3.0 * n.ln();
        errors.add("ln", n, lse[[b, h, i]], n.ln(), limit.max(1.0));
    }
    errors.judgement()
}

pub(super) fn tanh_of_rows(trial: &Trial<'_>) -> Judgement {
    let (problem, scores) = with_lse(trial)?;
    let (sigma, case) = (scores.scale(), trial.case);
    let Some(cap) = scores.softcap else { return Err(not_asked("the problem has no softcap")) };
    if trial.profile().score_store != trial.profile().accumulator {
        return Err(not_asked("the profile rounds scores, which hides what tanh errs by"));
    }
    let extents = scores.extents;
    let number = |[b, h, i]: Row| (b * extents.query_heads + h) * extents.queries + i;
    // s/c from −4 to 4, in an order in which neighbours differ.
    let point = |row: Row| f64::from((number(row) * 389 % 1025) as i32 - 512) / 128.0;
    let q = |row: Row| case.dtype.round(point(row) * cap / sigma);
    let inputs = fill(case, &problem, Pass::Forward, |x, at| match x.name {
        "q" if at[3] == 0 => q([at[0], at[1], at[2]]),
        "k" if at[3] == 0 => 1.0,
        "q" | "k" => 0.0,
        _ => 1.0,
    });
    let counts = Visible::new(&scores, &inputs).counts();
    let lse = result(&trial.ask(&problem, &inputs)?, "lse")?;
    let mut errors = Errors::of(trial.profile().accumulator);
    for ((b, h, i), &n) in counts.indexed_iter().filter(|(_, n)| **n > 0) {
        let (s, n) = (sigma * q([b, h, i]), n as f64);
        let tau = (s / cap).tanh();
        let exact = cap * tau + n.ln();
        // (N6): a reciprocal of the cap and σ in the argument, the product with the cap; then ln n, a sum of n ones
        // that are e⁰, and the result; to base 2 three more roundings.
        let argument = (3.0 + scaled(sigma)) * s.abs() * (1.0 - tau * tau);
        let function = cap * (trial.profile().tanh + 6.0 * tau.abs());
        let log = trial.profile().log * n.ln().max(1.0) + 3.0 * n.ln();
        let product = 2.0 * trial.profile().factor / Dtype::F32.unit_roundoff() * s.abs();
        let limit = argument + function + log + product + 2.0 * exact.abs();
        errors.add("c·tanh(x) + ln n, tanh", s / cap, lse[[b, h, i]], exact, limit);
    }
    errors.judgement()
}

/// The score of a key that does not count is this far below 0: e to it is 0 in f32.
const FAR: f64 = 1000.0;

pub(super) fn exp_of_rows(trial: &Trial<'_>) -> Judgement {
    let (problem, scores) = skeleton(trial.case)?;
    let profile = trial.profile();
    let wide = |x: Dtype| x == profile.accumulator;
    let keeps = wide(profile.score_store) && wide(profile.weight_store) && keeps_weights(profile);
    if !keeps || trial.case.dtype != Dtype::F32 {
        let text = "scores, weights or results are stored in another type than f32, whose rounding hides what exp errs by";
        return Err(not_asked(text));
    }
    if value_columns(&problem) < 2 || scores.extents.dim < 2 || !trial.tier.returns("o") {
        return Err(not_asked("it needs o, and two columns of q and of v"));
    }
    if scores.softcap.is_some() {
        return Err(not_asked("a softcap bends the scores"));
    }
    let pairs = Pairs::of(&scores)?;
    // The first key has the larger score, then the second.
    worst([[-1.0, 0.0, 1.0], [1.0, 1.0, 0.0]].map(|way| pairs.one_way(trial, &problem, way)))
}

/// Two keys in every so many count, such that most rows see one pair of them.
struct Pairs {
    scores: Scores,
    period: usize,
    /// The rows that see one pair, with the point that each asks for, −x.
    rows: BTreeMap<Row, f64>,
}

impl Pairs {
    fn of(scores: &Scores) -> Result<Self, Flaw> {
        let visible = Visible::new(scores, &Tensors::new());
        let extents = scores.extents;
        let counts = visible.counts();
        let all: Vec<Row> = counts.indexed_iter().map(|((b, h, i), _)| [b, h, i]).collect();
        let mut best: (usize, Vec<Row>) = (2, Vec::new());
        let periods = (1..).map(|power| 1usize << power);
        for period in periods.take_while(|period| period / 2 < extents.keys.max(2)) {
            let sees_a_pair = |row: &Row| {
                let live: Vec<usize> = visible.keys(*row).filter(|j| j % period < 2).collect();
                matches!(live[..], [first, second] if first % period == 0 && second == first + 1)
            };
            let rows: Vec<Row> = all.iter().copied().filter(sees_a_pair).collect();
            if rows.len() > best.1.len() {
                best = (period, rows);
            }
        }
        let (period, rows) = best;
        if rows.is_empty() {
            return Err(not_asked("no row sees two neighbouring keys"));
        }
        let points = points();
        let step = (points.len() / rows.len()).max(1);
        let point = |(at, row): (usize, Row)| (row, points[at * step % points.len()]);
        let rows = rows.into_iter().enumerate().map(point).collect();
        Ok(Pairs { scores: scores.clone(), period, rows })
    }

    fn one_way(
        &self,
        trial: &Trial<'_>,
        problem: &Problem,
        [sign, first, second]: [f64; 3],
    ) -> Judgement {
        let Pairs { scores, period, rows } = self;
        let (sigma, case) = (scores.scale(), trial.case);
        let q = |row: Row| case.dtype.round(rows.get(&row).map_or(0.0, |x| sign * x / sigma));
        let inputs = fill(case, problem, Pass::Forward, |x, at| match (x.name, at[at.len() - 1]) {
            ("q", 0) => q([at[0], at[1], at[2]]),
            ("q", 1) => -sigma.signum(),
            ("k", 0) => [first, second].get(at[2] % period).copied().unwrap_or(0.0),
            // A power of two: the score is exact, whatever σ is.
            ("k", 1) if at[2] % period > 1 => 2f64.powf((FAR / sigma.abs()).log2().ceil()),
            ("v", column) => f64::from(u8::from(at[2] % period == column)),
            _ => 0.0,
        });
        let o = result(&trial.ask(problem, &inputs)?, "o")?;
        let mut errors = Errors::of(Dtype::F32);
        let behind = BEHIND + narrowed(trial.profile(), Dtype::F32);
        for &[b, h, i] in rows.keys() {
            let x = (sigma * q([b, h, i])).abs();
            let got = o[[b, h, i, 1]] / o[[b, h, i, 0]] * x.exp();
            let factors = (scaled(sigma) + narrowed(trial.profile(), Dtype::F32)) * x;
            let limit = rounded_exp(trial.profile(), x) + factors + behind;
            errors.add("e^−x · exp", -x, got, 1.0, limit);
        }
        errors.judgement()
    }
}
