//! What etalon promises of bits: they depend on nothing but the one sequence and key head.

use super::flaw::{Judgement, refute};
use super::law::{ANY_PASS, EVERY, FIRST_ORDER, Kind, Law, SCORES};
use super::select::Selection;
use super::tensors::{Equality, difference};
use super::trial::Trial;
use crate::cases::Case;
use crate::tier::Hints;
use etalon_problem::{Axis, Pass, Problem, Sequences};

pub(super) const LAWS: &[Law] = &[
    Law {
        name: "determinism",
        statement: "Two runs, and runs on 1, 2, 3 and 7 threads, give the same bits.",
        kind: Kind::Contract,
        of: EVERY,
        passes: ANY_PASS,
        applies: |_, _| true,
        check: determinism,
    },
    Law {
        name: "batch_invariance",
        statement: "A batch element gives the same bits alone as in its batch.",
        kind: Kind::Contract,
        of: SCORES,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| case.problem.scores().is_some_and(|s| s.extents.batch > 1),
        check: batch_invariance,
    },
    Law {
        name: "head_invariance",
        statement: "A key head with its query heads gives the same bits alone and with others.",
        kind: Kind::Contract,
        of: SCORES,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| {
            case.problem.scores().is_some_and(|s| s.extents.key_heads > 1)
        },
        check: head_invariance,
    },
    Law {
        name: "sequence_invariance",
        statement: "A packed or padded sequence gives the same bits as its rows alone.",
        kind: Kind::Contract,
        of: SCORES,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| {
            case.problem.scores().is_some_and(|s| s.sequences != Sequences::Dense)
        },
        check: sequence_invariance,
    },
];

fn determinism(trial: &Trial<'_>) -> Judgement {
    let clean = trial.clean()?;
    for threads in [None, Some(1), Some(2), Some(3), Some(7)] {
        let hints = Hints { threads, ..Hints::default() };
        let again = trial.ask(&trial.case.problem, trial.inputs(), hints)?;
        for (name, tensor) in clean {
            let found = difference(name, &again[name], tensor, Equality::Bits, |_| true);
            let threads = threads.map_or("again".to_string(), |n| format!("{n} threads"));
            refute(found.map(|found| format!("{threads}: {found}")))?;
        }
    }
    Ok(None)
}

/// Runs a part alone and compares it with its place in the whole: outputs that have one of `axes`, of
/// which the part is some entries; the others are sums over more than the part.
fn same_alone(trial: &Trial<'_>, part: &Selection, axes: &[Axis], what: &str) -> Judgement {
    let (case, whole) = (trial.case, trial.clean()?);
    let scores = case.scores()?;
    let inputs = part.tensors(&case.problem, &case.inputs);
    let alone = trial.ask(&part.problem(&case.problem, scores), &inputs, Hints::default())?;
    for (name, tensor) in alone.iter().filter(|(name, _)| own(&case.problem, name, axes)) {
        let place = part.tensor(&case.problem, name, &whole[name]);
        let found = difference(name, &place, tensor, Equality::Bits, |_| true);
        refute(found.map(|found| format!("{what}: {found}")))?;
    }
    Ok(None)
}

/// Whether an output has one of these axes for itself, and not as a sum over it.
fn own(problem: &Problem, name: &str, axes: &[Axis]) -> bool {
    let Some(operand) = problem.operand(name) else { return false };
    axes.iter().any(|&axis| match axis {
        Axis::Batch if operand.has(Axis::BatchOr1) => {
            problem.extent(Axis::BatchOr1) == problem.extent(Axis::Batch)
        }
        Axis::QueryHeads if operand.has(Axis::QueryHeadsOr1) => {
            problem.extent(Axis::QueryHeadsOr1) == problem.extent(Axis::QueryHeads)
        }
        axis => operand.has(axis),
    })
}

fn batch_invariance(trial: &Trial<'_>) -> Judgement {
    let scores = trial.case.scores()?;
    for b in 0..scores.extents.batch {
        let part = Selection { batch: vec![b], ..Selection::all(scores) };
        same_alone(trial, &part, &[Axis::Batch], &format!("batch element {b}"))?;
    }
    Ok(None)
}

fn head_invariance(trial: &Trial<'_>) -> Judgement {
    let scores = trial.case.scores()?;
    let heads = [Axis::QueryHeads, Axis::KeyHeads];
    for h in 0..scores.extents.key_heads {
        let part = Selection { key_heads: vec![h], ..Selection::all(scores) };
        same_alone(trial, &part, &heads, &format!("key head {h}"))?;
    }
    Ok(None)
}

fn sequence_invariance(trial: &Trial<'_>) -> Judgement {
    let scores = trial.case.scores()?;
    for (s, sequence) in scores.sequences().into_iter().enumerate() {
        let rows = (
            sequence.query_start..sequence.query_start + sequence.queries,
            sequence.key_start..sequence.key_start + sequence.keys,
        );
        let part =
            Selection { batch: vec![sequence.batch], rows: Some(rows), ..Selection::all(scores) };
        same_alone(trial, &part, &[Axis::Batch], &format!("sequence {s}"))?;
    }
    Ok(None)
}
