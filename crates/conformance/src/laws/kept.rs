//! A kept workspace: what calls before have left in it decides no bit.

use super::flaw::Judgement;
use super::law::{DEAR, laws, many_ways};
use super::tensors::{Equality, same};
use super::trial::{Trial, Turn};
use crate::cases::Case;
use crate::generate::Stream;
use crate::tier::{Cuts, Hints};
use etalon_problem::{Algorithm, Mask, Pass, Problem, Scores, Sequences, TokenSequences};

laws! {
    EVERY;
    /// A pass gives the same bits, time and again, in a workspace that holds what calls of other shapes and
    /// options have left, and in one that holds NaN.
    Contract kept_workspace on Any asks Workspace, favour many_ways, core DEAR;
}

fn kept_workspace(trial: &Trial<'_>) -> Judgement {
    in_one(trial, None)?;
    let cross_entropy = trial.case.spec.algorithm == Algorithm::LinearCrossEntropy;
    if cross_entropy && matches!(trial.pass, Pass::Forward | Pass::Backward) {
        in_one(trial, Some(Cuts::Nodes)).map_err(|flaw| flaw.of("in shards"))?;
    }
    Ok(None)
}

/// In one workspace: a call of another shape or, in every other case, one of the same shape with other
/// options, then the pass, and the pass again, when all that the workspace has is NaN. Of shards dh may be
/// summed in another order.
fn in_one(trial: &Trial<'_>, shards: Option<Cuts>) -> Judgement {
    let (case, pass) = (trial.case, trial.pass);
    let coin = Stream::new(case.spec.seed, &case.name).below(3000, 2);
    let other = if coin == 0 { other_shape(case) } else { None };
    let altered = other_options(&case.problem);
    let hints = Hints { shards, ..Hints::default() };
    let turn = |problem, inputs, stale| Turn { problem, inputs, hints: Hints { stale, ..hints } };
    let before = match &other {
        Some(other) => turn(&other.problem, other.inputs_of(pass), None),
        None => turn(&altered, trial.inputs(), None),
    };
    let again = |stale| turn(&case.problem, trial.inputs(), stale);
    let turns = [before, again(None), again(Some(f64::NAN))];
    let answers = trial.ask_in_turn(&turns)?;
    let along_the_tree = shards.is_none() || trial.tier.sums_dh_along_the_tree();
    let counts = |name: &str, _: &[usize]| along_the_tree || name != "dh";
    for (outputs, what) in answers.iter().rev().zip(["NaN", "what other calls left"]) {
        same(outputs, trial.clean()?, Equality::Bits, counts)
            .map_err(|flaw| flaw.of(&format!("over {what}")))?;
    }
    Ok(None)
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
