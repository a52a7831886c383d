//! Changes of the values that change the result in a known way.

use super::compare::{Strict, TWICE, agree, close, exchange};
use super::flaw::{Flaw, Judgement, worst};
use super::identities::has_v;
use super::law::{laws, scores_are};
use super::part::{Part, with_scores};
use super::tensors::{each_element, everywhere, result};
use super::trial::Trial;
use super::visible::Visible;
use crate::bounds::Bound;
use crate::cases::Case;
use crate::cases::attention::{Family, MaskKind, SequenceKind};
use crate::generate::Stream;
use etalon_problem::{Align, Axis, Dtype, Mask, Pass, Scores};
use ndarray::{ArrayD, Dimension, IxDyn};

laws! {
    SCORES;
    /// Twice v gives twice o; twice dout and dlse give twice every gradient.
    Meaning homogeneity(Strict::Bound) if |case, _| normal_range(case);
    /// Twice q with half the scale changes nothing but dq, which halves.
    Meaning scale_exchange(Strict::Bound) if |case, _| normal_range(case);
    /// Negated q and k negate dq and dk alone; negated v and dout o and dv alone.
    Meaning signs(Strict::Bound);
    /// Factors of two, and signs, are exact: they change no bit but those of the factor.
    Contract exact_factors;
    /// The order of the keys changes nothing beyond the bound.
    Meaning key_order of ATTENTION if |case, _| {
        case.attention().is_some_and(|point| {
            point.mask == MaskKind::Full && point.sequences == SequenceKind::Dense
        })
    };
    /// A row with one visible key returns its value, and its score as lse.
    Meaning one_key of ATTENTION on Forward
        if |case, _| scores_are(case, |s| !s.sinks && s.extents.keys > 0);
    /// o lies between the least and the greatest visible value of each column.
    Meaning hull of ATTENTION on Forward if |case, _| has_v(case);
}

/// Doubling is exact where nothing is subnormal and nothing overflows.
fn normal_range(case: &Case) -> bool {
    !matches!(case.family(), Some(Family::Range | Family::Large))
}

fn exact_factors(trial: &Trial<'_>) -> Judgement {
    if normal_range(trial.case) {
        // Small numbers of dS that is stored in f16 are subnormal: twice of one is not twice what is stored.
        if trial.pass == Pass::Forward || trial.profile().ds_store != Dtype::F16 {
            homogeneity(trial, Strict::Bits)?;
        }
        scale_exchange(trial, Strict::Bits)?;
    }
    signs(trial, Strict::Bits)
}

fn homogeneity(trial: &Trial<'_>, strict: Strict) -> Judgement {
    let problem = &trial.case.problem;
    if trial.pass == Pass::Forward {
        let factor = |name: &str| if name == "o" { 2.0 } else { 1.0 };
        return exchange(trial, strict, problem, &[("v", 2.0)], &factor, "2 v");
    }
    let inputs = [("dout", 2.0), ("dlse", 2.0)];
    exchange(trial, strict, problem, &inputs, &|_| 2.0, "2 dout, 2 dlse")
}

fn scale_exchange(trial: &Trial<'_>, strict: Strict) -> Judgement {
    let scores = trial.case.scores()?;
    let halved = Scores { softmax_scale: Some(0.5 * scores.scale()), ..scores.clone() };
    let problem = with_scores(&trial.case.problem, halved);
    let factor = |name: &str| if name == "dq" { 0.5 } else { 1.0 };
    exchange(trial, strict, &problem, &[("q", 2.0)], &factor, "2 q, σ/2")
}

fn signs(trial: &Trial<'_>, strict: Strict) -> Judgement {
    let problem = &trial.case.problem;
    let sign = |name: &str| if matches!(name, "dq" | "dk") { -1.0 } else { 1.0 };
    let inputs = [("q", -1.0), ("k", -1.0)];
    let of_scores = exchange(trial, strict, problem, &inputs, &sign, "−q, −k");
    if !trial.case.inputs.contains_key("v") {
        return of_scores;
    }
    let sign = |name: &str| if matches!(name, "o" | "dv") { -1.0 } else { 1.0 };
    let inputs = [("v", -1.0), ("dout", -1.0)];
    worst([of_scores, exchange(trial, strict, problem, &inputs, &sign, "−v, −dout")])
}

