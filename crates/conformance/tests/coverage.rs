//! Every algorithm × pass × tier × storage type is offered, or its absence has a reason; and what
//! is offered is judged.

use etalon_conformance::cases::{Depth, specs, storage};
use etalon_conformance::tier::{Choice, Hints, Request, Tier};
use etalon_conformance::{laws, tiers};
use etalon_cuda::Level;
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Algorithm, Dtype, Mask, Pass, Problem, Sequence};
use serde_json::Value;
use std::collections::BTreeSet;
use std::mem::discriminant;

fn tiers() -> Vec<Box<dyn Tier>> {
    let (mut tiers, _) = tiers::present();
    // On a machine without a device they must say so.
    for level in [Level::Portable, Level::Sm80, Level::Sm90a] {
        tiers.push(Box::new(tiers::Cuda::new(level)));
    }
    tiers.push(Box::new(tiers::Reference));
    tiers
}

/// A build without the tier names them all.
#[test]
fn the_levels_of_cuda_have_their_names() {
    let (present, absent) = tiers::present();
    let names = present.iter().map(|tier| tier.name()).chain(absent.into_iter().map(|x| x.tier));
    let found: BTreeSet<_> = names.filter(|name| name.starts_with("cuda")).collect();
    let listed = tiers::CUDA_LEVELS.map(|level| format!("cuda/{level}"));
    assert_eq!(found, BTreeSet::from(listed));
}

#[test]
fn every_pass_is_offered_or_says_why_not() {
    for tier in tiers() {
        for algorithm in Algorithm::ALL {
            for &pass in algorithm.passes() {
                for dtype in Dtype::ALL {
                    if let Err(reason) = tier.offers(algorithm, pass, dtype) {
                        let what = format!("{algorithm} {pass} {dtype} on {}", tier.name());
                        assert!(reason.len() > 5, "{what} is absent without a reason");
                    }
                }
            }
        }
    }
}

#[test]
fn an_offer_is_kept_and_a_refusal_too() {
    for tier in tiers() {
        for algorithm in Algorithm::ALL {
            let spec = specs(algorithm, Depth::Core, 0).next().expect("a run has cases");
            for &pass in algorithm.passes() {
                for dtype in Dtype::ALL {
                    let spec = etalon_conformance::cases::Spec { dtype, ..spec };
                    let problem = spec.problem();
                    let inputs = spec.tensors(&problem, pass);
                    let hints = Hints::default();
                    let request =
                        Request { problem: &problem, pass, dtype, inputs: &inputs, hints };
                    let offered = tier.offers(algorithm, pass, dtype).is_ok();
                    let what = format!("{algorithm} {pass} {dtype} on {}", tier.name());
                    match tiers::ask(&*tier, &request) {
                        Ok(_) => assert!(offered, "{what} works, but is not offered"),
                        // Tensor cores compute a part of the problems of a pass.
                        Err(tiers::Refusal::Unsupported(_)) if tier.name() != "cuda/portable" => {}
                        Err(tiers::Refusal::Unsupported(_)) => {
                            assert!(!offered, "{what} is offered, but unsupported");
                        }
                        Err(tiers::Refusal::Fault(fault)) => panic!("{what}: {fault}"),
                    }
                }
            }
        }
    }
}

/// A law about a choice is not asked of a tier that lacks it: etalon's own have all but these.
#[test]
fn every_choice_is_had_or_known_to_be_absent() {
    for tier in tiers() {
        let name = tier.name();
        let lacking: Vec<Choice> =
            Choice::ALL.into_iter().filter(|choice| !tier.has(*choice)).collect();
        let expected: &[Choice] = match name.split_once('/') {
            None => &[
                Choice::Blocking,
                Choice::Modes,
                Choice::Partials,
                Choice::Budget,
                Choice::States,
                Choice::Workspace,
            ],
            Some(("reference", _)) => &[
                Choice::Places,
                Choice::Blocking,
                Choice::Modes,
                Choice::Partials,
                Choice::Budget,
                Choice::States,
                Choice::Workspace,
            ],
            Some(("simd", level)) if level.contains("bf16") || level.contains("amx") => {
                &[Choice::Filter]
            }
            Some(("cuda", "portable")) => &[Choice::States],
            Some(("cuda", _)) => &[Choice::States, Choice::Filter],
            Some(_) => &[],
        };
        assert_eq!(lacking, expected, "{name}");
    }
    for law in laws::all().iter().filter(|law| law.asks.is_some()) {
        let asked = tiers().iter().any(|tier| law.not_asked(&**tier).is_none());
        assert!(asked, "{} is asked of nobody", law.name);
    }
}

/// Two calls share a workspace where a tier keeps one, whatever lies in it.
#[test]
fn a_tier_that_keeps_a_workspace_answers_in_turn() {
    for algorithm in Algorithm::ALL {
        let spec = specs(algorithm, Depth::Core, 0).next().expect("a run has cases");
        let (problem, pass) = (spec.problem(), Pass::Forward);
        let inputs = spec.tensors(&problem, pass);
        let dtype = spec.dtype;
        for tier in tiers().iter().filter(|tier| tier.offers(algorithm, pass, dtype).is_ok()) {
            let hints = Hints { stale: Some(f64::NAN), ..Hints::default() };
            let request = Request { problem: &problem, pass, dtype, inputs: &inputs, hints };
            let found = tiers::ask_in_turn(&**tier, &[request, request]);
            let kept = tier.has(Choice::Workspace);
            let answers = matches!(&found, Ok(Some(answers)) if answers.len() == 2);
            assert!(answers == kept && found.is_ok(), "{algorithm} on {}: {found:?}", tier.name());
        }
    }
}

