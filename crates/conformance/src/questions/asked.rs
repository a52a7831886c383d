//! The questions of probes: heard by a kernel of etalon in the place of the one that will be judged.

use super::{Given, Probe, Question};
use crate::capabilities::Capabilities;
use crate::cases::{Case, Depth, Spec, specs};
use crate::laws::{self, Exact, Flaw, Law, Trial};
use crate::profile::Profile;
use crate::tensor::Tensors;
use crate::tier::{Refusal, Request, Tier};
use crate::tiers::{Reference, Simd};
use etalon_problem::{Algorithm, Dtype, Error, Pass, Problem};
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// A probe with its questions, or why it is not asked.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    /// The probe.
    pub probe: Probe,
    /// Its questions.
    pub questions: Result<Vec<Question>, String>,
}

/// As many cases of each law and pass at the most, each with a value of an axis that those before lack.
const CASES: usize = 6;

/// The probes with problems of their own, which are no questions about a problem that somebody brings: of functions
/// those of its rows take their place.
const OF_THEIR_OWN: [&str; 8] = [
    "exp_probe",
    "sink_probe",
    "rescale_probe",
    "fraction_probe",
    "log_probe",
    "tanh_probe",
    "decay_probe",
    "value_probe",
];

/// The probe that says of some results only that the profile of the kernel hides their errors.
const RANDOM: &str = "random_probe";

/// The probes of some algorithms in a storage type, of the suite's own cases, with their questions: no two ask the
/// same. Declared capabilities limit them; a probe of which nothing is left says why.
pub fn probes(
    algorithms: &[Algorithm],
    dtype: Dtype,
    seed: u64,
    capabilities: Option<&Capabilities>,
) -> Vec<Asked> {
    let mut found: Vec<Asked> = Vec::new();
    for &algorithm in algorithms {
        let specs = specs(algorithm, Depth::Core, seed).filter(|spec| !spec.is_large());
        let cases: Vec<_> = specs.map(|spec| Spec { dtype, ..spec }.build()).collect();
        let of_cases_too = |law: &Law| laws::find(law.name).is_some();
        for (law, pass) in of_algorithm(algorithm).filter(|(law, _)| of_cases_too(law)) {
            of_cases(&law, pass, &cases, capabilities, &mut found);
        }
    }
    found
}

/// The probes of an algorithm, each with its passes.
fn of_algorithm(algorithm: Algorithm) -> impl Iterator<Item = (Law, Pass)> {
    let probes = laws::probes().into_iter().filter(move |law| law.of.contains(&algorithm));
    probes.flat_map(|law| law.passes.iter().map(move |&pass| (law, pass)))
}

/// Adds the probes of one law and pass on cases of the suite.
fn of_cases(
    law: &Law,
    pass: Pass,
    cases: &[Case],
    capabilities: Option<&Capabilities>,
    found: &mut Vec<Asked>,
) {
    let (mut seen, mut left, mut refused) = (BTreeSet::new(), CASES, None);
    for case in
        cases.iter().filter(|case| law.concerns(case, pass)).take(law.looks.unwrap_or(usize::MAX))
    {
        let values = case.spec.values();
        if left == 0 || values.iter().all(|value| seen.contains(value)) {
            continue;
        }
        let probe =
            Probe { law: law.name.to_string(), case: case.name.clone(), pass: pass.to_string() };
        let questions = match questions(law, case.spec.build(), pass, (capabilities, None)) {
            Ok(questions) => questions,
            Err(reason) => {
                refused = refused.or(Some(Asked { probe, questions: Err(reason) }));
                continue;
            }
        };
        let known = |other: &Asked| {
            other.probe.law == probe.law && other.questions.as_ref() == Ok(&questions)
        };
        if !found.iter().any(known) {
            seen.extend(values);
            left -= 1;
            found.push(Asked { probe, questions: Ok(questions) });
        }
    }
    if left == CASES {
        found.extend(refused);
    }
}

/// The probes of a problem that somebody brings, in some passes (all if none is named), each with its questions or
/// with why it cannot be asked.
///
/// Without capabilities nothing is known but that the kernel takes this problem: a probe that has to change an
/// option is not asked. Fails where probes cannot be made for the problem, or where capabilities do not take it.
pub fn about(
    given: &Given,
    passes: &[Pass],
    capabilities: Option<&Capabilities>,
) -> Result<Vec<Asked>, Error> {
    let mut found = Vec::new();
    let wanted = |pass: &Pass| passes.is_empty() || passes.contains(pass);
    let own = of_algorithm(given.problem.algorithm())
        .filter(|(law, pass)| wanted(pass) && !OF_THEIR_OWN.contains(&law.name));
    for (law, pass) in own {
        let case = given.case(pass, capabilities)?;
        let (law_name, case_name, pass_name) = (law.name, given.name.clone(), pass.to_string());
        let probe = Probe { law: law_name.to_string(), case: case_name, pass: pass_name };
        let questions = match capabilities.map(|x| x.takes(&given.problem, pass, given.dtype)) {
            Some(Err(reason)) => Err(reason),
            _ => questions(&law, case, pass, (capabilities, Some(given))),
        };
        found.push(Asked { probe, questions });
    }
    Ok(found)
}

