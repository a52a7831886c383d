//! What becomes of the result when the values change in a known way.

use super::flaw::{Flaw, Judgement, refute};
use super::law::{ATTENTION, FIRST_ORDER, Kind, Law, SCORES};
use super::select::with_scores;
use super::tensors::{Equality, difference, exceeds, map, take};
use super::trial::Trial;
use super::visible::Visible;
use crate::cases::Case;
use crate::cases::attention::{Family, MaskKind, SequenceKind};
use crate::generate::Stream;
use crate::tensor::{Tensor, Tensors};
use crate::tier::Hints;
use etalon_problem::{Align, Axis, Dtype, Error, Mask, Pass, Scores};
use ndarray::{ArrayD, IxDyn};

pub(super) const LAWS: &[Law] = &[
    Law {
        name: "homogeneity",
        statement: "Twice v gives twice o; twice dout and dlse give twice every gradient.",
        kind: Kind::Meaning,
        of: SCORES,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| normal_range(case),
        check: homogeneity,
    },
    Law {
        name: "scale_exchange",
        statement: "Twice q with half the scale changes nothing but dq, which halves.",
        kind: Kind::Meaning,
        of: SCORES,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| normal_range(case),
        check: scale_exchange,
    },
    Law {
        name: "signs",
        statement: "Negated q and k negate dq and dk alone; negated v and dout o and dv alone.",
        kind: Kind::Meaning,
        of: SCORES,
        passes: FIRST_ORDER,
        applies: |_, _| true,
        check: signs,
    },
    Law {
        name: "key_order",
        statement: "The order of the keys changes nothing beyond the bound.",
        kind: Kind::Meaning,
        of: ATTENTION,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| {
            case.attention().is_some_and(|point| {
                point.mask == MaskKind::Full && point.sequences == SequenceKind::Dense
            })
        },
        check: key_order,
    },
    Law {
        name: "one_key",
        statement: "A row with one visible key returns its value bit by bit and its score as lse.",
        kind: Kind::Meaning,
        of: ATTENTION,
        passes: FIRST_ORDER,
        applies: |case: &Case, pass: Pass| {
            pass == Pass::Forward
                && case.problem.scores().is_some_and(|s| !s.sinks && s.extents.keys > 0)
        },
        check: one_key,
    },
    Law {
        name: "hull",
        statement: "o lies between the least and the greatest visible value of each column.",
        kind: Kind::Meaning,
        of: ATTENTION,
        passes: FIRST_ORDER,
        applies: |case: &Case, pass: Pass| pass == Pass::Forward && case.inputs.contains_key("v"),
        check: hull,
    },
];

/// Doubling is exact where nothing is subnormal and nothing overflows.
fn normal_range(case: &Case) -> bool {
    !matches!(case.family(), Some(Family::Range | Family::Large))
}

/// The larger of two margins.
pub(super) fn larger(a: Option<f64>, b: Option<f64>) -> Option<f64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.max(b)),
        (a, b) => a.or(b),
    }
}

/// Fails unless |got − expected| ≤ limit everywhere; returns the largest share of a limit.
pub(super) fn close(name: &str, got: &Tensor, expected: &Tensor, limit: &ArrayD<f64>) -> Judgement {
    let (got, expected) = (got.numbers(name)?, expected.numbers(name)?);
    let mut margin = 0f64;
    for ((index, limit), (a, b)) in limit.indexed_iter().zip(got.iter().zip(&expected)) {
        if a == b || (a.is_nan() && b.is_nan()) || *limit == f64::INFINITY {
            continue; // ∞: nothing is required here
        }
        let share = (a - b).abs() / limit;
        if exceeds(share, 1.0) {
            let at = ndarray::Dimension::slice(&index).to_vec();
            let text = format!("{name}{at:?} = {a:e}, expected {b:e} within {limit:e}");
            return Err(Flaw::Fail(text));
        }
        margin = margin.max(share);
    }
    Ok(Some(margin))
}

