//! What explains a difference: candidates are made, evaluated as far as a budget goes, judged and ranked.

use super::answer::{Answer, Judged};
use super::candidate::{Candidate, Change, How, Place, Rank};
use super::judge::{Judge, Left};
use super::sample::Part;
use super::{Explanation, Kind, Tell, patterns};
use crate::cases::cost;
use crate::conventions::{Reading, all_readings};
use crate::tensor::{Values, usual, values};
use crate::tier::{Hints, Request};
use crate::tiers::ask;
use crate::zoo::{Host, Mutant, mutants};
use etalon_problem::{Dtype, Error, Pass, Problem};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Evaluations of a pass that the check of right results takes: the exact results and those of the forward
/// pass, the bounds as three, and simulated kernels.
const RIGHT: f64 = 5.0 + crate::typical::KERNELS as f64;

/// What explanations may take of what the rest of the check takes.
const SHARE: f64 = 0.5;

/// Products that nobody waits for: of a problem that takes fewer with all its candidates, everything is
/// evaluated.
const FEW: f64 = 2e9;

/// So many candidates a problem has, about.
const CANDIDATES: f64 = 100.0;

/// As many mutants and as many readings are named, and patterns of one output.
const NAMED: usize = 3;
const READINGS: usize = 6;

/// As many candidates that were not tried are named.
const SKIPPED: usize = 8;

/// Whether a problem is so small that other readings of it are evaluated as a whole, several at once.
pub fn explains(problem: &Problem) -> bool {
    CANDIDATES * cost(problem) <= FEW
}

/// Products of an evaluation of a pass, in those of the forward pass.
fn factor(pass: Pass) -> f64 {
    match pass {
        Pass::Forward | Pass::Step => 1.0,
        Pass::Jvp => 2.0,
        Pass::Backward => 2.5,
        Pass::ForwardBackward => 3.5,
        Pass::DoubleBackward => 6.0,
    }
}

/// Products that the check of right results takes.
pub(super) fn products_of_a_check(problem: &Problem, pass: Pass) -> f64 {
    RIGHT * factor(pass) * cost(problem)
}

/// What was found.
#[derive(Default)]
pub(super) struct Found {
    pub explanations: Vec<Explanation>,
    /// The parts on which readings were evaluated, where they were not on everything.
    pub parts: Vec<String>,
    pub not_tried: Option<String>,
    /// How many candidates were tried.
    pub tried: usize,
    /// Products that they took.
    pub products: f64,
}

