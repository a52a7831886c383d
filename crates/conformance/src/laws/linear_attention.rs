//! Laws of linear_attention.

mod forms;
mod identities;
mod visibility;

use super::compare::Strict;
use super::determinism::same_alone;
use super::flaw::{Flaw, Judgement};
use super::law::laws;
use super::part::Part;
use super::tensors::change;
use super::trial::Trial;
use crate::cases::Case;
use crate::generate::Stream;
use crate::probes::functions::decay_probe;
use crate::probes::linear_attention::integer_probe;
use etalon_problem::{Axis, Decay, Dtype, Error, LinearAttention, Pass, TokenSequences};
use forms::{
    constant_gates, doubling, exact_doubling, normal_range, scale_and_queries, shared_states,
    token_by_token, two_halves,
};
use identities::{
    euler_of_outputs, euler_of_states, gradient_of_gates, second_of_outputs, second_of_states,
};
use visibility::{
    between_resets, empty_sequences, has_resets, later_tokens, padded, padded_tokens, resets,
    seen_cotangents, seen_tokens,
};

laws! {
    LINEAR_ATTENTION;
    /// With whole numbers and decays of 1 and 0 every result is exact to the last bit.
    Probe integer_probe;
    /// e^g of a decay is as exact as declared, at many points.
    Probe decay_probe on Forward
        if |case, _| matches!(case.dtype, Dtype::F32 | Dtype::F64), looks 1;
    /// ⟨dq, q⟩ = σ dσ = ⟨dout, o⟩.
    Meaning euler_of_outputs on Backward;
    /// ⟨dk, k⟩ and ⟨dv, v⟩, with ⟨dH_0, H_0⟩, are ⟨dout, o⟩ + ⟨dH_n, H_n⟩.
    Meaning euler_of_states on Backward;
    /// ⟨gdout, dout⟩ + ⟨gdH_n, dH_n⟩ is ⟨ddq, dq⟩ + ⟨ddk, dk⟩ + … over all gradients; so are
    /// ⟨gq, q⟩ + ⟨gdH_n, dH_n⟩ and σ gσ + ⟨gdH_n, dH_n⟩, with ⟨cot_o, o⟩, without those by q, and by σ.
    Meaning second_of_outputs on DoubleBackward;
    /// ⟨gk, k⟩ + ⟨gH_0, H_0⟩ and ⟨gv, v⟩ + ⟨gH_0, H_0⟩ are the sum of ⟨dd…, d…⟩ over what is linear in k,
    /// or in v, and H_0, with ⟨cot_o, o⟩ and ⟨cot_H_n, H_n⟩.
    Meaning second_of_states on DoubleBackward;
    /// dg_t is Σ (q·dq − k·dk) from token t on, plus ⟨H_n, dH_n⟩, (R10).
    Meaning gradient_of_gates on Backward if |case, _| decays(case, Decay::PerToken);
    /// Twice v and H_0 gives twice o and H_n; twice dout and dH_n twice every gradient.
    Meaning doubling(Strict::Bound) if |case, _| normal_range(case);
    /// Half of σ with twice q changes nothing but dq, which halves, and dσ, which doubles.
    Meaning scale_and_queries(Strict::Bound) if |case, _| normal_range(case);
    /// Factors of two are exact: they change no bit but those of the factor.
    Contract exact_doubling if |case, _| normal_range(case);
    /// A decay per head equals the same decay at every token; no decay equals a decay of 1.
    Meaning constant_gates if |case, _| !decays(case, Decay::PerToken);
    /// A shared state gives the results of one copy for each query head.
    Meaning shared_states if |case, _| linear(case).is_ok_and(|x| x.group() > 1);
    /// The first tokens, then the others from their final state, give the whole run.
    Meaning two_halves if |case, _| dense_tokens(case).is_some_and(|tokens| tokens > 1);
    /// Steps, each from the state before it, from the beginning or from the final state of the first tokens, give
    /// the forward pass.
    Meaning token_by_token on Forward
        if |case, _| dense_tokens(case).is_some_and(|tokens| tokens > 0);
    /// A sequence without tokens returns its state, and its gradient, unchanged.
    Meaning empty_sequences if |case, pass| {
        linear(case).is_ok_and(|x| {
            let states = if pass == Pass::Forward { x.final_state } else { x.initial_state };
            states && x.list_sequences().iter().any(|s| s.tokens == 0)
        })
    };
    /// NaN in tokens outside every sequence changes nothing, and results there are 0.
    Meaning padded_tokens if |case, _| linear(case).is_ok_and(|x| padded(x) > 0);
    /// NaN after a token does not reach its o or dq; NaN before it does not reach its dk or dv.
    Meaning later_tokens if |case, _| longest(case) > 1;
    /// NaN in a key reaches o at its token and at every later token up to a reset.
    Meaning seen_tokens on Forward if |case, _| has_queries(case) && longest(case) > 0;
    /// NaN in a cotangent reaches dq of its token, dk and dv of its and every earlier token, and dg of
    /// those between, back to a reset.
    Meaning seen_cotangents on Backward if |case, _| has_queries(case) && longest(case) > 0;
    /// No value passes a log-decay of −∞, in either direction, not even NaN.
    Meaning resets if |case, _| decays(case, Decay::PerToken) && longest(case) > 1;
    /// NaN between two log-decays of −∞ of the case leaves results before and behind them within their
    /// bounds.
    Gate between_resets on Any if has_resets, favour |case, _| case.spec.is_large();
    /// A key head of one sequence gives the same bits alone and with others.
    Contract alone if |case, _| longest(case) > 0;
    /// A log-decay that is positive or NaN is an error, not a result.
    Contract growth_is_refused
        // Without query heads there may be no result for which a decay would be read.
        if |case, _| !decays(case, Decay::None) && longest(case) > 0 && has_queries(case);
}

