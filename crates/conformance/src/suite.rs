//! A run: tiers against laws, case by case.

mod choice;

pub(crate) use choice::{Applies, applicable, choose};

use crate::capabilities::Capabilities;
use crate::cases::{Case, Depth, Spec, cost, specs_for};
use crate::conventions;
use crate::laws::{self, Exact, Flaw, Kind, Law, Trial};
use crate::profile::Profile;
use crate::report::{About, Record, Report, Simplest, Verdict};
use crate::shrink;
use crate::tier::Tier;
use crate::vacuity::{self, OutputSharpness, sharpness_of};
use choice::{is_affordable, pairs};
use etalon_problem::{Algorithm, Dtype, Error, Pass};
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The options of a run.
pub struct SuiteOptions<'a> {
    /// The tiers under judgement.
    pub tiers: Vec<&'a dyn Tier>,
    /// The algorithms.
    pub algorithms: Vec<Algorithm>,
    /// The amount of checking.
    pub depth: Depth,
    /// The seed of the inputs.
    pub seed: u64,
    /// The kinds of law: others' kernels do not promise [`Kind::Contract`].
    pub kinds: Vec<Kind>,
    /// The cases, each for every law that applies to it; if empty, those of the depth.
    pub cases: Vec<Spec>,
    /// The names of the laws; if empty, all of these kinds.
    pub laws: Vec<String>,
    /// Of all cases those of one part; `None`: all.
    pub part: Option<Part>,
    /// The profile that is claimed; `None`: what etalon's own tiers promise.
    pub profile: Option<Profile>,
    /// The share of the checks that may be undecided in a run that passes.
    pub allow_undecided: f64,
    /// Declared capabilities, if any: cases have extents that fit, and no others are asked.
    pub capabilities: Option<&'a Capabilities>,
    /// Names of laws of other kinds that the tiers promise, too.
    pub promises: Vec<&'static str>,
    /// Keeps the records of each case, so that a run that was cut can go on.
    pub journal: Option<&'a dyn Journal>,
}

/// The records of the cases that are done, kept outside of a run.
pub trait Journal: Sync {
    /// The records of a case that an earlier run has done.
    fn known(&self, case: &str) -> Option<Vec<Record>>;

    /// Keeps the records of a case.
    fn keep(&self, case: &str, records: &[Record]);
}

impl<'a> SuiteOptions<'a> {
    /// Everything about etalon's own tiers, at core depth.
    pub fn own(tiers: Vec<&'a dyn Tier>) -> Self {
        SuiteOptions {
            tiers,
            algorithms: Algorithm::ALL.to_vec(),
            depth: Depth::Core,
            seed: 0,
            kinds: vec![Kind::Gate, Kind::Probe, Kind::Meaning, Kind::Contract],
            cases: Vec::new(),
            laws: Vec::new(),
            part: None,
            profile: None,
            allow_undecided: 0.0,
            capabilities: None,
            promises: Vec::new(),
            journal: None,
        }
    }

    /// The case of a point.
    fn case(&self, spec: &Spec) -> Case {
        self.capabilities.map_or_else(|| spec.build(), |declared| spec.build_for(declared))
    }

    /// A case with its exact results and bounds, of the outputs that the kernels return.
    fn exact(&self, spec: &Spec, profile: Profile) -> Exact {
        let of = spec.algorithm;
        let omits = self.capabilities.map_or(Vec::new(), |declared| {
            Pass::ALL.into_iter().flat_map(|pass| declared.omitted(of, pass)).collect()
        });
        Exact::new(self.case(spec), profile).without(omits)
    }

    /// True if the kernels take a pass of a case.
    fn takes(&self, case: &Case, pass: Pass) -> bool {
        self.capabilities.is_none_or(|declared| {
            declared.answers(&case.problem, pass, case.dtype, case.inputs_of(pass)).is_ok()
        })
    }

    fn has(&self, law: &Law) -> bool {
        let named = self.laws.is_empty() || self.laws.iter().any(|name| name == law.name);
        named && (self.kinds.contains(&law.kind) || self.promises.contains(&law.name))
    }

    /// The profile by which a tier is judged, with operands of this storage type.
    fn claimed(&self, tier: &dyn Tier, dtype: Dtype) -> Profile {
        self.profile.unwrap_or_else(|| tier.profile(dtype))
    }
}

/// One of several parts of a run, which have every case between them: that with the number `i` of a run, in its fixed
/// order, is in part `i mod of`. A run that was cut goes on with the parts that are missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// From 1 to `of`.
    number: usize,
    of: usize,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.number, self.of)
    }
}

