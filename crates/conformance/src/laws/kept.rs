//! A kept workspace: what calls before have left in it decides no bit.

use super::flaw::{Flaw, Judgement};
use super::law::{laws, many_ways};
use super::tensors::{Equality, same};
use super::trial::{Trial, Turn};
use crate::cases::Case;
use crate::tensor::Tensors;
use crate::tier::{Cuts, Hints};
use etalon_problem::{Algorithm, Mask, Pass, Problem, Scores, Sequences, TokenSequences};

laws! {
    EVERY;
    /// A pass gives the same bits, time and again, in a workspace that holds what calls of other shapes and
    /// options have left, and in one that holds NaN.
    Contract kept_workspace on Any asks Workspace, favour many_ways;
}

/// In one workspace: a call of another shape, one of the same shape with other options, the pass, and the
/// pass again, when all that the workspace has is NaN.
fn kept_workspace(trial: &Trial<'_>) -> Judgement {
    let (case, pass) = (trial.case, trial.pass);
    let other = other_shape(case);
    let altered = other_options(&case.problem);
    let cross_entropy = case.spec.algorithm == Algorithm::LinearCrossEntropy;
    let sharded = cross_entropy && matches!(pass, Pass::Forward | Pass::Backward);
    let hints = [None, sharded.then_some(Cuts::Nodes)];
    for (number, shards) in hints.into_iter().enumerate().filter(|(n, x)| *n == 0 || x.is_some()) {
        let hints = Hints { shards, ..Hints::default() };
        let turn = |problem, inputs| Turn { problem, inputs, hints };
        let mut turns = Vec::new();
        turns.extend(other.as_ref().map(|other| turn(&other.problem, other.inputs_of(pass))));
        turns.push(turn(&altered, trial.inputs()));
        turns.push(turn(&case.problem, trial.inputs()));
        let stale = Some(f64::NAN);
        let again = Turn { hints: Hints { stale, ..hints }, ..turns[turns.len() - 1] };
        turns.push(again);
        let answers = trial.ask_in_turn(&turns)?;
        let way = if number == 0 { "" } else { " in shards" };
        let last = answers.iter().rev().zip(["NaN", "what other calls left"]);
        for (outputs, what) in last {
            expect(trial, outputs, shards.is_some())
                .map_err(|flaw| flaw.of(&format!("over {what}{way}")))?;
        }
    }
    Ok(None)
}

/// Fails unless outputs have the bits of the case as it is; of shards dh may be summed in another order.
fn expect(trial: &Trial<'_>, outputs: &Tensors, shards: bool) -> Result<(), Flaw> {
    let counts =
        |name: &str, _: &[usize]| name != "dh" || !shards || trial.tier.sums_dh_along_the_tree();
    same(outputs, trial.clean()?, Equality::Bits, counts).map(|_| ())
}

/// A small case of another shape, in the same storage type.
fn other_shape(case: &Case) -> Option<Case> {
    let shape = match case.spec.algorithm {
        Algorithm::LinearCrossEntropy => "ragged",
        _ => "groups",
    };
    let other = case.spec.with(&[("shape", shape)])?.build();
    (other.problem != case.problem).then_some(other)
}

/// A problem whose tensors have the same shapes, and which computes something else.
fn other_options(problem: &Problem) -> Problem {
    let mut other = problem.clone();
    match &mut other {
        Problem::LinearAttention(x) => {
            x.scale = 0.37 - x.scale;
            x.sequences = match &x.sequences {
                TokenSequences::Dense => {
                    let tokens = vec![x.extents.tokens / 2; x.extents.batch];
                    TokenSequences::Lengths { tokens }
                }
                TokenSequences::Lengths { tokens } => {
                    let rest = |n: &usize| x.extents.tokens - n;
                    TokenSequences::Lengths { tokens: tokens.iter().map(rest).collect() }
                }
                TokenSequences::Packed { cu_tokens } => {
                    TokenSequences::Packed { cu_tokens: mirrored(cu_tokens) }
                }
            };
        }
        Problem::LinearCrossEntropy(x) => {
            x.logit_scale = 0.37 - x.logit_scale;
            x.label_smoothing = if x.label_smoothing == 0.0 { 0.2 } else { 0.0 };
        }
        _ => other.scores_mut().into_iter().for_each(alter),
    }
    other
}

/// Another mask, scale and division into sequences.
fn alter(scores: &mut Scores) {
    scores.mask = if scores.mask == Mask::Full { Mask::causal() } else { Mask::Full };
    scores.softmax_scale = Some(0.37 - scores.softmax_scale.unwrap_or(0.0));
    let e = scores.extents;
    scores.sequences = match &scores.sequences {
        Sequences::Dense => Sequences::Lengths {
            query: vec![e.queries / 2; e.batch],
            key: vec![e.keys.div_ceil(2); e.batch],
        },
        Sequences::Lengths { query, key } => Sequences::Lengths {
            query: query.iter().map(|n| e.queries - n).collect(),
            key: key.iter().map(|n| e.keys - n).collect(),
        },
        Sequences::Packed { cu_query, cu_key } => {
            Sequences::Packed { cu_query: mirrored(cu_query), cu_key: mirrored(cu_key) }
        }
    };
}

/// The same sequences in reverse order.
fn mirrored(cuts: &[usize]) -> Vec<usize> {
    let last = cuts.last().copied().unwrap_or(0);
    cuts.iter().rev().map(|cut| last - cut).collect()
}