/// The problem of a case of linear_attention.
fn linear(case: &Case) -> Result<&LinearAttention, Error> {
    (&case.problem).try_into()
}

fn decays(case: &Case, decay: Decay) -> bool {
    linear(case).is_ok_and(|problem| problem.decay == decay)
}

fn has_queries(case: &Case) -> bool {
    linear(case).is_ok_and(|problem| problem.extents.query_heads > 0)
}

/// The tokens of every batch element, where each is one sequence.
fn dense_tokens(case: &Case) -> Option<usize> {
    let problem = linear(case).ok()?;
    (problem.sequences == TokenSequences::Dense).then_some(problem.extents.tokens)
}

/// The tokens of the longest sequence.
fn longest(case: &Case) -> usize {
    let lengths = linear(case).map(|x| x.list_sequences().iter().map(|s| s.tokens).max());
    lengths.ok().flatten().unwrap_or(0)
}

/// Parts that are tried of one case.
const PARTS: usize = 5;

fn alone(trial: &Trial<'_>) -> Judgement {
    let problem = linear(trial.case)?;
    let (sequences, heads) = (problem.list_sequences(), problem.extents.key_heads);
    let stream = Stream::new(trial.case.spec.seed, "parts");
    for i in 0..PARTS.min(sequences.len() * heads) {
        let at = stream.below(i, sequences.len() * heads);
        let (s, h) = (&sequences[at / heads], at % heads);
        let part = Part::token_sequence(s)
            .and(Axis::KeyHeads, [h])
            .and(Axis::QueryHeads, h * problem.group()..(h + 1) * problem.group());
        let which = format!("sequence {}, key head {h}", s.index);
        same_alone(trial, Strict::Bits, &part, &[Axis::Tokens, Axis::Sequences], &which)?;
    }
    Ok(None)
}

fn growth_is_refused(trial: &Trial<'_>) -> Judgement {
    let problem = linear(trial.case)?;
    let name = if problem.decay == Decay::PerHead { "g_gamma" } else { "g" };
    let sequences = problem.list_sequences();
    let Some(s) = sequences.iter().rev().find(|s| s.tokens > 0) else { return Ok(None) };
    let last = problem.extents.key_heads - 1;
    let place = match problem.decay {
        Decay::PerHead => vec![last],
        _ => vec![s.batch, last, s.start + s.tokens - 1],
    };
    for bad in [0.0078125, f64::NAN] {
        let hit = |other: &str, at: &[usize]| other == name && at == place;
        let inputs = &trial.case.inputs;
        let inputs = change(inputs, |other, at, x| if hit(other, at) { bad } else { x })?;
        match trial.ask_with(&inputs) {
            Ok(_) => return Err(Flaw::Fail(format!("{name}{place:?} = {bad} was taken"))),
            Err(Flaw::Fail(text)) if text.starts_with("failed") => {}
            Err(flaw) => return Err(flaw),
        }
    }
    Ok(None)
}
