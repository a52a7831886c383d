//! What a token sees, and what it does not.

use super::parts::{Axes, linear};
use crate::bounds::Bounds;
use crate::cases::linear_attention::GateKind;
use crate::cases::{Case, Point};
use crate::generate::Stream;
use crate::laws::flaw::{Flaw, Judgement, refute};
use crate::laws::tensors::{Equality, difference, map};
use crate::laws::trial::Trial;
use crate::laws::values::{close, larger};
use crate::tensor::{Tensor, Tensors};
use crate::tier::Hints;
use etalon_problem::{Axis, LinearAttention, Pass, TokenSequence};
use std::ops::Range;

/// The inputs with NaN where `place(name, index)` says so.
fn poisoned(inputs: &Tensors, place: impl Fn(&str, &[usize]) -> bool) -> Result<Tensors, Flaw> {
    let poison = |(name, tensor): (&String, &Tensor)| {
        let tensor = map(tensor, |at, x| if place(name, at) { f64::NAN } else { x })?;
        Ok((name.clone(), tensor))
    };
    inputs.iter().map(poison).collect()
}

/// Fails unless the outputs agree where `counts(name, index)`: each lies within the bound of the
/// same number.
fn agree(
    got: &Tensors,
    clean: &Tensors,
    bounds: &Bounds,
    counts: impl Fn(&str, &[usize]) -> bool,
) -> Judgement {
    let mut margin = None;
    for (name, tensor) in clean {
        let mut limit = &bounds.outputs[name].bound * 2.0;
        for (index, limit) in limit.indexed_iter_mut() {
            if !counts(name, ndarray::Dimension::slice(&index)) {
                *limit = f64::INFINITY;
            }
        }
        margin = larger(margin, close(name, &got[name], tensor, &limit)?);
    }
    Ok(margin)
}

fn named(flaw: Flaw, what: &str) -> Flaw {
    match flaw {
        Flaw::Fail(text) => Flaw::Fail(format!("{what}: {text}")),
        other => other,
    }
}

/// The tokens of no sequence.
pub(super) fn padded(problem: &LinearAttention) -> usize {
    let all = problem.extents.batch * problem.extents.tokens;
    all - problem.list_sequences().iter().map(|s| s.tokens).sum::<usize>()
}

pub(super) fn padded_tokens(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, linear(trial.case)?);
    let (sequences, axes) = (problem.list_sequences(), Axes::new(problem));
    let outside = |name: &str, at: &[usize]| {
        axes.has(name, Axis::Tokens) && !axes.holds(name, at, &sequences, |s| 0..s.tokens)
    };
    let inputs = poisoned(&case.inputs, outside)?;
    let outputs = trial.ask(&case.problem, &inputs, Hints::default())?;
    for (name, tensor) in &outputs {
        let zero = map(tensor, |at, x| if outside(name, at) { 0.0 } else { x })?;
        refute(difference(name, tensor, &zero, Equality::Numbers, |_| true))?;
    }
    agree(&outputs, trial.clean()?, trial.bounds()?, |_, _| true)
}

pub(super) fn empty_sequences(trial: &Trial<'_>) -> Judgement {
    let (case, sequences) = (trial.case, linear(trial.case)?.list_sequences());
    let (after, before) = match trial.pass {
        Pass::Forward => ("final_state", "initial_state"),
        _ => ("dinitial_state", "dfinal_state"),
    };
    let tensor = &trial.clean()?[after];
    let expected = match case.inputs.get(before) {
        Some(before) => before.clone(),
        None => map(tensor, |_, _| 0.0)?,
    };
    let empty = |at: &[usize]| sequences.iter().any(|s| s.index == at[0] && s.tokens == 0);
    refute(difference(after, tensor, &expected, Equality::Numbers, empty))?;
    Ok(None)
}

/// A token of each sequence.
fn cuts(case: &Case, sequences: &[TokenSequence]) -> Vec<usize> {
    let stream = Stream::new(case.spec.seed, "cut");
    sequences.iter().map(|s| stream.below(s.index, s.tokens.max(1))).collect()
}

