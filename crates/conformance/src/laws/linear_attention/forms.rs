//! One problem, said in several ways.

use super::parts::{Axes, linear};
use crate::bounds::Bounds;
use crate::cases::linear_attention::Family;
use crate::cases::{Case, Point};
use crate::laws::flaw::{Flaw, Judgement};
use crate::laws::tensors::{map, take};
use crate::laws::trial::Trial;
use crate::laws::values::{close, larger, scaled, sum_groups, times};
use crate::tensor::{Tensor, Tensors};
use crate::tier::Hints;
use etalon_problem::{Axis as ProblemAxis, Decay, Dtype, LinearAttention, Pass};
use ndarray::{ArrayD, Axis, IxDyn};

/// Doubling is exact where nothing is subnormal.
pub(super) fn normal_range(case: &Case) -> bool {
    match &case.spec.point {
        Point::LinearAttention(point) => point.family != Family::Range,
        _ => false,
    }
}

pub(super) fn doubling(trial: &Trial<'_>) -> Judgement {
    let (problem, inputs) = (&trial.case.problem, &trial.case.inputs);
    if trial.pass == Pass::Forward {
        let doubled = times(inputs, &["v", "initial_state"], 2.0)?;
        let outputs = trial.ask(problem, &doubled, Hints::default())?;
        scaled(trial, &outputs, |_| 2.0, "2 v, 2 H_0")?;
        let doubled = times(inputs, &["k", "initial_state"], 2.0)?;
        let outputs = trial.ask(problem, &doubled, Hints::default())?;
        scaled(trial, &outputs, |_| 2.0, "2 k, 2 H_0")?;
    } else {
        let doubled = times(inputs, &["dout", "dfinal_state"], 2.0)?;
        let outputs = trial.ask(problem, &doubled, Hints::default())?;
        scaled(trial, &outputs, |_| 2.0, "2 dout, 2 dH_n")?;
    }
    Ok(None)
}

pub(super) fn scale_and_queries(trial: &Trial<'_>) -> Judgement {
    let problem = linear(trial.case)?;
    let doubled = times(&trial.case.inputs, &["q"], 2.0)?;
    let problem = problem.clone().scale(0.5 * problem.scale);
    let outputs = trial.ask(&problem.into(), &doubled, Hints::default())?;
    let factor = |name: &str| match name {
        "dq" => 0.5,
        "dscale" => 2.0,
        _ => 1.0,
    };
    scaled(trial, &outputs, factor, "σ/2, 2 q")?;
    Ok(None)
}

/// Fails unless the outputs lie within `times` bounds of the clean ones; `skip` says which do not
/// count.
fn near(
    trial: &Trial<'_>,
    outputs: &Tensors,
    times: f64,
    skip: impl Fn(&str) -> bool,
) -> Judgement {
    let mut margin = None;
    for (name, tensor) in trial.clean()?.iter().filter(|(name, _)| !skip(name)) {
        let limit = &trial.bounds()?.outputs[name].bound * times;
        margin = larger(margin, close(name, &outputs[name], tensor, &limit)?);
    }
    Ok(margin)
}

/// Compares an output with the sum, along an axis, of those of another problem.
fn near_sum(
    trial: &Trial<'_>,
    name: &str,
    parts: (&Tensor, &Bounds, &str),
    sum: impl Fn(&ArrayD<f64>) -> ArrayD<f64>,
) -> Judgement {
    let (tensor, bounds, part) = parts;
    let limit = sum(&bounds.outputs[part].bound) + &trial.bounds()?.outputs[name].bound;
    let total = Tensor::round(&sum(&tensor.to_f64(part)?), Dtype::F64);
    close(name, &trial.clean()?[name], &total, &limit)
}

