//! Explanations of a difference: candidates are made, evaluated as far as a budget goes, judged and ranked.

use super::answer::Answer;
use super::budget::Found;
use super::candidate::{Candidate, How, Place};
use super::judge::Judge;
use super::others::Others;
use super::{Explanation, Kind, Progress, patterns};
use crate::tier::Request;
use etalon_problem::Error;
use std::collections::{BTreeMap, BTreeSet};

/// As many mutants and as many readings are named, and patterns of one output.
const NAMED: usize = 3;
const READINGS: usize = 6;

/// Explanations of the outputs that are off, the best first.
pub(super) fn explain(
    request: &Request<'_>,
    answer: &Answer<'_>,
    progress: Progress<'_>,
) -> Result<Found, Error> {
    let judges: Vec<Judge<'_>> = answer.outputs.iter().map(Judge::new).collect();
    let mut found = Found::default();
    let mut ranked = Vec::new();
    let others = Others::new(request, answer)?;
    let inputs = others.inputs_like(&judges);
    for judge in &judges {
        let candidates = patterns::all(request.problem, judge, &judges, &inputs);
        found.tried += candidates.len();
        let mut own: Vec<(Explanation, Place)> =
            candidates.iter().filter_map(|candidate| of_pattern(candidate, judge)).collect();
        own.sort_by(|x, y| x.1.order(&y.1));
        // A number with a name, and nearly the same one without.
        let mut seen = BTreeSet::new();
        own.retain(|(x, _)| seen.insert(x.id.clone()));
        own.truncate(NAMED);
        ranked.extend(own);
    }
    others.run(&mut found, &mut ranked, progress);
    ranked.sort_by(|x, y| x.1.order(&y.1));
    // An explanation of all of an output makes those of a part, and those that fit a number to each row, superfluous.
    let whole = |(x, place): &(Explanation, Place), name: &str| {
        let own = x.output.is_none() || x.output == Some(name);
        own && !place.partial && !place.is_fitted()
    };
    let known: Vec<&str> = judges
        .iter()
        .filter(|judge| judge.output().off() > 0)
        .map(|judge| judge.output().operand.name)
        .filter(|name| ranked.iter().any(|x| whole(x, name)))
        .collect();
    let off = judges.iter().filter(|judge| judge.output().off() > 0).count();
    // Another explanation of the same outputs.
    let same = |x: &Explanation, other: &Explanation| {
        other.output.is_none() || x.output == other.output || x.output.is_none() && off == 1
    };
    let beaten = |x: &Explanation, place: &Place| {
        ranked.iter().any(|(other, its)| same(x, other) && place.is_beaten_by(its))
    };
    let keep: Vec<bool> = ranked
        .iter()
        .map(|(x, place)| match x.output {
            _ if beaten(x, place) => false,
            _ if !place.partial && !place.is_fitted() => true,
            Some(name) => !known.contains(&name),
            None => known.len() < off,
        })
        .collect();
    let mut kinds = BTreeMap::<u8, usize>::new();
    for ((explanation, _), keep) in ranked.into_iter().zip(keep) {
        let named = kinds.entry(explanation.kind as u8).or_default();
        let most = match explanation.kind {
            Kind::Pattern => usize::MAX,
            Kind::Convention | Kind::Reading => READINGS,
            Kind::Mutant => NAMED,
        };
        if keep && *named < most {
            *named += 1;
            found.explanations.push(explanation);
        }
    }
    Ok(found)
}

/// The part of the visited rows that a pattern explains.
fn of_pattern(candidate: &Candidate<'_>, judge: &Judge<'_>) -> Option<(Explanation, Place)> {
    let How::Change(change) = &candidate.how else { return None };
    let rows = change.rows.iter().copied();
    let left = match candidate.in_proportion {
        true => judge.left_in_proportion(rows, &change.at),
        false => judge.left(rows, &change.at),
    };
    candidate.explanation(&[(judge.output().operand.name, left)], &[])
}