/// What explains the outputs that are off, the best first.
pub(super) fn explain(
    request: &Request<'_>,
    answer: &Answer<'_>,
    tell: Tell<'_>,
) -> Result<Found, Error> {
    let judges: Vec<Judge<'_>> = answer.outputs.iter().map(Judge::new).collect();
    let mut found = Found::default();
    let mut ranked = Vec::new();
    for judge in &judges {
        let candidates = patterns::all(request.problem, judge);
        found.tried += candidates.len();
        let mut own: Vec<(Explanation, Place)> =
            candidates.iter().filter_map(|candidate| of_pattern(candidate, judge)).collect();
        own.sort_by(|x, y| x.1.order(&y.1));
        own.truncate(NAMED);
        ranked.extend(own);
    }
    let others = Others::new(request, answer)?;
    others.run(&mut found, &mut ranked, tell);
    ranked.sort_by(|x, y| x.1.order(&y.1));
    // Where something explains all of an output, nobody needs what explains a part or fits a number to each
    // row.
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
    let keep: Vec<bool> = ranked
        .iter()
        .map(|(x, place)| match x.output {
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

/// What a pattern explains: first in some rows, then in all.
fn of_pattern(candidate: &Candidate<'_>, judge: &Judge<'_>) -> Option<(Explanation, Place)> {
    let How::Change(change) = &candidate.how else { return None };
    let left = |change: &Change<'_>| judge.left(change.rows.iter().copied(), &change.at);
    candidate.explanation(&[(judge.output().operand.name, left(change))], &[])
}

/// Candidates other than patterns, and where they are evaluated.
struct Others<'a> {
    request: &'a Request<'a>,
    inputs: Values,
    parts: Vec<(Part, Answer<'a>)>,
    whole: &'a Answer<'a>,
    /// By rank and cost.
    candidates: Vec<Candidate<'a>>,
    budget: f64,
    /// Products that making the candidates took.
    made: f64,
}

impl<'a> Others<'a> {
    fn new(request: &'a Request<'a>, answer: &'a Answer<'a>) -> Result<Self, Error> {
        let &Request { problem, pass, dtype, inputs, .. } = request;
        let own = factor(pass) * cost(problem);
        let share = SHARE * products_of_a_check(problem, pass);
        let budget = if explains(problem) { share.max(FEW) } else { share };
        let readings = all_readings(problem, pass, dtype, inputs)?;
        let bugs = mutants().into_iter().filter(|x| x.of.contains(&problem.algorithm()));
        let bugs: Vec<Mutant> = bugs.collect();
        let all = (readings.len() + bugs.len()) as f64;
        let parts = match all * own <= budget.min(FEW) {
            true => Vec::new(),
            false => Part::all(problem, answer, SHARE * budget / all / factor(pass)),
        };
        let each: f64 = match parts.is_empty() {
            true => own,
            false => parts.iter().map(|part| factor(pass) * part.cost(problem)).sum(),
        };
        let reading = |reading: Reading| Candidate {
            kind: if reading.of.is_some() { Kind::Reading } else { Kind::Convention },
            id: reading.id.clone(),
            text: match reading.of {
                Some(_) => format!("{}. These are the results where {}", reading.id, reading.text),
                None => format!("these are the results of another convention: {}", reading.text),
            },
            rank: if reading.is_late { Rank::Input } else { Rank::Reading },
            cost: each,
            how: How::Reading(Box::new(reading)),
        };
        let bug = |mutant: Mutant| Candidate {
            kind: Kind::Mutant,
            id: mutant.name.to_string(),
            text: format!("as a kernel with this bug: {}", mutant.story),
            rank: Rank::Reading,
            cost: own,
            how: How::Mutant(mutant),
        };
        let mut candidates: Vec<Candidate<'_>> = readings.into_iter().map(reading).collect();
        candidates.extend(bugs.into_iter().map(bug));
        // Equal ones stay as they are: conventions first.
        candidates.sort_by(|x, y| x.rank.cmp(&y.rank).then(x.cost.total_cmp(&y.cost)));
        let parts = match parts.is_empty() {
            true => vec![Part::Whole],
            false => parts,
        };
        let parts = parts.into_iter().map(|part| {
            let own = match part {
                Part::Whole => {
                    Answer { outputs: answer.outputs.iter().map(Judged::borrowed).collect() }
                }
                _ => part.answer(answer),
            };
            (part, own)
        });
        let parts = parts.collect();
        let inputs = values(problem, pass, inputs)?;
        // Those of saved tensors evaluated the forward pass, perhaps twice.
        let made = if pass == Pass::Backward { 2.0 * cost(problem) } else { 0.0 };
        Ok(Others { made, request, inputs, parts, whole: answer, candidates, budget })
    }

    /// Tries the candidates, rank by rank, as far as the budget goes. Inputs that were taken from elsewhere
    /// are tried where nothing else explains all.
    fn run(&self, found: &mut Found, ranked: &mut Vec<(Explanation, Place)>, tell: Tell<'_>) {
        found.products = self.made;
        if !matches!(self.parts[0].0, Part::Whole) {
            found.parts = self.parts.iter().map(|(part, _)| part.describe()).collect();
        }
        let judges: Vec<Vec<Judge<'_>>> = self
            .parts
            .iter()
            .map(|(_, answer)| answer.outputs.iter().map(Judge::new).collect())
            .collect();
        let whole: Vec<Judge<'_>> = match self.parts[0].0 {
            Part::Whole => Vec::new(),
            _ => self.whole.outputs.iter().map(Judge::new).collect(),
        };
        let off: Vec<&str> =
            self.whole.outputs.iter().filter(|x| x.off() > 0).map(|x| x.operand.name).collect();
        let (mut skipped, done) = (Vec::new(), AtomicUsize::new(0));
        for rank in [Rank::Reading, Rank::Input] {
            let explained = |name: &&&str| {
                ranked.iter().any(|(x, place)| {
                    let own = x.output.is_none() || x.output == Some(**name);
                    own && !place.partial && !place.is_fitted()
                })
            };
            if rank == Rank::Input && off.iter().filter(explained).count() == off.len() {
                break;
            }
            let mut chosen = Vec::new();
            for candidate in self.candidates.iter().filter(|candidate| candidate.rank == rank) {
                if found.products + candidate.cost > self.budget {
                    skipped.push(candidate);
                    continue;
                }
                found.products += candidate.cost;
                chosen.push(candidate);
            }
            found.tried += chosen.len();
            let try_one = |candidate: &&Candidate<'_>| {
                tell(done.fetch_add(1, Ordering::Relaxed), self.candidates.len(), &candidate.id);
                let mut unseen: Vec<&str> = Vec::new();
                let lefts = match &candidate.how {
                    How::Reading(reading) => self.of_reading(reading, &judges),
                    How::Mutant(mutant) => {
                        self.of_mutant(*mutant, if whole.is_empty() { &judges[0] } else { &whole })?
                    }
                    How::Change(_) => return None,
                };
                let seen = |name: &&&str| !lefts.iter().any(|(other, _)| other == *name);
                unseen.extend(off.iter().filter(seen));
                candidate.explanation(&lefts, &unseen)
            };
            // A large problem is evaluated by all threads, and one evaluation at a time needs less memory.
            let large = !explains(self.request.problem) && matches!(self.parts[0].0, Part::Whole);
            match large {
                true => ranked.extend(chosen.iter().filter_map(try_one)),
                false => ranked.par_extend(chosen.par_iter().filter_map(try_one)),
            }
        }
        found.not_tried = not_tried(&skipped);
    }

    /// What a reading leaves of every output, over all parts.
    fn of_reading(
        &self,
        reading: &Reading,
        judges: &[Vec<Judge<'_>>],
    ) -> Vec<(&'static str, Left)> {
        let mut lefts: Vec<(&'static str, Left)> = Vec::new();
        for ((part, _), judges) in self.parts.iter().zip(judges) {
            let Some(results) = part.results(reading, self.request.pass, &self.inputs) else {
                continue;
            };
            add(&mut lefts, judges, &results);
        }
        lefts
    }

    fn of_mutant(&self, mutant: Mutant, judges: &[Judge<'_>]) -> Option<Vec<(&'static str, Left)>> {
        // The host of the zoo sums in f32 and takes no f64.
        let Request { problem, pass, dtype, inputs, .. } = *self.request;
        let dtype = if dtype == Dtype::F64 { Dtype::F32 } else { dtype };
        let inputs = usual(problem, pass, dtype, inputs).ok()?;
        let request = Request { inputs: &inputs, dtype, hints: Hints::default(), ..*self.request };
        let outputs = ask(&Host::mutant(mutant), &request).ok()?;
        let results: Result<Values, Error> =
            outputs.iter().map(|(name, x)| Ok((name.clone(), x.numbers(name)?))).collect();
        let mut lefts = Vec::new();
        add(&mut lefts, judges, &results.ok()?);
        Some(lefts)
    }
}

/// Adds what results leave of outputs; of a result of another shape, everything.
fn add(lefts: &mut Vec<(&'static str, Left)>, judges: &[Judge<'_>], results: &Values) {
    for judge in judges {
        let operand = &judge.output().operand;
        let other: Option<Vec<f64>> = results
            .get(operand.name)
            .filter(|other| other.shape() == operand.shape)
            .map(|other| other.iter().copied().collect());
        let rows = patterns::every_row(judge);
        let left = match other {
            Some(other) => judge.left(rows, |at| other[at]),
            // It says nothing of this output.
            None => judge.left(rows, |at| judge.exact()[at]),
        };
        match lefts.iter_mut().find(|(name, _)| *name == operand.name) {
            Some((_, all)) => all.join(&left),
            None => lefts.push((operand.name, left)),
        }
    }
}

/// What was left out, in words.
fn not_tried(skipped: &[&Candidate<'_>]) -> Option<String> {
    if skipped.is_empty() {
        return None;
    }
    let ids: Vec<&str> =
        skipped.iter().take(SKIPPED).map(|candidate| candidate.id.as_str()).collect();
    let more = skipped.len() - ids.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    Some(format!(
        "{} were not tried, as they would take longer than half of the rest of the check: {}{more}",
        match skipped.len() {
            1 => "1 explanation".to_string(),
            n => format!("{n} explanations"),
        },
        ids.join(", ")
    ))
}