/// The sums over consecutive groups of heads (axis 1).
pub(super) fn sum_groups(values: &ArrayD<f64>, group: usize) -> ArrayD<f64> {
    let mut shape = values.shape().to_vec();
    shape[1] /= group;
    let mut sums = ArrayD::zeros(IxDyn(&shape));
    for (h, head) in values.axis_iter(ndarray::Axis(1)).enumerate() {
        let mut sum = sums.index_axis_mut(ndarray::Axis(1), h / group);
        sum += &head;
    }
    sums
}

/// The inputs with some of them multiplied.
pub(super) fn times(inputs: &Tensors, names: &[&str], factor: f64) -> Result<Tensors, Error> {
    let mut changed = inputs.clone();
    for name in names {
        if let Some(tensor) = inputs.get(*name) {
            changed.insert(name.to_string(), map(tensor, |_, x| factor * x)?);
        }
    }
    Ok(changed)
}

/// What the underflow of a weight or of a product may leave behind in a sum: 2⁻¹²⁶ (an arithmetic
/// that flushes to zero) times operands and lengths, with room to spare.
const UNDERFLOW: f64 = 7.888_609_052_210_118e-31; // 2⁻¹⁰⁰

/// Fails unless every output is the clean one times `factor(name)`. Where something underflows or
/// overflows on the way the product itself rounds: such elements are exempt.
pub(super) fn scaled(
    trial: &Trial<'_>,
    outputs: &Tensors,
    factor: impl Fn(&str) -> f64,
    what: &str,
) -> Result<(), Flaw> {
    for (name, tensor) in trial.clean()? {
        let dtype = tensor.dtype().unwrap_or(Dtype::F64);
        let factor = factor(name);
        let expected = map(tensor, |_, x| factor * x)?;
        let (got, exact) = (outputs[name].to_f64(name)?, expected.to_f64(name)?);
        let rounds = |x: f64| x.abs() < 4.0 * dtype.min_positive() || x.abs() > 0.25 * dtype.max();
        let counts = |at: &[usize]| {
            let (got, exact) = (got[IxDyn(at)], exact[IxDyn(at)]);
            let exempt = factor.abs() != 1.0 && rounds(got);
            !exempt && exceeds((got - exact).abs(), UNDERFLOW)
        };
        let found = difference(name, &outputs[name], &expected, Equality::Numbers, counts);
        refute(found.map(|found| format!("{what}: {found}")))?;
    }
    Ok(())
}

fn homogeneity(trial: &Trial<'_>) -> Judgement {
    let (problem, inputs) = (&trial.case.problem, &trial.case.inputs);
    if trial.pass == Pass::Forward {
        let outputs = trial.ask(problem, &times(inputs, &["v"], 2.0)?, Hints::default())?;
        scaled(trial, &outputs, |name| if name == "o" { 2.0 } else { 1.0 }, "2 v")?;
    } else {
        let doubled = times(inputs, &["dout", "dlse"], 2.0)?;
        let outputs = trial.ask(problem, &doubled, Hints::default())?;
        scaled(trial, &outputs, |_| 2.0, "2 dout, 2 dlse")?;
    }
    Ok(None)
}

fn scale_exchange(trial: &Trial<'_>) -> Judgement {
    let (problem, inputs) = (&trial.case.problem, &trial.case.inputs);
    let scores = trial.case.scores()?;
    let halved = Scores { softmax_scale: Some(0.5 * scores.scale()), ..scores.clone() };
    let problem = with_scores(problem, halved);
    let outputs = trial.ask(&problem, &times(inputs, &["q"], 2.0)?, Hints::default())?;
    scaled(trial, &outputs, |name| if name == "dq" { 0.5 } else { 1.0 }, "2 q, σ/2")?;
    Ok(None)
}

fn signs(trial: &Trial<'_>) -> Judgement {
    let (problem, inputs) = (&trial.case.problem, &trial.case.inputs);
    let outputs = trial.ask(problem, &times(inputs, &["q", "k"], -1.0)?, Hints::default())?;
    let sign = |name: &str| if matches!(name, "dq" | "dk") { -1.0 } else { 1.0 };
    scaled(trial, &outputs, sign, "−q, −k")?;
    if inputs.contains_key("v") {
        let outputs =
            trial.ask(problem, &times(inputs, &["v", "dout"], -1.0)?, Hints::default())?;
        let sign = |name: &str| if matches!(name, "o" | "dv") { -1.0 } else { 1.0 };
        scaled(trial, &outputs, sign, "−v, −dout")?;
    }
    Ok(None)
}

