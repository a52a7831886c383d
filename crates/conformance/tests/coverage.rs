//! Every algorithm × pass × tier × storage type is offered, or its absence has a reason; and what
//! is offered is judged.

use etalon_conformance::cases::{Depth, specs, storage};
use etalon_conformance::tier::{Hints, Request, Tier};
use etalon_conformance::{algorithms, tiers};
use etalon_problem::Dtype;

fn tiers() -> Vec<Box<dyn Tier>> {
    let (mut tiers, _) = tiers::present();
    tiers.push(Box::new(tiers::Cuda));
    tiers.push(Box::new(tiers::Reference));
    tiers
}

#[test]
fn every_pass_is_offered_or_says_why_not() {
    for tier in tiers() {
        for entry in algorithms::ALL {
            for &pass in entry.algorithm.passes() {
                for dtype in Dtype::ALL {
                    if let Err(reason) = tier.offers(entry.algorithm, pass, dtype) {
                        let what = format!("{} {pass} {dtype} on {}", entry.algorithm, tier.name());
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
        for entry in algorithms::ALL {
            let spec = specs(entry.algorithm, Depth::Core, 0).next().expect("a run has cases");
            for &pass in entry.algorithm.passes() {
                for dtype in Dtype::ALL {
                    let spec = etalon_conformance::cases::Spec { dtype, ..spec };
                    let problem = spec.problem();
                    let inputs = spec.tensors(&problem, pass);
                    let hints = Hints::default();
                    let request =
                        Request { problem: &problem, pass, dtype, inputs: &inputs, hints };
                    let offered = tier.offers(entry.algorithm, pass, dtype).is_ok();
                    let what = format!("{} {pass} {dtype} on {}", entry.algorithm, tier.name());
                    match tiers::ask(&*tier, &request) {
                        Ok(_) => assert!(offered, "{what} works, but is not offered"),
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

#[test]
fn every_judged_pass_has_a_tier_in_every_storage_type() {
    let (tiers, _) = tiers::present();
    for entry in algorithms::ALL {
        for &pass in entry.judged {
            for &dtype in storage(entry.algorithm) {
                let what = format!("{} {pass} {dtype}", entry.algorithm);
                let computes =
                    tiers.iter().any(|tier| tier.offers(entry.algorithm, pass, dtype).is_ok());
                assert!(computes, "nobody computes {what}");
            }
        }
    }
}
