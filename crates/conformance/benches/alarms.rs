//! Counts false alarms on correct kernels, which are the controls of the zoo and the levels of the simd tier, over
//! many seeds: those of the laws `statistics` (gate G2) and `bound` (which doubts uninformative elements), and those
//! of `check` on generic, massive and peaked inputs. Of each seed every sixteenth case of core depth is judged,
//! another sixteenth with the next one; large cases are left out.
//!
//! ```sh
//! cargo bench -p etalon-conformance --bench alarms -- 1000
//! ```

use etalon_conformance::cases::{Depth, Spec, specs};
use etalon_conformance::check::check;
use etalon_conformance::gates::Status;
use etalon_conformance::laws::{Exact, Flaw, Trial, find};
use etalon_conformance::tier::{Request, Tier};
use etalon_conformance::tiers::{Simd, ask};
use etalon_conformance::zoo::{CONTROLS, Host};
use etalon_problem::{Algorithm, Pass};
use question::{FAMILIES, Question, questions};
use rayon::prelude::*;
use std::collections::BTreeMap;

#[path = "../tests/question/mod.rs"]
mod question;

/// Of so many cases one is judged.
const STRIDE: u64 = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // cargo adds the flag of its own benches.
    let arguments = std::env::args().skip(1).filter(|x| x != "--bench");
    let arguments: Vec<String> = arguments.collect();
    let first = arguments.first().map_or("1000", String::as_str);
    let names = if first.contains('/') { &arguments[..] } else { &[] };
    let named: Vec<Spec> = names.iter().map(|name| name.parse()).collect::<Result<_, _>>()?;
    let seeds: u64 = if named.is_empty() { first.parse()? } else { 0 };
    let law = |name: &'static str| find(name).ok_or("the law is gone");
    let laws = [law("statistics")?, law("bound")?];
    let controls = CONTROLS.iter().copied().map(Host::sound);
    let mut tiers: Vec<Box<dyn Tier>> =
        controls.map(|control| Box::new(control) as Box<dyn Tier>).collect();
    tiers.extend(Simd::levels().0.into_iter().map(|level| Box::new(level) as Box<dyn Tier>));
    let judge = |spec: Spec| {
        let mut counts: BTreeMap<(String, &str, Pass), (u64, Vec<String>)> = BTreeMap::new();
        for tier in &tiers {
            let case = spec.build();
            let exact = Exact::new(case, tier.profile(spec.dtype));
            let offered = |pass: &Pass| tier.offers(spec.algorithm, *pass, spec.dtype).is_ok();
            let passes = Pass::ALL.into_iter().filter(offered);
            for (pass, law) in passes.flat_map(|pass| laws.map(|law| (pass, law))) {
                if !law.concerns(exact.case(), pass) {
                    continue;
                }
                let count = counts.entry((tier.name(), law.name, pass)).or_default();
                count.0 += 1;
                let judged = (law.check)(&Trial::new(&**tier, &exact, pass));
                if let Err(Flaw::Fail(text) | Flaw::Undecided(text)) = judged {
                    count.1.push(format!("{spec} {pass}: {text}"));
                }
            }
        }
        counts
    };
    let of_seed = |seed: u64| {
        let specs = Algorithm::ALL.into_iter().flat_map(move |of| {
            let all = specs(of, Depth::Core, seed).filter(|spec| !spec.is_large());
            all.skip((seed % STRIDE) as usize).step_by(STRIDE as usize)
        });
        specs.map(judge).collect::<Vec<_>>()
    };
    let mut found: Vec<_> = (0..seeds).into_par_iter().flat_map_iter(of_seed).collect();
    found.extend(named.into_par_iter().map(judge).collect::<Vec<_>>());
    let mut sums: BTreeMap<(String, &str, Pass), (u64, Vec<String>)> = BTreeMap::new();
    for (key, (checks, alarms)) in found.into_iter().flatten() {
        let sum = sums.entry(key).or_default();
        sum.0 += checks;
        sum.1.extend(alarms);
    }
    println!("| kernels | law | pass | checks | alarms |\n|---|---|---|---|---|");
    for ((tier, law, pass), (checks, alarms)) in &sums {
        println!("| `{tier}` | {law} | {pass} | {checks} | {} |", alarms.len());
        alarms.iter().for_each(|alarm| eprintln!("{tier}: {alarm}"));
    }
    println!("\n| inputs | kernels | checks | alarms |\n|---|---|---|---|");
    let mut all: u64 = sums.values().map(|(_, alarms)| alarms.len() as u64).sum();
    for ((family, tier), (checks, alarms)) in of_families(seeds, &tiers) {
        println!("| {family} | `{tier}` | {checks} | {alarms} |");
        all += alarms;
    }
    println!("\n{all} alarms, {seeds} seeds");
    Ok(())
}

/// Checks of each family and kernel, and those of them that did not pass.
fn of_families(
    seeds: u64,
    tiers: &[Box<dyn Tier>],
) -> BTreeMap<(&'static str, String), (u64, u64)> {
    let of_seed = |seed: u64| {
        FAMILIES.into_iter().flat_map(move |(name, family)| {
            let judge = move |question: Question| {
                let of_tier = |tier: &dyn Tier| {
                    let profile = tier.profile(question.dtype);
                    let request = question.request();
                    // A tier computes o and lse itself.
                    let given = question.of(question.pass);
                    let found = match ask(tier, &Request { inputs: &given, ..request }) {
                        Ok(got) => check(&request, &profile, &got, &[]).map_err(|x| x.to_string()),
                        Err(refusal) => Err(format!("{refusal:?}")),
                    };
                    let passed = found.as_ref().is_ok_and(|x| x.status == Status::Passed);
                    if !passed {
                        eprintln!("{name} {seed} {} {}: {found:?}", tier.name(), question.pass);
                    }
                    ((name, tier.name()), u64::from(!passed))
                };
                tiers.iter().map(|tier| of_tier(&**tier)).collect::<Vec<_>>()
            };
            questions(family, seed).flat_map(judge)
        })
    };
    let found: Vec<_> = (0..seeds).into_par_iter().flat_map_iter(of_seed).collect();
    let mut sums: BTreeMap<_, (u64, u64)> = BTreeMap::new();
    for (key, alarm) in found {
        let sum = sums.entry(key).or_default();
        (sum.0, sum.1) = (sum.0 + 1, sum.1 + alarm);
    }
    sums
}
