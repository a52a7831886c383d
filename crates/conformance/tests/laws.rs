//! Every law on every level of the simd tier, one test for each (level, algorithm, law): a run
//! shows by name what holds where. At smoke depth: `etalon verify` runs deeper.

use etalon_conformance::cases::{Depth, storage};
use etalon_conformance::laws;
use etalon_conformance::report::{Record, Verdict};
use etalon_conformance::suite::{SuiteOptions, run};
use etalon_conformance::tier::Tier;
use etalon_conformance::tiers;
use etalon_problem::{Algorithm, Dtype, Pass};
use libtest_mimic::{Arguments, Failed, Trial};
use std::sync::{Arc, OnceLock};

/// Laws of values, which attention_lse has not.
const OF_VALUES: [&str; 4] = ["hull", "sum_dv", "euler_vo", "along_v"];

fn main() {
    let arguments = Arguments::from_args();
    // One run serves all tests; it starts with the first of them.
    let records = Arc::new(OnceLock::new());
    let (tiers, absent) = tiers::present();
    let mut trials = Vec::new();
    for tier in &tiers {
        for algorithm in Algorithm::ALL {
            let without_values = algorithm == Algorithm::AttentionLse;
            let offers = |pass: &Pass| {
                let mut storage = storage(algorithm).iter();
                storage.any(|dtype| tier.offers(algorithm, *pass, *dtype).is_ok())
            };
            // Of cases in f64 alone, or in one other type, there are so few that a law may find none.
            let types = [Dtype::F32, Dtype::Bf16, Dtype::F16];
            let offered = types.iter().filter(|dtype| {
                algorithm.passes().iter().any(|&x| tier.offers(algorithm, x, **dtype).is_ok())
            });
            let few = offered.count() < 2;
            let meant = |law: &laws::Law| {
                let of_values = without_values && OF_VALUES.contains(&law.name);
                let asked = law.not_asked(&**tier).is_none();
                asked && law.of.contains(&algorithm) && !of_values && law.passes.iter().any(offers)
            };
            for law in laws::all().into_iter().filter(meant) {
                let (records, tier) = (records.clone(), tier.name());
                let name = format!("{tier}::{algorithm}::{}", law.name);
                trials.push(Trial::test(name, move || {
                    let records = records.get_or_init(smoke);
                    let own = records.iter().filter(|record: &&Record| {
                        record.tier == tier
                            && record.algorithm == algorithm
                            && record.check == law.name
                    });
                    holds(own, few)
                }));
            }
        }
    }
    // A level that this machine lacks is listed as ignored, not left out.
    trials.extend(absent.into_iter().map(|absent| {
        let name = format!("{}: {}", absent.tier, absent.reason);
        Trial::test(name, || Ok(())).with_ignored_flag(true)
    }));
    libtest_mimic::run(&arguments, trials).exit();
}

fn smoke() -> Vec<Record> {
    let (tiers, _) = tiers::present();
    let tiers: Vec<&dyn Tier> = tiers.iter().map(|tier| &**tier).collect();
    let options = SuiteOptions { depth: Depth::Smoke, ..SuiteOptions::own(tiers) };
    run(&options, &|_, _, _| {}).records
}

fn holds<'a>(records: impl Iterator<Item = &'a Record>, few: bool) -> Result<(), Failed> {
    let mut cases = 0;
    for record in records {
        cases += 1;
        if record.verdict != Verdict::Pass {
            let (pass, case) = (record.pass, &record.case);
            return Err(Failed::from(format!("{pass} of {case}: {:?}", record.verdict)));
        }
    }
    match cases {
        0 if !few => Err(Failed::from("no case")),
        _ => Ok(()),
    }
}
