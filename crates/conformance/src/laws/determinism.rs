//! Promises of etalon about bits: they depend on nothing but the one sequence and key head.

use super::compare::{Strict, TWICE, allowance, close};
use super::flaw::{Judgement, worst};
use super::law::{DEAR, laws, many_ways, scores_are};
use super::part::Part;
use super::tensors::{Equality, everywhere, same};
use super::trial::Trial;
use crate::tier::Hints;
use etalon_problem::{Axis, Mode, Problem, Sequences};

laws! {
    SCORES;
    /// Two runs, and runs on 1, 2, 3 and 7 threads, give the same bits.
    Contract determinism of EVERY on Any, favour many_ways, core DEAR;
    /// Partial sums of dq that have other memory, as little as a byte, give the same bits.
    Contract partials on Backward asks Partials, favour many_ways;
    /// A batch element gives the same bits alone as in its batch.
    Contract batch_invariance
        if |case, _| scores_are(case, |s| s.extents.batch > 1), favour many_ways;
    /// A key head with its query heads gives the same bits alone and with others.
    Contract head_invariance
        if |case, _| scores_are(case, |s| s.extents.key_heads > 1), favour many_ways;
    /// A packed or padded sequence gives the same bits as its rows alone.
    Contract sequence_invariance
        if |case, _| scores_are(case, |s| s.sequences != Sequences::Dense), favour many_ways;
}

fn determinism(trial: &Trial<'_>) -> Judgement {
    let threads = [None, Some(1), Some(3), Some(2), Some(7)];
    let most = if trial.case.spec.is_large() { 3 } else { threads.len() };
    for threads in threads.into_iter().take(most) {
        let again = trial.ask_hinted(Hints { threads, ..Hints::default() })?;
        let threads = threads.map_or("again".to_string(), |n| format!("{n} threads"));
        same(&again, trial.clean()?, Equality::Bits, everywhere)
            .map_err(|flaw| flaw.of(&threads))?;
    }
    Ok(None)
}

fn partials(trial: &Trial<'_>) -> Judgement {
    let ask = |partials_budget| {
        let mode = Mode::FusedPartials;
        trial.ask_hinted(Hints { mode, partials_budget, ..Hints::default() })
    };
    let usual = ask(None)?;
    for bytes in [1, 50_000] {
        same(&ask(Some(bytes))?, &usual, Equality::Bits, everywhere)
            .map_err(|flaw| flaw.of(&format!("{bytes} bytes")))?;
    }
    Ok(None)
}

/// Runs a part alone and compares it with its place in the whole: outputs that it cuts along one of
/// `axes`; the others are sums over more than the part. No bound of the part is larger than that of the whole.
pub(super) fn same_alone(
    trial: &Trial<'_>,
    strict: Strict,
    part: &Part,
    axes: &[Axis],
    what: &str,
) -> Judgement {
    let own = part.problem(&trial.case.problem);
    same_as(trial, strict, (part, &own), axes, what)
}

/// The same of a part whose problem says in another way what is visible.
pub(super) fn same_as(
    trial: &Trial<'_>,
    strict: Strict,
    (part, own): (&Part, &Problem),
    axes: &[Axis],
    what: &str,
) -> Judgement {
    let (problem, inputs) = (&trial.case.problem, &trial.case.inputs);
    let mut alone = trial.ask(own, &part.tensors(problem, inputs))?;
    alone.retain(|name, _| part.cuts_along(problem, name, axes));
    let places = part.tensors(problem, trial.clean()?);
    let judged = match strict {
        Strict::Bits => same(&places, &alone, Equality::Bits, everywhere),
        Strict::Bound => worst(alone.iter().map(|(name, alone)| {
            let limit =
                part.array(problem, name, &allowance(&trial.bounds()?.outputs[name])) * TWICE;
            close(name, &places[name].numbers(name)?, &alone.numbers(name)?, &limit)
        })),
    };
    judged.map_err(|flaw| flaw.of(what))
}

fn batch_invariance(trial: &Trial<'_>) -> Judgement {
    for b in 0..trial.case.scores()?.extents.batch {
        let part = Part::of(Axis::Batch, [b]);
        same_alone(trial, Strict::Bits, &part, &[Axis::Batch], &format!("batch element {b}"))?;
    }
    Ok(None)
}

fn head_invariance(trial: &Trial<'_>) -> Judgement {
    let scores = trial.case.scores()?;
    for h in 0..scores.extents.key_heads {
        let part = Part::key_head(h, scores.group());
        let heads = [Axis::QueryHeads, Axis::KeyHeads];
        same_alone(trial, Strict::Bits, &part, &heads, &format!("key head {h}"))?;
    }
    Ok(None)
}

fn sequence_invariance(trial: &Trial<'_>) -> Judgement {
    for (i, s) in trial.case.scores()?.sequences().into_iter().enumerate() {
        same_alone(
            trial,
            Strict::Bits,
            &Part::sequence(&s),
            &[Axis::Batch],
            &format!("sequence {i}"),
        )?;
    }
    Ok(None)
}
