//! Visibility of tokens: the past is seen, and nothing else is.

use super::linear;
use crate::bounds::Bounds;
use crate::cases::linear_attention::GateKind;
use crate::cases::{Case, Point};
use crate::generate::Stream;
use crate::laws::compare::{TWICE, agree, close};
use crate::laws::flaw::{Judgement, worst};
use crate::laws::sums::input;
use crate::laws::tensors::{Equality, change, each_element, everywhere, poison, result, same};
use crate::laws::trial::Trial;
use crate::tensor::Tensors;
use etalon_problem::{Axis, Dtype, LinearAttention, Operand, Pass, TokenSequence, find};
use ndarray::{Array2, ArrayD, Dimension};
use std::ops::Range;

/// Some tokens of every sequence.
struct Stretch {
    /// `[B, N]`: whether a token is one of them.
    tokens: Array2<bool>,
    operands: Vec<Operand>,
}

impl Stretch {
    /// The range that `tokens` names of each sequence.
    fn new(problem: &LinearAttention, tokens: impl Fn(&TokenSequence) -> Range<usize>) -> Self {
        let e = problem.extents;
        let mut flags = Array2::from_elem((e.batch, e.tokens), false);
        for s in problem.list_sequences() {
            tokens(&s).for_each(|t| flags[[s.batch, s.start + t]] = true);
        }
        let passes = [Pass::Forward, Pass::Backward].into_iter();
        let mut operands: Vec<Operand> = passes.flat_map(|pass| problem.operands(pass)).collect();
        operands.retain(|operand| operand.has(Axis::Tokens));
        Stretch { tokens: flags, operands }
    }

    /// True if the tensor has tokens.
    fn divides(&self, name: &str) -> bool {
        find(&self.operands, name).is_some()
    }

    /// True if an index into a tensor is that of one of the tokens.
    fn holds(&self, name: &str, at: &[usize]) -> bool {
        self.divides(name) && self.tokens[[at[0], at[2]]]
    }
}

/// The tokens of no sequence.
pub(super) fn padded(problem: &LinearAttention) -> usize {
    let all = problem.extents.batch * problem.extents.tokens;
    all - problem.list_sequences().iter().map(|s| s.tokens).sum::<usize>()
}

pub(super) fn padded_tokens(trial: &Trial<'_>) -> Judgement {
    let inside = Stretch::new(linear(trial.case)?, |s| 0..s.tokens);
    let outside = |name: &str, at: &[usize]| inside.divides(name) && !inside.holds(name, at);
    let outputs = trial.ask_with(&poison(&trial.case.inputs, outside)?)?;
    let zeros = change(&outputs, |name, at, x| if outside(name, at) { 0.0 } else { x })?;
    same(&outputs, &zeros, Equality::Numbers, everywhere)?;
    agree(&outputs, trial.clean()?, trial.bounds()?, TWICE, everywhere)
}

pub(super) fn empty_sequences(trial: &Trial<'_>) -> Judgement {
    let sequences = linear(trial.case)?.list_sequences();
    let (after, before) = match trial.pass {
        Pass::Forward => ("final_state", "initial_state"),
        _ => ("dinitial_state", "dfinal_state"),
    };
    let state = input(&trial.case.inputs, before)?;
    let expected = change(trial.clean()?, |name, at, x| match &state {
        _ if name != after => x,
        Some(state) => state[at],
        None => 0.0,
    })?;
    let empty = |at: &[usize]| sequences.iter().any(|s| s.index == at[0] && s.tokens == 0);
    worst(trial.clean()?.iter().map(|(name, got)| {
        // A copy, but units that flush take a subnormal number for 0.
        let tiny = got.dtype().map_or(0.0, Dtype::underflow);
        let (got, expected) = (got.numbers(name)?, expected[name].numbers(name)?);
        let limit = ArrayD::from_shape_fn(got.raw_dim(), |at| {
            if name == after && empty(at.slice()) { tiny } else { f64::INFINITY }
        });
        close(name, &got, &expected, &limit)
    }))
}

/// A token of each sequence.
fn cuts(case: &Case, problem: &LinearAttention) -> Vec<usize> {
    let stream = Stream::new(case.spec.seed, "cut");
    let sequences = problem.list_sequences().into_iter();
    sequences.map(|s| stream.below(s.index, s.tokens.max(1))).collect()
}

/// The tokens before the cut of each sequence, and the others.
fn early_and_late(problem: &LinearAttention, cuts: &[usize]) -> [Stretch; 2] {
    let early = Stretch::new(problem, |s| 0..cuts[s.index]);
    let late = Stretch::new(problem, |s| cuts[s.index]..s.tokens);
    [early, late]
}

/// Inputs of the law's own, with what they give.
struct Base<'a> {
    inputs: &'a Tensors,
    clean: &'a Tensors,
    bounds: &'a Bounds,
}