#[test]
fn every_backward_pass_of_linear_cross_entropy_has_a_filter() {
    let (algorithm, pass) = (Algorithm::LinearCrossEntropy, Pass::Backward);
    let spec = specs(algorithm, Depth::Core, 0).next().expect("a run has cases");
    let filter = Filter::Below { eps: 0.0 };
    let mut asked = 0;
    for (tier, dtype) in tiers().iter().flat_map(|tier| Dtype::ALL.map(|dtype| (tier, dtype))) {
        let spec = etalon_conformance::cases::Spec { dtype, ..spec };
        let problem = spec.problem();
        let (inputs, hints) = (spec.tensors(&problem, pass), Hints::default());
        let request = Request { problem: &problem, pass, dtype, inputs: &inputs, hints };
        if tier.offers(algorithm, pass, dtype).is_err() {
            continue;
        }
        let found = tiers::ask_filtered(&**tier, &request, filter);
        let answers = matches!(found, Ok(Some(_)));
        assert!(
            answers == tier.has(Choice::Filter) && found.is_ok(),
            "{dtype} on {}: {found:?}",
            tier.name()
        );
        asked += 1;
    }
    assert!(asked > Dtype::ALL.len(), "{asked}");
}

#[test]
fn every_pass_has_a_tier_in_every_storage_type() {
    let (tiers, _) = tiers::present();
    for algorithm in Algorithm::ALL {
        for &pass in algorithm.passes() {
            for &dtype in storage(algorithm) {
                let what = format!("{algorithm} {pass} {dtype}");
                let computes = tiers.iter().any(|tier| tier.offers(algorithm, pass, dtype).is_ok());
                assert!(computes, "nobody computes {what}");
            }
        }
    }
}

/// The kinds of mask, by their names in problem files.
fn kinds_of_mask() -> BTreeSet<String> {
    let schema = schemars::schema_for!(Mask);
    let variants = schema.as_value()["oneOf"].as_array().expect("a list of variants");
    let name = |variant: &Value| {
        let name = variant["const"].as_str().or(variant["required"][0].as_str());
        name.expect("a name").to_string()
    };
    variants.iter().map(name).collect()
}

/// Adds the kinds of a mask in a problem file, and of its parts.
fn collect_kinds(mask: &Value, kinds: &mut BTreeSet<String>) {
    kinds.extend(mask.as_str().map(str::to_string));
    for (name, value) in mask.as_object().into_iter().flatten() {
        kinds.insert(name.clone());
        value.as_array().into_iter().flatten().for_each(|part| collect_kinds(part, kinds));
    }
}

/// "To add a kind of mask" in CONTRIBUTING.md: notices a kind without cases, an interval mask that
/// the tests of spans leave out, and a kind without a formula in the docs.
#[test]
fn every_kind_of_mask_has_cases_and_a_formula() {
    let masks: Vec<Mask> = specs(Algorithm::Attention, Depth::Core, 0)
        .map(|spec| match spec.problem() {
            Problem::Attention(problem) => problem.scores.mask,
            other => panic!("a case of attention has a problem of {}", other.algorithm()),
        })
        .collect();

    let mut in_cases = BTreeSet::new();
    for mask in &masks {
        collect_kinds(&serde_json::to_value(mask).expect("JSON"), &mut in_cases);
    }
    assert_eq!(in_cases, kinds_of_mask(), "roster/attention/cases.rs draws masks of every kind");

    let sequence = Sequence { batch: 0, query_start: 0, queries: 1, key_start: 0, keys: 1 };
    let tested = Mask::intervals(1..2);
    for mask in masks.iter().filter(|mask| !matches!(mask, Mask::And(_))) {
        let is_tested = tested.iter().any(|other| discriminant(other) == discriminant(mask));
        assert_eq!(mask.row_span(&sequence, 0).is_some(), is_tested, "Mask::intervals: {mask:?}");
    }

    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/attention.md");
    let page = std::fs::read_to_string(page).expect("the page");
    for kind in kinds_of_mask() {
        let has_formula = |row: &str| {
            row.starts_with('|')
                && [" ", "`"].iter().any(|end| row.contains(&format!("`{kind}{end}")))
        };
        assert!(page.lines().any(has_formula), "docs/attention.md has no formula of {kind}");
    }
}

#[test]
fn names_of_laws_are_unique_and_statements_are_sentences() {
    let all = laws::all();
    let names: BTreeSet<&str> = all.iter().map(|law| law.name).collect();
    assert_eq!(names.len(), all.len());
    assert!(all.iter().all(|law| law.statement.ends_with('.')));
    assert!(all.iter().all(|law| laws::find(law.name).is_some()));
}