impl FromStr for Part {
    type Err = Error;

    /// Reads `K/N`.
    fn from_str(text: &str) -> Result<Part, Error> {
        let numbers = text.split_once('/').and_then(|(number, of)| {
            Some(Part { number: number.parse().ok()?, of: of.parse().ok()? })
        });
        let part = numbers.filter(|part| (1..=part.of).contains(&part.number));
        part.ok_or_else(|| Error::value("part", "K/N with K from 1 to N", text))
    }
}

impl Part {
    /// Entries of a list that are its own.
    fn of<T>(self, list: Vec<T>) -> Vec<T> {
        list.into_iter().skip(self.number - 1).step_by(self.of).collect()
    }
}

/// One case and the laws that it is for.
struct Item {
    spec: Spec,
    laws: Vec<(Pass, Law)>,
}

/// The cases of a run, in its order.
pub fn cases(options: &SuiteOptions<'_>) -> Vec<Spec> {
    plan(options).into_iter().map(|item| item.spec).collect()
}

/// Runs tiers against laws, on the threads of the current pool. `progress` is called, from any thread,
/// for every case that is done: with its number, the number of all, and its name.
pub fn run(options: &SuiteOptions<'_>, progress: &(dyn Fn(usize, usize, &str) + Sync)) -> Report {
    let items = match options.part {
        Some(part) => part.of(plan(options)),
        None => plan(options),
    };
    let done = AtomicUsize::new(0);
    // Threads take cases one by one: no one knows ahead which of them compile kernels.
    let judged = items.par_iter().with_max_len(1).map(|item| {
        let judged = judge_once(item, options);
        let done = done.fetch_add(1, Ordering::Relaxed) + 1;
        progress(done, items.len(), &item.spec.to_string());
        judged
    });
    let (judged, outputs): (Vec<_>, Vec<_>) = judged.unzip();
    let mut records = not_offered(options);
    records.extend(judged.into_iter().flatten());
    // A few cases cannot tell whether a value of an axis is informative, nor can those that capabilities leave.
    let whole = options.cases.is_empty() && options.part.is_none();
    if options.depth != Depth::Smoke && whole && options.capabilities.is_none() {
        records.extend(vacuity::uninformative(&outputs.concat()));
    }
    let simplest = simplest(options, &records);
    Report { about: about(options), records, simplest, ..Report::default() }
}

/// For so many failures a run looks for the simplest case, each of another tier, pass or law.
const SHRUNK: usize = 3;

fn simplest(options: &SuiteOptions<'_>, records: &[Record]) -> Vec<Simplest> {
    let laws = laws::all();
    let mut seen = BTreeSet::new();
    let failed = records.iter().filter(|record| matches!(record.verdict, Verdict::Fail(_)));
    let of_another_kind = failed
        .filter(|record| seen.insert((&record.tier, record.algorithm, record.pass, &record.check)));
    let shrunk = of_another_kind.take(SHRUNK).filter_map(|record| {
        let Record { algorithm, pass, dtype, .. } = *record;
        let offers = |tier: &&&dyn Tier| {
            tier.name() == record.tier && tier.offers(algorithm, pass, dtype).is_ok()
        };
        let tier = options.tiers.iter().find(offers)?;
        let law = laws.iter().find(|law| law.name == record.check)?;
        let fails = |spec: &Spec| {
            let case = options.case(spec);
            if !law.concerns(&case, record.pass) || !options.takes(&case, record.pass) {
                return None;
            }
            let profile = options.claimed(*tier, case.dtype);
            let exact = options.exact(spec, profile);
            match (law.check)(&Trial::new(*tier, &exact, record.pass)) {
                Err(Flaw::Fail(text)) => Some(text),
                _ => None,
            }
        };
        let (spec, reason) = shrink::simplest(record.case.parse().ok()?, fails)?;
        Some(Simplest { of: record.clone(), case: spec.to_string(), reason })
    });
    shrunk.collect()
}

/// The facts of a run that the suite knows.
fn about(options: &SuiteOptions<'_>) -> About {
    About {
        threads: rayon::current_num_threads(),
        depth: options.depth.name(),
        part: options.part.map(|part| part.to_string()),
        profile: options.profile.map_or("strict", |profile| profile.name),
        seed: options.seed,
        allow_undecided: options.allow_undecided,
        ..About::default()
    }
}