fn key_order(trial: &Trial<'_>) -> Judgement {
    let problem = &trial.case.problem;
    let keys = trial.case.scores()?.extents.keys;
    // Fisher and Yates.
    let stream = Stream::new(trial.case.spec.seed, "key_order");
    let mut order: Vec<usize> = (0..keys).collect();
    (1..keys).rev().for_each(|i| order.swap(i, stream.below(i, i + 1)));
    let mut back = vec![0; keys];
    order.iter().enumerate().for_each(|(new, &old)| back[old] = new);
    let permuted = Part::of(Axis::Keys, order).tensors(problem, &trial.case.inputs);
    let outputs = Part::of(Axis::Keys, back).tensors(problem, &trial.ask_with(&permuted)?);
    agree(&outputs, trial.clean()?, trial.bounds()?, TWICE, everywhere)
}

/// The elements of the visible values of which one of o is the mean.
fn seen_values(visible: &Visible, v: &ArrayD<f64>, at: &[usize]) -> impl Iterator<Item = f64> {
    let [b, h, i, c] = [0, 1, 2, 3].map(|axis| at[axis]);
    visible.keys([b, h, i]).map(move |j| v[[b, h / visible.group(), j, c]])
}

/// Narrows the mask to the aligned key.
fn one_key(trial: &Trial<'_>) -> Judgement {
    let (problem, inputs) = (&trial.case.problem, &trial.case.inputs);
    let mask = Mask::Window { left: Some(0), right: Some(0), align: Align::BottomRight };
    let narrow = Scores { mask, ..trial.case.scores()?.clone() };
    let visible = Visible::new(&narrow, inputs);
    let problem = with_scores(problem, narrow);
    let outputs = trial.ask(&problem, inputs)?;
    let bounds = trial.bounds_of(&problem, inputs)?.outputs;
    let of_lse = bounds
        .get("lse")
        .map(|Bound { value, bound, .. }| close("lse", &result(&outputs, "lse")?, value, bound));
    let of_o = match (outputs.get("o"), bounds.get("o"), inputs.get("v")) {
        (Some(o), Some(bound), Some(v)) => {
            let (o, v) = (o.to_f64("o")?, v.to_f64("v")?);
            let value = |at: IxDyn| seen_values(&visible, &v, at.slice()).next().unwrap_or(0.0);
            let expected = ArrayD::from_shape_fn(o.raw_dim(), value);
            // The weight is 1, or e^ε over e^ε.
            Some(close("o", &o, &expected, &bound.bound))
        }
        _ => None,
    };
    if of_lse.is_none() && of_o.is_none() {
        return Err(Flaw::NotAsked("the kernel returns neither `o` nor `lse`".to_string()));
    }
    worst(of_lse.into_iter().chain(of_o))
}

fn hull(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    let visible = Visible::new(case.scores()?, &case.inputs);
    let (o, v) = (result(trial.clean()?, "o")?, case.inputs["v"].to_f64("v")?);
    let Bound { value, bound, .. } = &trial.bounds()?.outputs["o"];
    // A sink is a key with value 0.
    let sink = case.scores()?.sinks.then_some(0.0);
    each_element("o", &o, |at, x| {
        let seen = || seen_values(&visible, &v, at).chain(sink);
        let (low, high) =
            (seen().fold(f64::INFINITY, f64::min), seen().fold(f64::NEG_INFINITY, f64::max));
        let within = low - bound[at] <= x && x <= high + bound[at];
        (low <= high && value[at].is_finite() && !within)
            .then(|| format!(" outside {low:e} to {high:e}"))
    })
}