impl Base<'_> {
    /// Fails unless NaN where `hit(name, index)` holds leaves alone what `counts(name, index)`.
    fn stays(
        &self,
        trial: &Trial<'_>,
        hit: impl Fn(&str, &[usize]) -> bool,
        counts: impl Fn(&str, &[usize]) -> bool,
        what: &str,
    ) -> Judgement {
        let outputs = trial.ask_with(&poison(self.inputs, hit)?)?;
        let judgement = agree(&outputs, self.clean, self.bounds, TWICE, counts);
        judgement.map_err(|flaw| flaw.of(what))
    }
}

pub(super) fn later_tokens(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, linear(trial.case)?);
    let [early, late] = early_and_late(problem, &cuts(case, problem));
    let base = Base { inputs: &case.inputs, clean: trial.clean()?, bounds: trial.bounds()? };
    // Gates are no data: NaN among them is an error. The final state and its gradient see all.
    let data = |name: &str| matches!(name, "q" | "k" | "v" | "dout");
    let ways = [
        (&late, ["o", "dq"], &early, "NaN in later tokens"),
        (&early, ["dk", "dv"], &late, "NaN in earlier tokens"),
    ];
    let ways = ways.into_iter().filter(|(_, [first, _], ..)| base.clean.contains_key(*first));
    worst(ways.map(|(struck, results, kept, what)| {
        let hit = |name: &str, at: &[usize]| data(name) && struck.holds(name, at);
        base.stays(trial, hit, |name, at| results.contains(&name) && kept.holds(name, at), what)
    }))
}

pub(super) fn seen_tokens(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, linear(trial.case)?);
    let sequences = problem.list_sequences();
    let Some(s) = sequences.iter().find(|s| s.tokens > 0) else { return Ok(None) };
    let strong = |point: &Point| matches!(point, Point::LinearAttention(point) if point.gates == GateKind::Strong);
    let stream = Stream::new(case.spec.seed, "seen_tokens");
    let (t, head) = (stream.below(0, s.tokens), stream.below(1, problem.extents.key_heads));
    let struck = [s.batch, head, s.start + t];
    let hit = |name: &str, at: &[usize]| name == "k" && at[..3] == struck;
    let outputs = trial.ask_with(&poison(&case.inputs, hit)?)?;
    let (g, g_gamma) = (input(&case.inputs, "g")?, input(&case.inputs, "g_gamma")?);
    let reset = |at: usize| {
        let of_token = g.as_ref().map(|g| g[[s.batch, head, s.start + at]]);
        of_token.or(g_gamma.as_ref().map(|g| g[[head]])) == Some(f64::NEG_INFINITY)
    };
    // A kernel may say that nothing is left where a decay underflows.
    let last = if strong(&case.spec.point) { t + 1 } else { s.tokens };
    let seen = (t + 1..last).find(|&at| reset(at)).unwrap_or(last);
    each_element("o", &result(&outputs, "o")?, |at, x| {
        let group = at[0] == s.batch && at[1] / problem.group() == head;
        let sees = group && (s.start + t..s.start + seen).contains(&at[2]);
        (sees && x.is_finite()).then(|| ", but it sees a NaN".to_string())
    })
}

/// Threshold of the sum of log-decays between two tokens below which a decay may underflow, so that a kernel may say
/// that nothing is left: e⁻⁶⁰ is far from that in f32.
const LEFT: f64 = -60.0;

pub(super) fn seen_cotangents(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, linear(trial.case)?);
    let sequences = problem.list_sequences();
    let Some(s) = sequences.iter().max_by_key(|s| s.tokens).filter(|s| s.tokens > 0) else {
        return Ok(None);
    };
    let stream = Stream::new(case.spec.seed, "seen_cotangents");
    let head = stream.below(1, problem.extents.query_heads);
    let (key_head, t) = (head / problem.group(), s.tokens - 1 - stream.below(0, s.tokens) / 2);
    let struck = [s.batch, head, s.start + t];
    let hit = |name: &str, at: &[usize]| name == "dout" && at[..3] == struck;
    let outputs = trial.ask_with(&poison(&case.inputs, hit)?)?;
    let (g, g_gamma) = (input(&case.inputs, "g")?, input(&case.inputs, "g_gamma")?);
    let log_decay = |at: usize| {
        let of_token = g.as_ref().map(|g| g[[s.batch, key_head, s.start + at]]);
        of_token.or(g_gamma.as_ref().map(|g| g[[key_head]])).unwrap_or(0.0)
    };
    // The first token from which something is left at the struck one.
    let (mut first, mut left) = (t, 0.0);
    while first > 0 && left + log_decay(first) > LEFT {
        left += log_decay(first);
        first -= 1;
    }
    let within = |at: &[usize], head: usize, tokens: Range<usize>| {
        let tokens = s.start + tokens.start..s.start + tokens.end;
        at[..2] == [s.batch, head] && tokens.contains(&at[2])
    };
    worst(outputs.iter().map(|(name, tensor)| {
        let reached = |at: &[usize]| match name.as_str() {
            "dq" => within(at, head, t..t + 1),
            "dk" | "dv" => within(at, key_head, first..t + 1),
            "dg" => within(at, key_head, first + 1..t + 1),
            _ => false,
        };
        each_element(name, &tensor.to_f64(name)?, |at, x| {
            (reached(at) && !x.is_nan()).then(|| ", but it sees a NaN".to_string())
        })
    }))
}

