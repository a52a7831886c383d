//! One problem, said in several ways.

use super::linear;
use crate::bounds::Bounds;
use crate::cases::linear_attention::Family;
use crate::cases::{Case, Point};
use crate::generate::Stream;
use crate::laws::chunks::places;
use crate::laws::compare::{Strict, TWICE, agree, close, exchange, sum_groups};
use crate::laws::flaw::{Flaw, Judgement, worst};
use crate::laws::forms::copies_of_key_heads;
use crate::laws::part::Part;
use crate::laws::tensors::{change, everywhere, result, returned};
use crate::laws::trial::Trial;
use crate::tensor::{Stored, Tensor, Tensors};
use etalon_problem::{Axis, Decay, Dtype, LinearAttention, Pass, Precision, Problem};
use ndarray::{ArrayD, IxDyn};

/// Doubling is exact where nothing is subnormal.
pub(super) fn normal_range(case: &Case) -> bool {
    matches!(&case.spec.point, Point::LinearAttention(point) if point.family != Family::Range)
}

/// Weights that a kernel stores in f16 are subnormal from 2⁻¹⁴ down: then only their bounds hold.
pub(super) fn exact_doubling(trial: &Trial<'_>) -> Judgement {
    let profile = trial.profile();
    let half = profile.stores().contains(&Dtype::F16);
    let strict = if half { Strict::Bound } else { Strict::Bits };
    doubling(trial, strict)?;
    scale_and_queries(trial, strict)
}

pub(super) fn doubling(trial: &Trial<'_>, strict: Strict) -> Judgement {
    let all: &[(&[(&str, f64)], &str)] = match trial.pass {
        Pass::Forward => &[
            (&[("v", 2.0), ("initial_state", 2.0)], "2 v, 2 H_0"),
            (&[("k", 2.0), ("initial_state", 2.0)], "2 k, 2 H_0"),
        ],
        _ => &[(&[("dout", 2.0), ("dfinal_state", 2.0)], "2 dout, 2 dH_n")],
    };
    let problem = &trial.case.problem;
    worst(all.iter().map(|(inputs, what)| exchange(trial, strict, problem, inputs, &|_| 2.0, what)))
}

pub(super) fn scale_and_queries(trial: &Trial<'_>, strict: Strict) -> Judgement {
    let problem = linear(trial.case)?;
    let problem = problem.clone().scale(0.5 * problem.scale).into();
    let factor = |name: &str| match name {
        "dq" => 0.5,
        "dscale" => 2.0,
        _ => 1.0,
    };
    exchange(trial, strict, &problem, &[("q", 2.0)], &factor, "σ/2, 2 q")
}

/// Compares an output with the sum of parts of another problem.
fn near_sum(
    trial: &Trial<'_>,
    name: &str,
    part: &str,
    (outputs, bounds): (&Tensors, &Bounds),
    sum: impl Fn(&ArrayD<f64>) -> ArrayD<f64>,
) -> Judgement {
    let limit = sum(&bounds.outputs[part].bound) + &trial.bounds()?.outputs[name].bound;
    let clean = trial.clean()?[name].to_f64(name)?;
    close(name, &clean, &sum(&outputs[part].to_f64(part)?), &limit)
}

/// An input of the type of the accumulation.
fn wide(trial: &Trial<'_>, values: &ArrayD<f64>) -> Tensor {
    Tensor::store(values, Stored::of(Precision::Wide, trial.case.dtype))
}

pub(super) fn constant_gates(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, linear(trial.case)?);
    let mut inputs = case.inputs.clone();
    let (decay, name, gates) = match inputs.remove("g_gamma") {
        None => (Decay::PerHead, "g_gamma", ArrayD::zeros(vec![problem.extents.key_heads])),
        Some(g_gamma) => {
            let g_gamma = g_gamma.to_f64("g_gamma")?;
            let g = ArrayD::from_shape_fn(IxDyn(&problem.g_shape()), |at| g_gamma[[at[1]]]);
            (Decay::PerToken, "g", g)
        }
    };
    inputs.insert(name.to_string(), wide(trial, &gates));
    let other: Problem = problem.clone().decay(decay).into();
    let outputs = trial.ask(&other, &inputs)?;
    // Gradients of the decays that only one of the problems has are no common tensors.
    let margin = agree(&outputs, trial.clean()?, trial.bounds()?, TWICE, everywhere);
    if decay == Decay::PerHead || trial.pass == Pass::Forward {
        return margin;
    }
    let bounds = trial.bounds_of(&other, &inputs)?;
    let heads = |dg: &ArrayD<f64>| dg.sum_axis(ndarray::Axis(2)).sum_axis(ndarray::Axis(0));
    worst([margin, near_sum(trial, "dg_gamma", "dg", (&outputs, &bounds), heads)])
}

pub(super) fn shared_states(trial: &Trial<'_>) -> Judgement {
    let (problem, group) = (&trial.case.problem, linear(trial.case)?.group());
    let copies = copies_of_key_heads(problem, group);
    // The gradient by a final state comes to one of its copies.
    let inputs = change(&copies.tensors(problem, &trial.case.inputs), |name, at, x| {
        if name == "dfinal_state" && at[1] % group != 0 { 0.0 } else { x }
    })?;
    let other = copies.problem(problem);
    let (outputs, bounds) = (trial.ask(&other, &inputs)?, trial.bounds_of(&other, &inputs)?);
    worst(trial.clean()?.iter().map(|(name, clean)| {
        let operand = problem.operand(name);
        match operand.and_then(|operand| operand.position(Axis::KeyHeads)) {
            Some(axis) if trial.pass == Pass::Backward => {
                let sums = |x: &ArrayD<f64>| sum_groups(x, axis, group);
                near_sum(trial, name, name, (&outputs, &bounds), sums)
            }
            _ => {
                let copied = copies.array(problem, name, &clean.to_f64(name)?);
                let limit = &bounds.outputs[name].bound * TWICE;
                close(name, &outputs[name].to_f64(name)?, &copied, &limit)
            }
        }
    }))
}

