//! Other answers that results may be: those of another convention, or of a kernel with a known bug.

use super::answer::Answer;
use super::{Explanation, Kind, LEFT, by_rest};
use crate::cases::cost;
use crate::conventions::{Reading, readings};
use crate::tensor::{Values, usual};
use crate::tier::{Hints, Request};
use crate::tiers::ask;
use crate::zoo::{Host, mutants};
use etalon_problem::{Dtype, Error, Problem};
use rayon::prelude::*;

/// Problems of more products than this are evaluated once, but not for every suspect.
const MOST: f64 = 3e8;

/// As many mutants are named.
const NAMED: usize = 3;

/// Whether a problem is small enough for other readings of it and for known bugs to be tried.
pub fn explains(problem: &Problem) -> bool {
    cost(problem) <= MOST
}

/// What leaves little of the difference; and why nothing was tried, if so.
pub(super) fn all(
    request: &Request<'_>,
    answer: &Answer<'_>,
) -> (Vec<Explanation>, Option<String>) {
    if !explains(request.problem) {
        let cost = cost(request.problem);
        let text = format!(
            "other conventions and known bugs were not tried: the problem takes {cost:.0e} products, \
             and up to {MOST:.0e} they are"
        );
        return (Vec::new(), Some(text));
    }
    let mut found = conventions(request, answer);
    found.extend(bugs(request, answer));
    (found, None)
}

fn conventions(request: &Request<'_>, answer: &Answer<'_>) -> Vec<Explanation> {
    let readings = readings(request.problem, request.inputs);
    let explanation = |reading: Reading| {
        let left = answer.left(&reading.results(request.problem, request.pass).ok()?)?;
        let Reading { id, text, .. } = reading;
        let text = format!("these are the results of another convention: {text}");
        Some(Explanation { kind: Kind::Convention, id, output: None, text, left: Some(left) })
    };
    readings.into_par_iter().filter_map(explanation).filter(|x| x.left <= Some(LEFT)).collect()
}

/// The mutants that leave least; those that return the same stand together.
fn bugs(request: &Request<'_>, answer: &Answer<'_>) -> Vec<Explanation> {
    let algorithm = request.problem.algorithm();
    let mutants: Vec<_> =
        mutants().into_iter().filter(|mutant| mutant.of.contains(&algorithm)).collect();
    // The host of the zoo sums in f32 and takes no f64.
    let dtype = if request.dtype == Dtype::F64 { Dtype::F32 } else { request.dtype };
    let Ok(inputs) = usual(request.problem, request.pass, dtype, request.inputs) else {
        return Vec::new();
    };
    let request = Request { inputs: &inputs, dtype, hints: Hints::default(), ..*request };
    let explanation = |mutant: crate::zoo::Mutant| {
        let outputs = ask(&Host::mutant(mutant), &request).ok()?;
        let outputs: Result<Values, Error> =
            outputs.iter().map(|(name, x)| Ok((name.clone(), x.numbers(name)?))).collect();
        let left = answer.left(&outputs.ok()?)?;
        let (id, text) = (mutant.name, format!("as a kernel with this bug: {}", mutant.story));
        Some(Explanation { kind: Kind::Mutant, id, output: None, text, left: Some(left) })
    };
    let mut found: Vec<Explanation> =
        mutants.into_par_iter().filter_map(explanation).filter(|x| x.left <= Some(LEFT)).collect();
    found.sort_by(by_rest);
    found.truncate(NAMED);
    found
}