pub(super) fn constant_gates(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, linear(trial.case)?);
    let mut inputs = case.inputs.clone();
    let wide = if case.dtype == Dtype::F64 { Dtype::F64 } else { Dtype::F32 };
    if problem.decay == Decay::None {
        let zeros = ArrayD::zeros(vec![problem.extents.key_heads]);
        inputs.insert("g_gamma".to_string(), Tensor::round(&zeros, wide));
        let other = problem.clone().decay(Decay::PerHead);
        let outputs = trial.ask(&other.into(), &inputs, Hints::default())?;
        return near(trial, &outputs, 2.0, |_| false);
    }
    let Some(g_gamma) = inputs.remove("g_gamma") else { return Ok(None) };
    let g_gamma = g_gamma.to_f64("g_gamma")?;
    let g = ArrayD::from_shape_fn(IxDyn(&problem.g_shape()), |at| g_gamma[[at[1]]]);
    inputs.insert("g".to_string(), Tensor::round(&g, wide));
    let other = problem.clone().decay(Decay::PerToken).into();
    let outputs = trial.ask(&other, &inputs, Hints::default())?;
    let margin = near(trial, &outputs, 2.0, |name| name == "dg_gamma")?;
    if trial.pass == Pass::Forward {
        return Ok(margin);
    }
    let bounds = trial.bounds_of(&other, &inputs)?;
    let heads = |dg: &ArrayD<f64>| dg.sum_axis(Axis(2)).sum_axis(Axis(0));
    Ok(larger(margin, near_sum(trial, "dg_gamma", (&outputs["dg"], &bounds, "dg"), heads)?))
}

pub(super) fn shared_states(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, linear(trial.case)?);
    let group = problem.group();
    let heads: Vec<usize> = (0..problem.extents.query_heads).map(|h| h / group).collect();
    let axes = Axes::new(problem);
    let axis = |name: &str| axes.position(name, ProblemAxis::KeyHeads);
    let mut inputs = Tensors::new();
    for (name, tensor) in &case.inputs {
        let copies = axis(name).map_or_else(|| tensor.clone(), |axis| take(tensor, axis, &heads));
        // The gradient by a final state comes to one of its copies.
        let copies = match name.as_str() {
            "dfinal_state" => map(&copies, |at, x| if at[1] % group == 0 { x } else { 0.0 })?,
            _ => copies,
        };
        inputs.insert(name.clone(), copies);
    }
    let mut other = problem.clone();
    other.extents.key_heads = problem.extents.query_heads;
    let other = other.into();
    let outputs = trial.ask(&other, &inputs, Hints::default())?;
    let summed = |name: &str| trial.pass == Pass::Backward && axis(name).is_some();
    let copied = |name: &str| !summed(name) && axis(name).is_some();
    let mut margin = near(trial, &outputs, 2.0, |name| summed(name) || copied(name))?;
    let bounds = trial.bounds_of(&other, &inputs)?;
    for (name, clean) in trial.clean()? {
        if summed(name) {
            let sums = |x: &ArrayD<f64>| match axis(name) {
                Some(0) => sum_groups(&x.clone().insert_axis(Axis(0)), group).remove_axis(Axis(0)),
                _ => sum_groups(x, group),
            };
            let found = near_sum(trial, name, (&outputs[name], &bounds, name), sums)?;
            margin = larger(margin, found);
        } else if copied(name) {
            let limit = &bounds.outputs[name].bound * 2.0;
            margin = larger(margin, close(name, &outputs[name], &take(clean, 1, &heads), &limit)?);
        }
    }
    Ok(margin)
}

/// The tokens `from..to` of what has tokens.
fn tokens(axes: &Axes, inputs: &Tensors, from: usize, to: usize) -> Tensors {
    let picks: Vec<usize> = (from..to).collect();
    let part = |(name, tensor): (&String, &Tensor)| {
        let axis = axes.position(name, ProblemAxis::Tokens);
        (name.clone(), axis.map_or_else(|| tensor.clone(), |axis| take(tensor, axis, &picks)))
    };
    inputs.iter().map(part).collect()
}

fn with_states(problem: &LinearAttention, tokens: usize, initial: bool) -> LinearAttention {
    let mut part = problem.clone().final_state();
    part.initial_state = initial;
    part.extents.tokens = tokens;
    part
}

/// Both halves err by at most the bound of the whole, whose terms meet more roundings, and the state
/// between them is stored once: three bounds.
const HALVES: f64 = 3.0;