/// The questions of a probe to a kernel that answers rightly; or the reason why there are none.
pub(super) fn questions(
    law: &Law,
    case: Case,
    pass: Pass,
    (capabilities, given): (Option<&Capabilities>, Option<&Given>),
) -> Result<Vec<Question>, String> {
    let (algorithm, dtype) = (case.problem.algorithm(), case.dtype);
    let omits = capabilities.map_or(Vec::new(), |x| x.omitted(algorithm, pass));
    let kernel = kernel(algorithm, pass, dtype, given.is_some());
    let exact = Exact::new(case, Profile::strict(dtype)).without(omits.clone());
    let heard = Mutex::new(Vec::new());
    let recorder = Recorder { kernel, capabilities, given, omits, heard };
    let judgement = (law.check)(&Trial::new(&recorder, &exact, pass));
    let heard = recorder.heard.into_inner().unwrap_or_else(PoisonError::into_inner);
    match judgement {
        // A kernel of another profile may have more to show, and does not less.
        Err(Flaw::NotAsked(_)) if law.name == RANDOM && !heard.is_empty() => Ok(heard),
        Err(Flaw::Unsupported(reason) | Flaw::NotAsked(reason)) => Err(reason),
        Err(Flaw::Fail(text) | Flaw::Vacuous(text) | Flaw::Undecided(text)) => {
            Err(format!("a kernel of etalon does not pass it on this problem ({text})"))
        }
        Ok(_) if heard.is_empty() => Err("it has nothing to ask of this storage type".to_string()),
        Ok(_) => Ok(heard),
    }
}

/// A kernel that answers rightly: the reference, or, of a problem that somebody brings and that may be large, the best
/// of the simd tier.
fn kernel(algorithm: Algorithm, pass: Pass, dtype: Dtype, quick: bool) -> Box<dyn Tier> {
    let best = Simd::levels().0.pop().filter(|_| quick);
    match best.filter(|tier| tier.offers(algorithm, pass, dtype).is_ok()) {
        Some(tier) => Box::new(tier),
        None => Box::new(Reference),
    }
}

/// A kernel of etalon, which hears what it is asked, as far as the one that will be judged takes it.
struct Recorder<'a> {
    kernel: Box<dyn Tier>,
    capabilities: Option<&'a Capabilities>,
    given: Option<&'a Given>,
    omits: Vec<String>,
    heard: Mutex<Vec<Question>>,
}

impl Recorder<'_> {
    /// Fails unless the kernel that will be judged takes a request.
    fn takes(&self, request: &Request<'_>) -> Result<(), String> {
        let &Request { problem, pass, dtype, inputs, .. } = request;
        match (self.capabilities, self.given) {
            (Some(capabilities), _) => {
                let own = self.given.map_or(&[][..], |given| &given.cotangents);
                capabilities.kernel(problem, pass, dtype)?.reads(
                    problem,
                    pass,
                    &|name| inputs.contains_key(name),
                    own,
                )
            }
            (None, Some(given)) => unchanged(&given.problem, problem),
            (None, None) => Ok(()),
        }
    }
}

/// Fails where a question is about another problem than the one that is known to be taken.
fn unchanged(known: &Problem, asked: &Problem) -> Result<(), String> {
    if known == asked {
        return Ok(());
    }
    let file = |problem: &Problem| serde_json::to_value(problem).unwrap_or(Value::Null);
    let (known, asked) = (file(known), file(asked));
    let keys = |file: &Value| file.as_object().into_iter().flatten().map(|x| x.0.clone()).collect();
    let keys: BTreeSet<String> =
        [keys(&known), keys(&asked)].into_iter().flat_map(|keys: Vec<_>| keys).collect();
    let mut changed = keys.into_iter().filter(|key| known.get(key) != asked.get(key));
    let Some(key) = changed.next() else { return Err("its question has another mask".to_string()) };
    let word = |file: &Value| file.get(&key).map_or("absent".to_string(), Value::to_string);
    Err(format!(
        "its question has {key} {} in place of {}, and no capabilities file says that the kernel takes that",
        word(&asked),
        word(&known)
    ))
}

impl Tier for Recorder<'_> {
    fn name(&self) -> String {
        "recorder".to_string()
    }

    fn offers(&self, algorithm: Algorithm, pass: Pass, dtype: Dtype) -> Result<(), String> {
        self.kernel.offers(algorithm, pass, dtype)
    }

    fn returns(&self, output: &str) -> bool {
        !self.omits.iter().any(|name| name == output)
    }

    fn run(&self, request: &Request<'_>) -> Result<Tensors, Refusal> {
        self.takes(request).map_err(Refusal::Unsupported)?;
        let heard = &mut self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        heard.push(Question::of(request));
        self.kernel.run(request)
    }
}