fn with_states(problem: &LinearAttention, tokens: usize, initial: bool) -> Problem {
    let mut part = problem.clone().final_state();
    part.initial_state = initial;
    part.extents.tokens = tokens;
    part.into()
}

/// Bounds of the whole, (N114): its own, that of the second half, whose terms meet fewer roundings, and that of the
/// state between them, of which the second half is a linear function.
const HALVES: f64 = 3.0;

pub(super) fn two_halves(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, linear(trial.case)?);
    let n = problem.extents.tokens;
    let halves = |t| {
        let first = with_states(problem, t, problem.initial_state);
        (t, first, with_states(problem, n - t, true))
    };
    let takes = |half: &Problem| trial.tier.takes(half, trial.pass, case.dtype);
    let mut all = places(trial, n).map(halves);
    let found = all.find(|(_, first, last)| takes(first) && takes(last));
    let (t, first, last) = found.unwrap_or_else(|| halves(n - 1));
    let [mut early, mut late] =
        [0..t, t..n].map(|half| Part::of(Axis::Tokens, half).tensors(&case.problem, &case.inputs));
    let mut before = trial.ask_pass(&first, Pass::Forward, &early)?;
    late.insert("initial_state".to_string(), returned(&before, "final_state")?.clone());
    let after = trial.ask(&last, &late)?;
    if trial.pass == Pass::Backward {
        early.insert("dfinal_state".to_string(), returned(&after, "dinitial_state")?.clone());
        before = trial.ask(&first, &early)?;
    }
    let whole = trial.clean()?.keys().map(|name| {
        let operand = case.problem.operand(name);
        let has = |axis| operand.as_ref().is_some_and(|operand| operand.has(axis));
        let half = |half: &Tensors| Ok::<_, Flaw>(half[name].to_f64(name)?);
        let whole = match name.as_str() {
            "final_state" => half(&after)?,
            _ if has(Axis::Sequences) => half(&before)?,
            _ if has(Axis::Tokens) => join(&[half(&before)?, half(&after)?])?,
            _ => half(&before)? + half(&after)?,
        };
        Ok((name.clone(), Tensor::round(&whole, Dtype::F64)))
    });
    let outputs = whole.collect::<Result<Tensors, Flaw>>()?;
    let judged = agree(&outputs, trial.clean()?, trial.bounds()?, HALVES, everywhere);
    judged.map_err(|flaw| flaw.of(&format!("tokens {t}..{n} from the state before")))
}

/// Stretches of tokens, end to end.
fn join(stretches: &[ArrayD<f64>]) -> Result<ArrayD<f64>, Flaw> {
    let views: Vec<_> = stretches.iter().map(|stretch| stretch.view()).collect();
    ndarray::concatenate(ndarray::Axis(2), &views).map_err(|error| Flaw::Fail(error.to_string()))
}

/// The most steps of a case.
const STEPS: usize = 33;

/// The first tokens at once, none of them in half of the cases, and the others step by step.
pub(super) fn token_by_token(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, linear(trial.case)?);
    let (n, stream) = (problem.extents.tokens, Stream::new(case.spec.seed, &case.name));
    let fewest = n.saturating_sub(STEPS);
    let first = if stream.below(0, 2) == 0 { fewest } else { fewest + stream.below(1, n - fewest) };
    let tokens = |range| Part::of(Axis::Tokens, range).tensors(&case.problem, &case.inputs);
    let zeros = || wide(trial, &ArrayD::zeros(problem.state_shape().to_vec()));
    let mut state = case.inputs.get("initial_state").cloned().unwrap_or_else(zeros);
    let mut rows = Vec::new();
    if first > 0 {
        let prefill = with_states(problem, first, problem.initial_state);
        let outputs = trial.ask_pass(&prefill, Pass::Forward, &tokens(0..first))?;
        rows.push(result(&outputs, "o")?);
        state = returned(&outputs, "final_state")?.clone();
    }
    for t in first..n {
        let mut inputs = tokens(t..t + 1);
        for (name, tensor) in &mut inputs {
            let operand = case.problem.operand(name);
            if let Some(axis) = operand.and_then(|operand| operand.position(Axis::Tokens)) {
                tensor.shape.remove(axis);
            }
        }
        inputs.insert("initial_state".to_string(), state);
        let outputs = trial.ask_pass(&case.problem, Pass::Step, &inputs)?;
        rows.push(result(&outputs, "o")?.insert_axis(ndarray::Axis(2)));
        state = returned(&outputs, "final_state")?.clone();
    }
    let o = Tensor::round(&join(&rows)?, Dtype::F64);
    let outputs = Tensors::from([("o".to_string(), o), ("final_state".to_string(), state)]);
    // The states between are stored once more each: fewer roundings than the bound counts.
    let judged = agree(&outputs, trial.clean()?, trial.bounds()?, HALVES, everywhere);
    judged.map_err(|flaw| flaw.of(&format!("tokens {first}..{n} by steps")))
}