fn algorithms(options: &SuiteOptions<'_>) -> impl Iterator<Item = Algorithm> {
    Algorithm::ALL.into_iter().filter(|algorithm| options.algorithms.contains(algorithm))
}

/// Passes and choices that a tier declares that it lacks and that a law is about: one record for each, so that no
/// report hides it. Of a kernel with declared capabilities its author knows.
fn not_offered(options: &SuiteOptions<'_>) -> Vec<Record> {
    if options.capabilities.is_some() {
        return Vec::new();
    }
    let laws: Vec<Law> = laws::all().into_iter().filter(|law| options.has(law)).collect();
    let mut records = Vec::new();
    for algorithm in algorithms(options) {
        let passes = || algorithm.passes().iter().copied();
        let pairs = options.tiers.iter().flat_map(|tier| passes().map(move |pass| (tier, pass)));
        for (tier, pass) in pairs.filter(|(tier, pass)| tier.is_meant_for(algorithm, *pass)) {
            for &dtype in crate::cases::storage(algorithm) {
                let absent = |check: &str, verdict| Record {
                    tier: tier.name(),
                    algorithm,
                    pass,
                    dtype,
                    check: check.to_string(),
                    case: String::new(),
                    verdict,
                    margin: None,
                    elapsed: Duration::ZERO,
                };
                if let Err(reason) = tier.offers(algorithm, pass, dtype) {
                    records.push(absent("offer", Verdict::Unsupported(reason)));
                    continue;
                }
                let speaks = |law: &&Law| law.of.contains(&algorithm) && law.passes.contains(&pass);
                let unasked = laws.iter().filter(speaks);
                let unasked = unasked.filter_map(|law| Some((law, law.not_asked(*tier)?)));
                let record = |(law, reason): (&Law, _)| absent(law.name, Verdict::NotAsked(reason));
                records.extend(unasked.map(record));
            }
        }
    }
    records
}

/// Pairs of a law and a case. Beyond core depth: every law at every case that it applies to. A case that no law looks
/// at is left out.
fn plan(options: &SuiteOptions<'_>) -> Vec<Item> {
    let laws: Vec<Law> = laws::all().into_iter().filter(|law| options.has(law)).collect();
    let named = !options.cases.is_empty();
    let depth = if named { Depth::Full } else { options.depth };
    let mut items = Vec::new();
    for algorithm in algorithms(options) {
        let own = || options.cases.iter().filter(|spec| spec.algorithm == algorithm).copied();
        let specs: Vec<Spec> = match named {
            true => own().collect(),
            false => specs_for(algorithm, depth, options.seed, options.capabilities).collect(),
        };
        let applies = |spec: &Spec| {
            let case = options.case(spec);
            let mut all = applicable(&laws, &case);
            let passes = Pass::ALL.into_iter().filter(|pass| all.iter().any(|of| of.pass == *pass));
            let taken: Vec<Pass> = passes.filter(|pass| options.takes(&case, *pass)).collect();
            all.retain(|of| taken.contains(&of.pass));
            if depth <= Depth::Core {
                let work = cost(&case.problem);
                all.retain(|of| is_affordable(&laws[of.law], of.pass, work));
            }
            all
        };
        let applicable: Vec<Vec<Applies>> = specs.par_iter().map(applies).collect();
        let chosen = match named {
            true => applicable.into_iter().map(pairs).collect(),
            false => choose(depth, &laws, applicable),
        };
        let looked_at = specs.into_iter().zip(chosen).filter(|(_, pairs)| !pairs.is_empty());
        for (spec, pairs) in looked_at {
            let laws = pairs.into_iter().map(|(pass, law)| (pass, laws[law])).collect();
            items.push(Item { spec, laws });
        }
    }
    items
}

/// The first failure of a tier.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The law.
    pub check: &'static str,
    /// The case's name.
    pub case: String,
    /// Its symptom.
    pub text: String,
}

/// The first failure of each tier of a run, large cases before others; `None` for a tier without one. One request at a
/// time, for tiers that share something; `report` is called at once, with the tier's name.
pub fn first_failures(
    options: &SuiteOptions<'_>,
    report: &dyn Fn(&str, &Failure),
) -> Vec<Option<Failure>> {
    let mut failures: Vec<Option<Failure>> = vec![None; options.tiers.len()];
    let mut items = plan(options);
    items.sort_by_key(|item| !item.spec.is_large());
    for item in items {
        let left = failures.iter_mut().zip(&options.tiers).filter(|(failure, _)| failure.is_none());
        let left: Vec<_> = left.collect();
        if left.is_empty() {
            break;
        }
        // Copies of one tier claim alike.
        let exact = options.exact(&item.spec, options.claimed(*left[0].1, item.spec.dtype));
        for (failure, tier) in left {
            *failure = first_failure(&item, *tier, &exact);
            failure.iter().for_each(|failure| report(&tier.name(), failure));
        }
    }
    failures
}