pub(super) fn later_tokens(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, linear(trial.case)?);
    let (sequences, axes) = (problem.list_sequences(), Axes::new(problem));
    let cuts = cuts(case, &sequences);
    let early = |s: &TokenSequence| 0..cuts[s.index].min(s.tokens);
    let late = |s: &TokenSequence| cuts[s.index].min(s.tokens)..s.tokens;
    // Gates are no data: NaN among them is an error. The final state and its gradient see all.
    let data = |name: &str| name != "g";
    let ask = |poison: &dyn Fn(&TokenSequence) -> Range<usize>, names: &[&str]| {
        let inputs = poisoned(&case.inputs, |name, at| {
            names.contains(&name) && data(name) && axes.holds(name, at, &sequences, poison)
        })?;
        trial.ask(&case.problem, &inputs, Hints::default())
    };
    let everything = ["q", "k", "v", "dout"];
    let counts = |name: &str, at: &[usize]| {
        ["o", "dq"].contains(&name) && axes.holds(name, at, &sequences, early)
    };
    let outputs = ask(&late, &everything)?;
    let margin = agree(&outputs, trial.clean()?, trial.bounds()?, counts)
        .map_err(|flaw| named(flaw, "NaN in later tokens"))?;
    if trial.pass == Pass::Forward {
        return Ok(margin);
    }
    let counts = |name: &str, at: &[usize]| {
        ["dk", "dv"].contains(&name) && axes.holds(name, at, &sequences, late)
    };
    let outputs = ask(&early, &everything)?;
    let other = agree(&outputs, trial.clean()?, trial.bounds()?, counts)
        .map_err(|flaw| named(flaw, "NaN in earlier tokens"))?;
    Ok(larger(margin, other))
}

pub(super) fn seen_tokens(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, linear(trial.case)?);
    let sequences = problem.list_sequences();
    let Some(s) = sequences.iter().find(|s| s.tokens > 0) else { return Ok(None) };
    let underflows = match &case.spec.point {
        Point::LinearAttention(point) => point.gates == GateKind::Strong,
        _ => false,
    };
    let stream = Stream::new(case.spec.seed, "seen_tokens");
    let (t, head) = (stream.below(0, s.tokens), stream.below(1, problem.extents.key_heads));
    let struck = [s.batch, head, s.start + t];
    let inputs = poisoned(&case.inputs, |name, at| name == "k" && at[..3] == struck)?;
    let outputs = trial.ask(&case.problem, &inputs, Hints::default())?;
    let o = outputs["o"].to_f64("o")?;
    let reset = |at: usize| {
        let place = |name: &str| Some(case.inputs.get(name)?.to_f64(name));
        let per_token = place("g").map(|g| g.map(|g| g[[s.batch, head, s.start + at]]));
        let per_head = place("g_gamma").map(|g| g.map(|g| g[[head]]));
        per_token.or(per_head).is_some_and(|g| g.is_ok_and(|g| g == f64::NEG_INFINITY))
    };
    // Where a decay underflows, a kernel may say that nothing is left.
    let last = if underflows { t + 1 } else { s.tokens };
    let seen = (t + 1..last).find(|&at| reset(at)).unwrap_or(last);
    for (index, x) in o.indexed_iter() {
        let at = ndarray::Dimension::slice(&index);
        let group = at[0] == s.batch && at[1] / problem.group() == head;
        if group && (s.start + t..s.start + seen).contains(&at[2]) && x.is_finite() {
            return Err(Flaw::Fail(format!("o{at:?} = {x:e}, but it sees a NaN")));
        }
    }
    Ok(None)
}

pub(super) fn resets(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, linear(trial.case)?);
    let (sequences, axes) = (problem.list_sequences(), Axes::new(problem));
    let cuts = cuts(case, &sequences);
    let here = |s: &TokenSequence| cuts[s.index]..(cuts[s.index] + 1).min(s.tokens);
    let early = |s: &TokenSequence| 0..cuts[s.index].min(s.tokens);
    let late = |s: &TokenSequence| cuts[s.index].min(s.tokens)..s.tokens;
    let mut inputs = case.inputs.clone();
    let g = map(&inputs["g"], |at, g| match axes.holds("g", at, &sequences, here) {
        true => f64::NEG_INFINITY,
        false => g,
    })?;
    inputs.insert("g".to_string(), g);
    let clean = trial.ask(&case.problem, &inputs, Hints::default())?;
    let bounds = trial.bounds_of(&case.problem, &inputs)?;
    let full = |s: usize| sequences.iter().any(|x| x.index == s && x.tokens > 0);
    let data = |name: &str| name != "g";

    let before = poisoned(&inputs, |name, at| match name {
        "initial_state" => full(at[0]),
        _ => data(name) && axes.holds(name, at, &sequences, early),
    })?;
    let outputs = trial.ask(&case.problem, &before, Hints::default())?;
    let after = |name: &str, at: &[usize]| match name {
        "final_state" => full(at[0]),
        _ => axes.holds(name, at, &sequences, late),
    };
    let margin = agree(&outputs, &clean, &bounds, after)
        .map_err(|flaw| named(flaw, "NaN before a reset"))?;

    let behind = poisoned(&inputs, |name, at| match name {
        "dfinal_state" => full(at[0]),
        _ => data(name) && axes.holds(name, at, &sequences, late),
    })?;
    let outputs = trial.ask(&case.problem, &behind, Hints::default())?;
    let ahead = |name: &str, at: &[usize]| match name {
        "dinitial_state" => full(at[0]),
        _ => axes.holds(name, at, &sequences, early),
    };
    let other = agree(&outputs, &clean, &bounds, ahead)
        .map_err(|flaw| named(flaw, "NaN behind a reset"))?;
    Ok(larger(margin, other))
}