fn key_order(trial: &Trial<'_>) -> Judgement {
    let (problem, inputs) = (&trial.case.problem, &trial.case.inputs);
    let keys = trial.case.scores()?.extents.keys;
    // Fisher and Yates.
    let stream = Stream::new(trial.case.spec.seed, "key_order");
    let mut order: Vec<usize> = (0..keys).collect();
    (1..keys).rev().for_each(|i| order.swap(i, stream.below(i, i + 1)));
    let axis = |name: &str| problem.operand(name)?.position(Axis::Keys);
    let reorder = |(name, tensor): (&String, &Tensor)| {
        let other = axis(name).map_or_else(|| tensor.clone(), |axis| take(tensor, axis, &order));
        (name.clone(), other)
    };
    let permuted: Tensors = inputs.iter().map(reorder).collect();
    let outputs = trial.ask(problem, &permuted, Hints::default())?;
    let clean: Tensors = trial.clean()?.iter().map(reorder).collect();
    let mut margin = None;
    for (name, tensor) in &clean {
        let limit = Tensor::round(&trial.bounds()?.outputs[name].bound, Dtype::F64);
        let (_, limit) = reorder((name, &limit));
        // Two results within a bound of the same number are within two of each other.
        let limit = limit.to_f64(name)? * 2.0;
        margin = larger(margin, close(name, &outputs[name], tensor, &limit)?);
    }
    Ok(margin)
}

/// Narrows the mask to the aligned key.
fn one_key(trial: &Trial<'_>) -> Judgement {
    let (problem, inputs) = (&trial.case.problem, &trial.case.inputs);
    let mask = Mask::Window { left: Some(0), right: Some(0), align: Align::BottomRight };
    let narrow = Scores { mask, ..trial.case.scores()?.clone() };
    let visible = Visible::new(&narrow, inputs);
    let problem = with_scores(problem, narrow);
    let outputs = trial.ask(&problem, inputs, Hints::default())?;
    let bounds = trial.bounds_of(&problem, inputs)?;
    let lse = &bounds.outputs["lse"];
    let exact = Tensor::round(&lse.value, Dtype::F64);
    let margin = close("lse", &outputs["lse"], &exact, &lse.bound)?;
    let (Some(o), Some(v)) = (outputs.get("o"), inputs.get("v")) else { return Ok(margin) };
    let (o, v) = (o.to_f64("o")?, v.to_f64("v")?);
    for (index, &x) in o.indexed_iter() {
        let [b, h, i, c] = [0, 1, 2, 3].map(|axis| index[axis]);
        let row = visible.pairs.slice(ndarray::s![b, h, i, ..]);
        let expected = match row.iter().position(|seen| *seen) {
            Some(j) => v[[b, h / visible.group(), j, c]],
            None => 0.0,
        };
        if x != expected {
            let text = format!("o[{b}, {h}, {i}, {c}] = {x:e}, but its one value is {expected:e}");
            return Err(Flaw::Fail(text));
        }
    }
    Ok(margin)
}

fn hull(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    let visible = Visible::new(case.scores()?, &case.inputs);
    let (o, v) = (trial.clean()?["o"].to_f64("o")?, case.inputs["v"].to_f64("v")?);
    let bound = &trial.bounds()?.outputs["o"].bound;
    for ((index, &x), &bound) in o.indexed_iter().zip(bound) {
        let [b, h, i, c] = [0, 1, 2, 3].map(|axis| index[axis]);
        // A sink is a key with value 0.
        let sink = case.scores()?.sinks.then_some(0.0);
        let row = visible.pairs.slice(ndarray::s![b, h, i, ..]);
        let seen = row.iter().enumerate().filter(|(_, seen)| **seen);
        let seen = seen.map(|(j, _)| v[[b, h / visible.group(), j, c]]).chain(sink);
        let (low, high) = seen
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
        if low <= high && !(low - bound <= x && x <= high + bound) {
            let text = format!("o[{b}, {h}, {i}, {c}] = {x:e} outside {low:e} to {high:e}");
            return Err(Flaw::Fail(text));
        }
    }
    Ok(None)
}
