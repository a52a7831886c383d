//! Readings and known bugs as candidates: where they are evaluated, and how far the budget goes.

use super::Progress;
use super::answer::{Answer, Judged};
use super::budget::{FEW, Found, SHARE, explains, factor, products_of_a_check};
use super::candidate::{Candidate, How, Place, Rank};
use super::judge::{Judge, Left};
use super::sample::Part;
use super::{Explanation, Kind, patterns};
use crate::cases::cost;
use crate::conventions::{Reading, all_readings};
use crate::tensor::{Values, usual, values};
use crate::tier::{Hints, Request};
use crate::tiers::ask;
use crate::zoo::{Host, Mutant, mutants};
use etalon_problem::{Dtype, Error, Operand, Pass};
use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};

/// As many candidates that were not tried are named.
const SKIPPED: usize = 8;

/// Candidates other than patterns, and where they are evaluated.
pub(super) struct Others<'a> {
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
    pub fn new(request: &'a Request<'a>, answer: &'a Answer<'a>) -> Result<Self, Error> {
        let &Request { problem, pass, dtype, inputs, .. } = request;
        let own = factor(pass) * cost(problem);
        let share = SHARE * products_of_a_check(problem, pass);
        let budget = if explains(problem) { share.max(FEW) } else { share };
        let values = values(problem, pass, inputs)?;
        let mut readings = all_readings(problem, pass, dtype, inputs, &values);
        // Nobody needs what speaks of right outputs alone.
        let is_off = |name: &&'static str| {
            answer.outputs.iter().any(|output| output.operand.name == *name && output.off() > 0)
        };
        readings.retain(|reading| reading.only.is_empty() || reading.only.iter().any(is_off));
        let bugs = mutants().into_iter().filter(|x| x.of.contains(&problem.algorithm()));
        let bugs: Vec<Mutant> = bugs.collect();
        let all = readings.iter().map(Reading::evaluations).sum::<f64>() + bugs.len() as f64;
        let parts = match all * own <= budget.min(FEW) {
            true => Vec::new(),
            false => Part::all(problem, answer, SHARE * budget / all / factor(pass)),
        };
        let each: f64 = match parts.is_empty() {
            true => own,
            false => parts.iter().map(|part| factor(pass) * part.cost(problem)).sum(),
        };
        let mut candidates: Vec<Candidate<'_>> =
            readings.into_iter().map(|reading| of_reading(reading, each)).collect();
        candidates.extend(bugs.into_iter().map(|mutant| of_mutant(mutant, own)));
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
        // Readings of saved tensors evaluated the forward pass, perhaps twice.
        let made = if pass == Pass::Backward { 2.0 * cost(problem) } else { 0.0 };
        Ok(Others { made, request, inputs: values, parts, whole: answer, candidates, budget })
    }

    /// Inputs that have the shape of an output that is off, in row-major order.
    pub fn inputs_like(&self, judges: &[Judge<'_>]) -> Vec<(&'static str, &[f64])> {
        let operands = self.request.problem.operands(self.request.pass);
        let given = operands.into_iter().filter(|operand| operand.role.is_given());
        let off = |operand: &Operand| {
            judges
                .iter()
                .map(Judge::output)
                .any(|x| x.off() > 0 && x.operand.shape == operand.shape)
        };
        given
            .filter(off)
            .filter_map(|x| Some((x.name, self.inputs.get(x.name)?.as_slice()?)))
            .collect()
    }

    /// Tries the candidates, rank by rank, as far as the budget goes. Inputs that were taken from elsewhere
    /// are tried where nothing else explains all.
    pub fn run(
        &self,
        found: &mut Found,
        ranked: &mut Vec<(Explanation, Place)>,
        progress: Progress<'_>,
    ) {
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
                progress(
                    done.fetch_add(1, Ordering::Relaxed),
                    self.candidates.len(),
                    &candidate.id,
                );
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

    /// Difference of every output from a reading, over all parts.
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

/// A reading as a candidate, where one evaluation takes so many products.
fn of_reading<'a>(reading: Reading, products: f64) -> Candidate<'a> {
    Candidate {
        kind: if reading.of.is_some() { Kind::Reading } else { Kind::Convention },
        id: reading.id.clone(),
        text: match reading.of {
            Some(_) => format!("{}. These are the results where {}", reading.id, reading.text),
            None => format!("these are the results of another convention: {}", reading.text),
        },
        rank: if reading.is_late { Rank::Input } else { Rank::Reading },
        cost: products * reading.evaluations(),
        in_proportion: false,
        how: How::Reading(Box::new(reading)),
    }
}

/// A known bug as a candidate.
fn of_mutant<'a>(mutant: Mutant, cost: f64) -> Candidate<'a> {
    Candidate {
        kind: Kind::Mutant,
        id: mutant.name.to_string(),
        text: format!("as a kernel with this bug: {}", mutant.story),
        rank: Rank::Reading,
        cost,
        in_proportion: false,
        how: How::Mutant(mutant),
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

/// Names of the skipped candidates, in words.
fn not_tried(skipped: &[&Candidate<'_>]) -> Option<String> {
    if skipped.is_empty() {
        return None;
    }
    let ids: Vec<&str> =
        skipped.iter().take(SKIPPED).map(|candidate| candidate.id.as_str()).collect();
    let more = skipped.len() - ids.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    Some(format!(
        "{} were not tried, as they would take longer than {:.0} % of the rest of the check: {}{more}",
        match skipped.len() {
            1 => "1 explanation".to_string(),
            n => format!("{n} explanations"),
        },
        100.0 * SHARE,
        ids.join(", ")
    ))
}
