//! Laws of linear_attention.

mod forms;
mod identities;
mod parts;
mod probe;
mod sight;

use super::flaw::{Flaw, Judgement};
use super::law::{FIRST_ORDER, Kind, LINEAR_ATTENTION, Law};
use super::trial::Trial;
use crate::cases::Case;
use crate::tier::Hints;
use etalon_problem::{Decay, LinearAttention, Pass, TokenSequences};
use parts::linear;

pub(super) const LAWS: &[Law] = &[
    Law {
        name: "integer_probe",
        statement: "With whole numbers and decays of 1 and 0 every result is exact to the last bit.",
        kind: Kind::Probe,
        of: LINEAR_ATTENTION,
        passes: FIRST_ORDER,
        applies: |_, _| true,
        check: probe::integers,
    },
    Law {
        name: "euler_of_outputs",
        statement: "⟨dq, q⟩ = σ dσ = ⟨dout, o⟩.",
        kind: Kind::Meaning,
        of: LINEAR_ATTENTION,
        passes: &[Pass::Backward],
        applies: |_, _| true,
        check: identities::euler_of_outputs,
    },
    Law {
        name: "euler_of_states",
        statement: "⟨dk, k⟩ and ⟨dv, v⟩, with ⟨dH_0, H_0⟩, are ⟨dout, o⟩ + ⟨dH_n, H_n⟩.",
        kind: Kind::Meaning,
        of: LINEAR_ATTENTION,
        passes: &[Pass::Backward],
        applies: |_, _| true,
        check: identities::euler_of_states,
    },
    Law {
        name: "gradient_of_gates",
        statement: "dg_t is Σ (q·dq − k·dk) from token t on, plus ⟨H_n, dH_n⟩, (R10).",
        kind: Kind::Meaning,
        of: LINEAR_ATTENTION,
        passes: &[Pass::Backward],
        applies: |case, _| decays(case, Decay::PerToken),
        check: identities::gradient_of_gates,
    },
    Law {
        name: "doubling",
        statement: "Twice v and H_0 gives twice o and H_n; twice dout and dH_n twice every gradient.",
        kind: Kind::Meaning,
        of: LINEAR_ATTENTION,
        passes: FIRST_ORDER,
        applies: |case, _| forms::normal_range(case),
        check: forms::doubling,
    },
    Law {
        name: "scale_and_queries",
        statement: "Half of σ with twice q changes nothing but dq, which halves, and dσ, which doubles.",
        kind: Kind::Meaning,
        of: LINEAR_ATTENTION,
        passes: FIRST_ORDER,
        applies: |case, _| forms::normal_range(case),
        check: forms::scale_and_queries,
    },
    Law {
        name: "constant_gates",
        statement: "A decay per head equals the same decay at every token; no decay equals a decay of 1.",
        kind: Kind::Meaning,
        of: LINEAR_ATTENTION,
        passes: FIRST_ORDER,
        applies: |case, _| !decays(case, Decay::PerToken),
        check: forms::constant_gates,
    },
    Law {
        name: "shared_states",
        statement: "A shared state gives the results of one copy for each query head.",
        kind: Kind::Meaning,
        of: LINEAR_ATTENTION,
        passes: FIRST_ORDER,
        applies: |case, _| linear(case).is_ok_and(|x| x.group() > 1),
        check: forms::shared_states,
    },
    Law {
        name: "two_halves",
        statement: "The first tokens, then the others from their final state, give the whole run.",
        kind: Kind::Meaning,
        of: LINEAR_ATTENTION,
        passes: FIRST_ORDER,
        applies: |case, _| {
            linear(case).is_ok_and(|x| x.sequences == TokenSequences::Dense && x.extents.tokens > 1)
        },
        check: forms::two_halves,
    },
    Law {
        name: "token_by_token",
        statement: "Steps, each from the previous state, give the forward pass.",
        kind: Kind::Meaning,
        of: LINEAR_ATTENTION,
        passes: &[Pass::Forward],
        applies: |case, _| {
            linear(case).is_ok_and(|x| {
                x.sequences == TokenSequences::Dense && (1..=33).contains(&x.extents.tokens)
            })
        },
        check: forms::token_by_token,
    },
    Law {
        name: "empty_sequences",
        statement: "A sequence without tokens returns its state, and its gradient, unchanged.",
        kind: Kind::Meaning,
        of: LINEAR_ATTENTION,
        passes: FIRST_ORDER,
        applies: |case, pass| {
            let empty = |x: &LinearAttention| x.list_sequences().iter().any(|s| s.tokens == 0);
            let states = |x: &LinearAttention| match pass {
                Pass::Forward => x.final_state,
                Pass::Backward => x.initial_state,
                _ => false,
            };
            linear(case).is_ok_and(|x| states(x) && empty(x))
        },
        check: sight::empty_sequences,
    },
    Law {
        name: "padded_tokens",
        statement: "NaN in tokens outside every sequence changes nothing, and results there are 0.",
        kind: Kind::Meaning,
        of: LINEAR_ATTENTION,
        passes: FIRST_ORDER,
        applies: |case, _| linear(case).is_ok_and(|x| sight::padded(x) > 0),
        check: sight::padded_tokens,
    },
    Law {
        name: "later_tokens",
        statement: "NaN after a token does not reach its o or dq; NaN before it does not reach its dk or dv.",
        kind: Kind::Meaning,
        of: LINEAR_ATTENTION,
        passes: FIRST_ORDER,
        applies: |case, _| longest(case) > 1,
        check: sight::later_tokens,
    },
    Law {
        name: "seen_tokens",
        statement: "NaN in a key reaches o at its token and at every later token up to a reset.",
        kind: Kind::Meaning,
        of: LINEAR_ATTENTION,
        passes: &[Pass::Forward],
        applies: |case, _| {
            let heads = linear(case).is_ok_and(|x| x.extents.query_heads > 0);
            heads && longest(case) > 0
        },
        check: sight::seen_tokens,
    },
    Law {
        name: "resets",
        statement: "No value passes a log-decay of −∞, in either direction, not even NaN.",
        kind: Kind::Meaning,
        of: LINEAR_ATTENTION,
        passes: FIRST_ORDER,
        applies: |case, _| decays(case, Decay::PerToken) && longest(case) > 1,
        check: sight::resets,
    },
    Law {
        name: "alone",
        statement: "A key head of one sequence gives the same bits alone and with others.",
        kind: Kind::Contract,
        of: LINEAR_ATTENTION,
        passes: FIRST_ORDER,
        applies: |case, _| longest(case) > 0,
        check: parts::alone,
    },
    Law {
        name: "growth_is_refused",
        statement: "A log-decay that is positive or NaN is an error, not a result.",
        kind: Kind::Contract,
        of: LINEAR_ATTENTION,
        passes: FIRST_ORDER,
        // Without query heads there may be no result for which a decay would be read.
        applies: |case, _| {
            let heads = linear(case).is_ok_and(|problem| problem.extents.query_heads > 0);
            !decays(case, Decay::None) && longest(case) > 0 && heads
        },
        check: growth_is_refused,
    },
];

fn decays(case: &Case, decay: Decay) -> bool {
    linear(case).is_ok_and(|problem| problem.decay == decay)
}

/// The tokens of the longest sequence.
fn longest(case: &Case) -> usize {
    let lengths = linear(case).map(|x| x.list_sequences().iter().map(|s| s.tokens).max());
    lengths.ok().flatten().unwrap_or(0)
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
        let mut inputs = trial.case.inputs.clone();
        let changed =
            super::tensors::map(&inputs[name], |at, x| if at == place { bad } else { x })?;
        inputs.insert(name.to_string(), changed);
        match trial.ask(&trial.case.problem, &inputs, Hints::default()) {
            Ok(_) => {
                return Err(Flaw::Fail(format!("{name}{place:?} = {bad} was taken")));
            }
            Err(Flaw::Fail(text)) if text.starts_with("failed") => {}
            Err(flaw) => return Err(flaw),
        }
    }
    Ok(None)
}