fn first_failure(item: &Item, tier: &dyn Tier, exact: &Exact) -> Option<Failure> {
    let case = exact.case();
    Pass::ALL.into_iter().find_map(|pass| {
        tier.offers(case.spec.algorithm, pass, case.dtype).ok()?;
        let trial = Trial::new(tier, exact, pass);
        let asked = |(of, law): &&(Pass, Law)| *of == pass && law.not_asked(tier).is_none();
        item.laws.iter().filter(asked).find_map(|(_, law)| {
            let Err(Flaw::Fail(text)) = (law.check)(&trial) else { return None };
            Some(Failure { check: law.name, case: case.name.clone(), text })
        })
    })
}

/// As [`judge`], of a case that the journal may know.
fn judge_once(item: &Item, options: &SuiteOptions<'_>) -> (Vec<Record>, Vec<OutputSharpness>) {
    let Some(journal) = options.journal else { return judge(item, options) };
    let case = item.spec.to_string();
    if let Some(records) = journal.known(&case) {
        return (records, Vec::new());
    }
    let (records, seen) = judge(item, options);
    // A case that a lost tier was not asked is judged when the run goes on.
    if options.tiers.iter().all(|tier| tier.lost().is_none()) {
        journal.keep(&case, &records);
    }
    (records, seen)
}

/// The records of a case, and what its bounds show.
fn judge(item: &Item, options: &SuiteOptions<'_>) -> (Vec<Record>, Vec<OutputSharpness>) {
    let strict = Profile::strict(item.spec.dtype);
    let claimed = |tier: &dyn Tier| options.claimed(tier, item.spec.dtype);
    let mut profiles: Vec<Profile> = Vec::new();
    for tier in &options.tiers {
        if !profiles.contains(&claimed(*tier)) {
            profiles.push(claimed(*tier));
        }
    }
    let (mut records, mut seen) = (Vec::new(), Vec::new());
    for profile in profiles {
        let tiers = options.tiers.iter().copied().filter(|tier| claimed(*tier) == profile);
        let exact = options.exact(&item.spec, profile);
        let (of, outputs) = judge_as(item, &exact, &tiers.collect::<Vec<_>>());
        records.extend(of);
        // A profile that is wider than the strict one says nothing about the cases.
        if profile.is_within(&strict) {
            seen.extend(outputs);
        }
    }
    (records, seen)
}

/// The records of tiers that claim one profile: they share the exact results and their bounds.
fn judge_as(
    item: &Item,
    exact: &Exact,
    tiers: &[&dyn Tier],
) -> (Vec<Record>, Vec<OutputSharpness>) {
    let case = exact.case();
    let mut records = Vec::new();
    for pass in Pass::ALL {
        let offered =
            |tier: &&&dyn Tier| tier.offers(case.spec.algorithm, pass, case.dtype).is_ok();
        for tier in tiers.iter().filter(offered) {
            let trial = Trial::new(*tier, exact, pass);
            let finding = OnceLock::new();
            let asked = |(of, law): &&(Pass, Law)| *of == pass && law.not_asked(*tier).is_none();
            for (_, law) in item.laws.iter().filter(asked) {
                let start = Instant::now();
                let judged = match tier.lost() {
                    Some(reason) => Err(Flaw::NotAsked(reason)),
                    None => (law.check)(&trial),
                };
                let (verdict, margin) = match judged {
                    Ok(margin) => (Verdict::Pass, margin),
                    Err(Flaw::Fail(text)) => (conventions::broken(&trial, &finding, text), None),
                    Err(flaw) => (flaw.verdict(), None),
                };
                records.push(Record {
                    tier: tier.name(),
                    algorithm: case.spec.algorithm,
                    pass,
                    dtype: case.dtype,
                    check: law.name.to_string(),
                    case: case.name.clone(),
                    verdict,
                    margin,
                    elapsed: start.elapsed(),
                });
            }
        }
    }
    let seen = sharpness_of(exact, |pass| records.iter().any(|record| record.pass == pass));
    (records, seen)
}
