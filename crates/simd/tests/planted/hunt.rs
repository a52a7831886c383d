//! Hunts the planted bugs: which law notices each, and on which case. This file is an example of the
//! conformance crate in copies of the workspace alone.

use etalon_conformance::cases::Depth;
use etalon_conformance::profile::Profile;
use etalon_conformance::suite::{SuiteOptions, first_failures};
use etalon_conformance::tensor::Tensors;
use etalon_conformance::tier::{Choice, Filtered, Refusal, Request, Tier};
use etalon_conformance::tiers::Simd;
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Algorithm, Dtype, Pass};
use etalon_simd::{Level, Precision, planted};

#[path = "bugs.rs"]
mod bugs;

/// The simd tier with a bug. The switch is one for the process: nothing else may run meanwhile.
struct Planted {
    number: usize,
    name: String,
    /// The file with the bug.
    file: String,
    tier: Simd,
}

/// The name of no bug.
const CONTROL: &str = "none";

/// Takes the bug out again, whatever happens.
struct Out;

impl Drop for Out {
    fn drop(&mut self) {
        planted::plant(0);
    }
}

impl Tier for Planted {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn offers(&self, algorithm: Algorithm, pass: Pass, dtype: Dtype) -> Result<(), String> {
        let home = match algorithm {
            Algorithm::LinearAttention => "linear_attention",
            Algorithm::LinearCrossEntropy => "linear_cross_entropy",
            _ => "softmax",
        };
        // The others are shared.
        let homes = ["linear_attention", "linear_cross_entropy", "softmax"];
        let elsewhere = |folder: &str| homes.contains(&folder) && folder != home;
        if self.file.split_once('/').is_some_and(|(folder, _)| elsewhere(folder)) {
            return Err("the bug is in the kernels of other algorithms".to_string());
        }
        self.tier.offers(algorithm, pass, dtype)
    }

    fn keeps_subnormals(&self) -> bool {
        self.tier.keeps_subnormals()
    }

    fn gives_the_bits_beside_nan(&self) -> bool {
        self.tier.gives_the_bits_beside_nan()
    }

    fn has(&self, choice: Choice) -> bool {
        self.tier.has(choice)
    }

    fn in_turn(&self, requests: &[Request<'_>]) -> Result<Option<Vec<Tensors>>, Refusal> {
        let _out = Out;
        planted::plant(self.number);
        self.tier.in_turn(requests)
    }

    fn profile(&self, dtype: Dtype) -> Profile {
        self.tier.profile(dtype)
    }

    fn run(&self, request: &Request<'_>) -> Result<Tensors, Refusal> {
        let _out = Out;
        planted::plant(self.number);
        self.tier.run(request)
    }

    fn filtered(&self, request: &Request<'_>, filter: Filter) -> Result<Option<Filtered>, Refusal> {
        let _out = Out;
        planted::plant(self.number);
        self.tier.filtered(request, filter)
    }
}

/// The tier that has a kind of bug, of this machine or by the rules of its instructions.
fn tier_of(kind: &str) -> Simd {
    let precision = match kind {
        "tiles" => Precision::Flash,
        "pieces" => Precision::Split2,
        _ => return Simd::new(Level::best()),
    };
    let emulated = Level::emulated().last().copied();
    let level = Level::of_pairs().last().copied().or(emulated).expect("some level has tiles");
    Simd::of(level, precision)
}

fn main() {
    // Panics of a bug are what it is noticed by.
    std::panic::set_hook(Box::new(|_| {}));
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let tier = tier_of("");
    let bugs = bugs::all();
    let wanted = |name: &String| arguments.is_empty() || arguments.contains(name);
    let mut left: Vec<Planted> = bugs
        .iter()
        .enumerate()
        .filter(|(_, bug)| wanted(&bug.name))
        .map(|(at, bug)| Planted {
            number: at + 1,
            name: bug.name.clone(),
            file: bug.file.clone(),
            tier: tier_of(&bug.kind),
        })
        .collect();
    let all = left.len();
    // The tier as it is: of what it is found wrong in, nothing can be learnt. At full depth, which ends
    // with the last bug that is noticed, `etalon verify` says so.
    left.push(Planted { number: 0, name: CONTROL.to_string(), file: String::new(), tier });
    println!("| bug | kind | noticed by | depth | on |\n|---|---|---|---|---|");
    for depth in [Depth::Core, Depth::Full] {
        let tiers: Vec<&dyn Tier> = left.iter().map(|tier| tier as &dyn Tier).collect();
        let options = SuiteOptions { depth, ..SuiteOptions::own(tiers) };
        let found = first_failures(&options, &|tier, failure| {
            let bug = bugs.iter().find(|bug| bug.name == tier);
            let kind = bug.map_or("", |bug| bug.kind.as_str());
            println!("| {tier} | {kind} | {} | {depth} | `{}` |", failure.check, failure.case);
            eprintln!("{tier}: {}", failure.text);
        });
        let mut found = found.into_iter();
        left.retain(|_| found.next().flatten().is_none());
        if depth == Depth::Core && left.pop().is_none_or(|control| control.number != 0) {
            eprintln!("the tier without a bug fails");
            std::process::exit(1);
        }
        eprintln!("{} of {all} are left after {depth} depth", left.len());
    }
    for bug in &left {
        println!("| {} | | nothing | | |", bug.name);
    }
}
