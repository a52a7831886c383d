//! Laws of linear_attention.

mod forms;
mod identities;
mod sight;

use super::determinism::same_alone;
use super::flaw::{Flaw, Judgement};
use super::law::{BACKWARD, FORWARD, Kind, LINEAR_ATTENTION, Law};
use super::part::Part;
use super::tensors::change;
use super::trial::Trial;
use crate::cases::Case;
use crate::generate::Stream;
use crate::probes;
use etalon_problem::{Axis, Decay, Error, LinearAttention, Pass, Problem, TokenSequences};

pub(super) const LAWS: &[Law] = &[
    Law::new("integer_probe", Kind::Probe, LINEAR_ATTENTION, probes::linear_attention::integers)
        .says("With whole numbers and decays of 1 and 0 every result is exact to the last bit."),
    Law::new("euler_of_outputs", Kind::Meaning, LINEAR_ATTENTION, identities::euler_of_outputs)
        .says("⟨dq, q⟩ = σ dσ = ⟨dout, o⟩.")
        .on(BACKWARD),
    Law::new("euler_of_states", Kind::Meaning, LINEAR_ATTENTION, identities::euler_of_states)
        .says("⟨dk, k⟩ and ⟨dv, v⟩, with ⟨dH_0, H_0⟩, are ⟨dout, o⟩ + ⟨dH_n, H_n⟩.")
        .on(BACKWARD),
    Law::new("gradient_of_gates", Kind::Meaning, LINEAR_ATTENTION, identities::gradient_of_gates)
        .says("dg_t is Σ (q·dq − k·dk) from token t on, plus ⟨H_n, dH_n⟩, (R10).")
        .on(BACKWARD)
        .when(|case, _| decays(case, Decay::PerToken)),
    Law::new("doubling", Kind::Meaning, LINEAR_ATTENTION, forms::doubling)
        .says("Twice v and H_0 gives twice o and H_n; twice dout and dH_n twice every gradient.")
        .when(|case, _| forms::normal_range(case)),
    Law::new("scale_and_queries", Kind::Meaning, LINEAR_ATTENTION, forms::scale_and_queries)
        .says("Half of σ with twice q changes nothing but dq, which halves, and dσ, which doubles.")
        .when(|case, _| forms::normal_range(case)),
    Law::new("constant_gates", Kind::Meaning, LINEAR_ATTENTION, forms::constant_gates)
        .says(
            "A decay per head equals the same decay at every token; no decay equals a decay of 1.",
        )
        .when(|case, _| !decays(case, Decay::PerToken)),
    Law::new("shared_states", Kind::Meaning, LINEAR_ATTENTION, forms::shared_states)
        .says("A shared state gives the results of one copy for each query head.")
        .when(|case, _| linear(case).is_ok_and(|x| x.group() > 1)),
    Law::new("two_halves", Kind::Meaning, LINEAR_ATTENTION, forms::two_halves)
        .says("The first tokens, then the others from their final state, give the whole run.")
        .when(|case, _| dense_tokens(case).is_some_and(|tokens| tokens > 1)),
    Law::new("token_by_token", Kind::Meaning, LINEAR_ATTENTION, forms::token_by_token)
        .says("Steps, each from the previous state, give the forward pass.")
        .on(FORWARD)
        .when(|case, _| dense_tokens(case).is_some_and(|tokens| (1..=33).contains(&tokens))),
    Law::new("empty_sequences", Kind::Meaning, LINEAR_ATTENTION, sight::empty_sequences)
        .says("A sequence without tokens returns its state, and its gradient, unchanged.")
        .when(|case, pass| {
            linear(case).is_ok_and(|x| {
                let states = if pass == Pass::Forward { x.final_state } else { x.initial_state };
                states && x.list_sequences().iter().any(|s| s.tokens == 0)
            })
        }),
    Law::new("padded_tokens", Kind::Meaning, LINEAR_ATTENTION, sight::padded_tokens)
        .says("NaN in tokens outside every sequence changes nothing, and results there are 0.")
        .when(|case, _| linear(case).is_ok_and(|x| sight::padded(x) > 0)),
    Law::new("later_tokens", Kind::Meaning, LINEAR_ATTENTION, sight::later_tokens)
        .says(
            "NaN after a token does not reach its o or dq; NaN before it does not reach its dk or \
             dv.",
        )
        .when(|case, _| longest(case) > 1),
    Law::new("seen_tokens", Kind::Meaning, LINEAR_ATTENTION, sight::seen_tokens)
        .says("NaN in a key reaches o at its token and at every later token up to a reset.")
        .on(FORWARD)
        .when(|case, _| has_queries(case) && longest(case) > 0),
    Law::new("resets", Kind::Meaning, LINEAR_ATTENTION, sight::resets)
        .says("No value passes a log-decay of −∞, in either direction, not even NaN.")
        .when(|case, _| decays(case, Decay::PerToken) && longest(case) > 1),
    Law::new("alone", Kind::Contract, LINEAR_ATTENTION, alone)
        .says("A key head of one sequence gives the same bits alone and with others.")
        .when(|case, _| longest(case) > 0),
    Law::new("growth_is_refused", Kind::Contract, LINEAR_ATTENTION, growth_is_refused)
        .says("A log-decay that is positive or NaN is an error, not a result.")
        // Without query heads there may be no result for which a decay would be read.
        .when(|case, _| !decays(case, Decay::None) && longest(case) > 0 && has_queries(case)),
];

/// The problem of a case of linear_attention.
fn linear(case: &Case) -> Result<&LinearAttention, Error> {
    match &case.problem {
        Problem::LinearAttention(problem) => Ok(problem),
        other => Err(Error::value("algorithm", "linear_attention", other.algorithm())),
    }
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
        let part = Part::key_head(h, problem.group())
            .and(Axis::Batch, [s.batch])
            .and(Axis::Tokens, s.start..s.start + s.tokens)
            .and(Axis::Sequences, [s.index]);
        let which = format!("sequence {}, key head {h}", s.index);
        same_alone(trial, &part, &[Axis::Tokens, Axis::Sequences], &which)?;
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
        let inputs =
            change(
                &trial.case.inputs,
                |other, at, x| {
                    if other == name && at == place { bad } else { x }
                },
            )?;
        match trial.ask_with(&inputs) {
            Ok(_) => return Err(Flaw::Fail(format!("{name}{place:?} = {bad} was taken"))),
            Err(Flaw::Fail(text)) if text.starts_with("failed") => {}
            Err(flaw) => return Err(flaw),
        }
    }
    Ok(None)
}