pub(super) fn two_halves(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, linear(trial.case)?);
    let n = problem.extents.tokens;
    let stream = crate::generate::Stream::new(case.spec.seed, "two_halves");
    let t = 1 + stream.below(0, n - 1);
    let axes = Axes::new(problem);
    let half = |from, to| tokens(&axes, &case.inputs, from, to);
    let (mut early, mut late) = (half(0, t), half(t, n));
    let first = with_states(problem, t, problem.initial_state).into();
    let last = with_states(problem, n - t, true).into();
    let before = trial.ask_pass(&first, Pass::Forward, &early, Hints::default())?;
    late.insert("initial_state".to_string(), before["final_state"].clone());
    let after = trial.ask(&last, &late, Hints::default())?;
    let (before, after) = if trial.pass == Pass::Forward {
        (before, after)
    } else {
        early.insert("dfinal_state".to_string(), after["dinitial_state"].clone());
        (trial.ask(&first, &early, Hints::default())?, after)
    };
    let mut outputs = Tensors::new();
    for name in trial.clean()?.keys() {
        let halves = [&before, &after].map(|half| half.get(name));
        let (by_token, state) =
            (axes.has(name, ProblemAxis::Tokens), axes.has(name, ProblemAxis::Sequences));
        let whole = match halves {
            [Some(a), Some(b)] if by_token => join(a, b)?,
            [_, Some(b)] if name == "final_state" => b.clone(),
            [Some(a), _] if state => a.clone(),
            [Some(a), Some(b)] => {
                let (a, b) = (a.to_f64(name)?, b.to_f64(name)?);
                Tensor::round(&(a + b), Dtype::F64)
            }
            _ => return Err(Flaw::Vacuous(format!("no halves of {name}"))),
        };
        outputs.insert(name.clone(), whole);
    }
    near(trial, &outputs, HALVES, |_| false)
}

/// Two stretches of tokens, end to end.
fn join(a: &Tensor, b: &Tensor) -> Result<Tensor, Flaw> {
    let (x, y) = (a.to_f64("a half")?, b.to_f64("a half")?);
    let both = ndarray::concatenate(Axis(2), &[x.view(), y.view()]);
    let both = both.map_err(|error| Flaw::Fail(error.to_string()))?;
    Ok(Tensor::round(&both.as_standard_layout().to_owned(), Dtype::F64))
}

pub(super) fn token_by_token(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, linear(trial.case)?);
    let wide = if case.dtype == Dtype::F64 { Dtype::F64 } else { Dtype::F32 };
    let zeros = || Tensor::round(&ArrayD::zeros(problem.state_shape().to_vec()), wide);
    let mut state = case.inputs.get("initial_state").cloned().unwrap_or_else(zeros);
    let (axes, mut rows) = (Axes::new(problem), Vec::new());
    for t in 0..problem.extents.tokens {
        let mut inputs = tokens(&axes, &case.inputs, t, t + 1);
        for (name, tensor) in &mut inputs {
            if let Some(axis) = axes.position(name, ProblemAxis::Tokens) {
                tensor.shape.remove(axis);
            }
        }
        inputs.insert("initial_state".to_string(), state);
        let mut outputs = trial.ask_pass(&case.problem, Pass::Step, &inputs, Hints::default())?;
        let missing = || Flaw::Fail("a step returns o and final_state".to_string());
        rows.push(outputs.remove("o").ok_or_else(missing)?.to_f64("o")?.insert_axis(Axis(2)));
        state = outputs.remove("final_state").ok_or_else(missing)?;
    }
    let views: Vec<_> = rows.iter().map(|row| row.view()).collect();
    let o = ndarray::concatenate(Axis(2), &views).map_err(|error| Flaw::Fail(error.to_string()))?;
    let o = Tensor::round(&o.as_standard_layout().to_owned(), Dtype::F64);
    let outputs = Tensors::from([("o".to_string(), o), ("final_state".to_string(), state)]);
    // The states between are stored once more each: fewer roundings than the bound counts.
    near(trial, &outputs, HALVES, |_| false)
}