pub(super) fn resets(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, linear(trial.case)?);
    let sequences = problem.list_sequences();
    let cuts = cuts(case, problem);
    let [early, late] = early_and_late(problem, &cuts);
    let here = Stretch::new(problem, |s| cuts[s.index]..(cuts[s.index] + 1).min(s.tokens));
    let inputs = &change(&case.inputs, |name, at, g| match name == "g" && here.holds(name, at) {
        true => f64::NEG_INFINITY,
        false => g,
    })?;
    let (clean, bounds) = (trial.ask_with(inputs)?, trial.bounds_of(&case.problem, inputs)?);
    let base = Base { inputs, clean: &clean, bounds: &bounds };
    let full = |s: usize| sequences.iter().any(|x| x.index == s && x.tokens > 0);
    let side = |stretch: &Stretch, state: &str, name: &str, at: &[usize]| {
        (name == state && full(at[0])) || stretch.holds(name, at)
    };
    let ways = [
        (&early, "initial_state", &late, "final_state", "NaN before a reset"),
        (&late, "dfinal_state", &early, "dinitial_state", "NaN behind a reset"),
    ];
    worst(ways.map(|(struck, into, kept, out, what)| {
        let hit = |name: &str, at: &[usize]| name != "g" && side(struck, into, name, at);
        base.stays(trial, hit, |name, at| side(kept, out, name, at), what)
    }))
}

/// The number of resets up to each token, `[B, Hk, N]`, or that of a step: tokens of a sequence see each
/// other where it is the same. `None` if there are no resets.
fn resets_up_to(case: &Case, pass: Pass) -> Option<ArrayD<usize>> {
    let g = case.inputs_of(pass).get("g")?.to_f64("g").ok()?;
    let mut counts = g.map(|&g| usize::from(g == f64::NEG_INFINITY));
    if pass != Pass::Step {
        let problem = linear(case).ok()?;
        for s in problem.list_sequences() {
            let mut here = counts.slice_each_axis_mut(|axis| match axis.axis.index() {
                0 => (s.batch..s.batch + 1).into(),
                2 => (s.start..s.start + s.tokens).into(),
                _ => (..).into(),
            });
            here.accumulate_axis_inplace(ndarray::Axis(2), |before, count| *count += before);
        }
    }
    counts.iter().any(|&count| count > 0).then_some(counts)
}

pub(super) fn has_resets(case: &Case, pass: Pass) -> bool {
    resets_up_to(case, pass).is_some()
}

/// Every second stretch between resets, then the others: so every reset is tried, and of a chunk with
/// several the first and the last.
pub(super) fn between_resets(trial: &Trial<'_>) -> Judgement {
    let (case, problem) = (trial.case, linear(trial.case)?);
    let Some(resets) = resets_up_to(case, trial.pass) else { return Ok(None) };
    let (sequences, operands) = (problem.list_sequences(), problem.operands(trial.pass));
    // A sequence without tokens ends with the state that it begins with.
    let up_to_end = |index: usize, head: usize| {
        let last = sequences.iter().find(|s| s.index == index).filter(|s| s.tokens > 0);
        last.map_or(0, |s| resets[&[s.batch, head, s.start + s.tokens - 1][..]])
    };
    let is_in = |parity: usize, name: &str, at: &[usize]| {
        let Some(operand) = find(&operands, name).filter(|operand| operand.name != "g") else {
            return false;
        };
        let group = if operand.has(Axis::QueryHeads) { problem.group() } else { 1 };
        let number = match (operand.primal, trial.pass) {
            // A state before the first token has no reset before it.
            ("initial_state", _) => 0,
            (_, Pass::Step) if operand.has(Axis::Batch) => resets[&[at[0], at[1] / group][..]],
            ("final_state", _) => up_to_end(at[0], at[1]),
            _ if operand.has(Axis::Tokens) => resets[&[at[0], at[1] / group, at[2]][..]],
            _ => return false, // sums over stretches of both kinds
        };
        number % 2 == parity
    };
    let base = Base { inputs: trial.inputs(), clean: trial.clean()?, bounds: trial.bounds()? };
    worst([0, 1].map(|struck| {
        let what = format!("NaN in stretches {struck}, {}, … between resets", struck + 2);
        let hit = |name: &str, at: &[usize]| is_in(struck, name, at);
        base.stays(trial, hit, |name, at| is_in(1 - struck, name, at), &what)
    }))
}
