//! Wrong results of kinds that public reports have, computed by kernels with the mistake: each is explained by what
//! is true, and nothing else is said beside it.

mod attention;
mod backward;
mod kernel;
mod lazy_attention;
mod linear_attention;
mod linear_cross_entropy;
mod moved;

use crate::bench::Bench;
use etalon_conformance::check::Explanation;
use etalon_conformance::tensor::Tensors;

/// The share of a difference that a whole explanation may leave: roundings to bf16.
const LEFT: f64 = 0.02;

/// A mistake of a kind that public reports have.
pub struct Bug {
    /// The mistake.
    pub story: &'static str,
    /// The explanation that must be given, then others of a part that are true, too; an end with `*` stands for
    /// the rest of a name. Empty: nothing can be said.
    pub ids: &'static [&'static str],
    /// A question and what the kernel answers.
    pub make: fn() -> (Bench, Tensors),
}

/// The explanations of a check of a bug, and their fault, if there is one.
fn verdict(bug: &Bug) -> (Vec<String>, Option<String>) {
    let (bench, got) = (bug.make)();
    let check = bench.check(&got);
    let ids: Vec<String> = check.explanations.iter().map(|x| x.id.clone()).collect();
    let all: Vec<_> =
        check.explanations.iter().map(|x| (&x.id, &x.output, x.left, &x.part)).collect();
    let fits = |id: &str, name: &str| match name.strip_suffix('*') {
        Some(start) => id.starts_with(start),
        None => id == name,
    };
    // Explanations that leave nothing have the results of the bug, whatever their name.
    let known = |x: &&Explanation| {
        let whole = x.part.is_none() && x.left.is_some_and(|left| left < LEFT);
        whole || bug.ids.iter().any(|name| fits(&x.id, name))
    };
    let wrong = match () {
        () if check.passed => Some("it passed".to_string()),
        () if bug.ids.is_empty() && ids.is_empty() => {
            check.next.is_none().then(|| "no next step".to_string())
        }
        () if bug.ids.first().is_some_and(|name| !ids.iter().any(|id| fits(id, name))) => {
            Some(format!("it is not explained: {all:?}"))
        }
        () => {
            let wrong = check.explanations.iter().find(|x| !known(x));
            wrong.map(|x| format!("{} is false: {all:?}", x.id))
        }
    };
    (ids, wrong)
}

fn all_are_explained(bugs: &[Bug]) {
    let mut wrong = Vec::new();
    for bug in bugs {
        let (ids, missed) = verdict(bug);
        println!("| {} | {} |", bug.story, ids.join(", "));
        wrong.extend(missed.map(|text| format!("{}: {text}", bug.story)));
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), bugs.len(), wrong.join("\n"));
}

#[test]
fn of_attention_forward() {
    all_are_explained(attention::OF_INPUTS);
    all_are_explained(attention::OF_MASKS);
    all_are_explained(attention::OF_SCORES);
    all_are_explained(attention::OF_RESULTS);
}

#[test]
fn of_attention_backward() {
    all_are_explained(backward::BUGS);
}

#[test]
fn of_linear_attention() {
    all_are_explained(linear_attention::BUGS);
}

#[test]
fn of_lazy_attention() {
    all_are_explained(lazy_attention::BUGS);
}

#[test]
fn of_linear_cross_entropy() {
    all_are_explained(linear_cross_entropy::BUGS);
}

#[test]
fn of_results_that_stand_elsewhere() {
    all_are_explained(moved::BUGS);
}
