//! Random inputs of a problem that somebody brings. Where a profile rounds what is between operands and results to a
//! type of eight bits, the room of the other probes hides a gradient that is a percent too large: errors that all
//! go one way show on random inputs (gate G2), as `etalon check` finds them.
//!
//! Two questions: elements of both signs; and, for outputs that hide an error of a percent there, values and
//! cotangents of one sign, so that sums over rows and tokens (dsinks, dtau, dscale) do not cancel. Of these only the
//! slope over all elements is looked at: with one sign the roundings of P in o add up in δ, and reach a whole row of
//! dq. An output that hides the error in both is named.

use super::inputs::fill_beside;
use crate::bounds::Bound;
use crate::capabilities::LOSS;
use crate::cases::cost;
use crate::gates::{self, Measure, Part, Statistic};
use crate::generate::Stream;
use crate::laws::flaw::{Flaw, Judgement, worst};
use crate::laws::gate::judged;
use crate::laws::law::laws;
use crate::laws::trial::Trial;
use etalon_problem::{Axis, Operand, Precision, Problem};
use std::collections::BTreeMap;

laws! {
    EVERY;
    /// On random inputs results lie within their bounds, and none is too large or too small by a factor.
    Probe random_probe;
}

/// The most products of a forward pass: exact results, their bounds and simulated kernels take some forty times as
/// many of a backward pass.
const MOST: f64 = 2_147_483_648.0; // 2³¹

/// An error that is to show, relative to the result.
const ERROR: f64 = 0.01;

/// The share of [`ERROR`] that a bound may have at the most. A right result is off by no more than its bound, and one
/// that is a percent larger then by more.
const OF_BOUND: f64 = 1.0 / 2.01;

/// The same of the slope that chance allows, six standard deviations: the slope of a right kernel lies within two and
/// a half.
const OF_SLOPE: f64 = 6.0 / 8.5;

/// Signs of values and cotangents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Signs {
    Both,
    One,
}

pub(super) fn random_probe(trial: &Trial<'_>) -> Judgement {
    let products = cost(&trial.case.problem);
    if products > MOST {
        let text = format!("its exact results take {products:.1e} products: fewer rows will do");
        return Err(Flaw::NotAsked(text));
    }
    let mut shows = BTreeMap::new();
    let margin = worst([Signs::Both, Signs::One].map(|signs| one_way(trial, signs, &mut shows)))?;
    let hidden: Vec<String> = shows.into_iter().filter(|x| !x.1).map(|x| x.0).collect();
    if hidden.is_empty() {
        return Ok(margin);
    }
    Err(Flaw::NotAsked(format!(
        "that {} may be 1 % too large or too small does not show within {} on so few rows; all else holds",
        hidden.join(", "),
        trial.profile()
    )))
}

/// Judges the answer to one question, and notes of each output whether an error would show. An output that is 0
/// whatever the inputs has none.
fn one_way(trial: &Trial<'_>, signs: Signs, shows: &mut BTreeMap<String, bool>) -> Judgement {
    let (problem, seed) = (&trial.case.problem, trial.case.spec.seed);
    let element = |x: &Operand, at: &[usize]| element(problem, seed, signs, x, at);
    let inputs = fill_beside(trial.case, problem, trial.pass, &element, &element);
    let outputs = trial.ask(problem, &inputs)?;
    let exact = trial.bounds_of(problem, &inputs)?;
    let margin = judged(gates::g1(&exact, &outputs))?;
    let is_judged = |statistic: &Statistic| match signs {
        Signs::Both => true,
        Signs::One => is_slope(statistic) && shows.get(&statistic.output) == Some(&false),
    };
    let mut statistics = trial.statistics(&outputs, &inputs, &exact)?;
    statistics.retain(is_judged);
    if let Some(conspicuous) = statistics.iter().find(|statistic| statistic.margin() > 1.0) {
        return Err(Flaw::Fail(conspicuous.to_string()));
    }
    for (name, bound) in &exact.outputs {
        let integers = problem.operands(trial.pass).into_iter();
        let mut integers = integers.filter(|x| x.precision == Precision::Integer);
        let nothing = bound.value.iter().all(|x| *x == 0.0 || !x.is_finite());
        if !nothing && integers.all(|x| x.name != name) {
            let seen = shows.entry(name.clone()).or_default();
            *seen |= is_sharp(bound) || has_slope(name, &statistics);
        }
    }
    Ok(margin)
}

/// Tells whether an error of a percent takes some element out of its bound, wherever a right kernel has it.
fn is_sharp(exact: &Bound) -> bool {
    let mut elements = exact.value.iter().zip(&exact.bound).filter(|(x, _)| x.is_finite());
    elements.any(|(x, bound)| *bound < OF_BOUND * ERROR * x.abs())
}

fn is_slope(statistic: &Statistic) -> bool {
    statistic.part == Part::All && statistic.measure == Measure::Slope
}

/// Tells whether a slope of a percent is conspicuous.
fn has_slope(output: &str, statistics: &[Statistic]) -> bool {
    let slope = statistics.iter().find(|x| x.output == output && is_slope(x));
    slope.is_some_and(|slope| slope.limit < OF_SLOPE * ERROR)
}

/// An element of an operand: scores and logits have a deviation of about 1, pairs of lazy attention are active or not.
fn element(problem: &Problem, seed: u64, signs: Signs, x: &Operand, at: &[usize]) -> f64 {
    let stream = Stream::new(seed, &format!("{} of {signs:?}", x.name));
    let number = at.iter().zip(&x.shape).fold(0, |n, (&i, extent)| n * extent + i);
    let (normal, uniform) = (stream.normal(number), stream.uniform(number));
    let linear = matches!(problem, Problem::LinearAttention(_));
    match x.name {
        _ if x.precision == Precision::Integer => {
            stream.below(number, problem.extent(Axis::Classes).max(1)) as f64
        }
        "g" | "g_gamma" => -0.0625 - 0.9375 * uniform,
        "tau" => -0.125 - 0.75 * uniform,
        "sinks" | "bias" => 0.5 * normal,
        "class_weights" | "token_weights" => 0.25 + 1.5 * uniform,
        "q" | "k" | "h" | "w" if !linear => spread(problem) * normal,
        // δ has the other sign than dlse.
        "dlse" if signs == Signs::One => -0.5 - uniform,
        // A kernel need not read that of one number.
        LOSS if at.is_empty() => 1.0,
        _ if signs == Signs::One => 0.5 + uniform,
        _ => normal,
    }
}

/// The deviation of the factors of scores or logits.
fn spread(problem: &Problem) -> f64 {
    let (scale, dim) = match problem {
        Problem::LinearCrossEntropy(x) => (x.logit_scale / x.temperature, x.dim),
        _ => problem.scores().map_or((1.0, 1), |scores| (scores.scale(), scores.extents.dim)),
    };
    let of_unit = scale.abs() * (dim as f64).sqrt();
    if of_unit.is_normal() { of_unit.recip().sqrt() } else { 1.0 }
}
