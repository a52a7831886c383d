//! Probes as files: what a probe asks of a kernel, and its judgement of answers that were written elsewhere.
//!
//! A probe is a law ([`laws::Kind::Probe`]) on a case of the suite, or on a problem that somebody brings. A recorder
//! in the place of a kernel hears its questions, and a replay answers them again from a folder, so that nothing of a
//! probe is written twice.

mod asked;
mod given;

pub use asked::{Asked, about, probes};
pub use given::{Given, MOST_PAIRS};

use crate::capabilities::Capabilities;
use crate::cases::{Case, Spec};
use crate::laws::{self, Exact, Judgement, Law, Trial};
use crate::profile::Profile;
use crate::report::Verdict;
use crate::tensor::Tensors;
use crate::tier::{Refusal, Request, Tier};
use crate::vectors;
use etalon_problem::{Algorithm, Dtype, Error, Pass, Problem};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// A probe: a law on a pass of a case, in words, as they stand in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Probe {
    /// The law, by name.
    pub law: String,
    /// The case, or the problem that somebody brings, by name.
    pub case: String,
    /// The pass, by name.
    pub pass: String,
}

/// One question of a probe: what an evaluation of a pass gets.
#[derive(Debug, Clone, PartialEq)]
pub struct Question {
    /// The problem.
    pub problem: Problem,
    /// The pass.
    pub pass: Pass,
    /// The storage type.
    pub dtype: Dtype,
    /// The inputs and cotangents.
    pub inputs: Tensors,
}

impl Question {
    fn of(request: &Request<'_>) -> Self {
        let &Request { problem, pass, dtype, inputs, .. } = request;
        Question { problem: problem.clone(), pass, dtype, inputs: inputs.clone() }
    }

    /// The inputs with the arrays that the mask names. Fails where two tensors of one name differ: a file holds one.
    pub fn tensors(&self) -> Result<Tensors, Error> {
        vectors::with_arrays(&self.problem, self.inputs.clone())
    }
}

/// Answers to the questions of one probe, in their order.
pub trait Answers: Sync {
    /// The question of this number as it was asked.
    fn question(&self, number: usize) -> Result<Question, String>;

    /// Its answer, if there is one.
    fn answer(&self, number: usize) -> Result<Option<Tensors>, String>;
}

/// A kernel that answers from files.
struct Replay<'a> {
    files: &'a dyn Answers,
    /// The results that it does not return.
    omits: Vec<String>,
    asked: AtomicUsize,
    notes: Mutex<Notes>,
}

/// Notes of a replay.
#[derive(Default)]
struct Notes {
    /// A fault of the files.
    broken: Option<String>,
    /// The questions without an answer, from 1.
    unanswered: Vec<usize>,
}

impl Replay<'_> {
    fn notes(&self) -> std::sync::MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tier for Replay<'_> {
    fn name(&self) -> String {
        "files".to_string()
    }

    fn offers(&self, _: Algorithm, _: Pass, _: Dtype) -> Result<(), String> {
        Ok(())
    }

    fn returns(&self, output: &str) -> bool {
        !self.omits.iter().any(|name| name == output)
    }

    fn run(&self, request: &Request<'_>) -> Result<Tensors, Refusal> {
        let number = self.asked.fetch_add(1, Ordering::Relaxed);
        let answer = self.files.question(number).and_then(|question| {
            if question != Question::of(request) {
                return Err("the question is not the one that this version of etalon asks".into());
            }
            self.files.answer(number)
        });
        match answer {
            Ok(Some(outputs)) => Ok(outputs),
            Ok(None) => {
                self.notes().unanswered.push(number + 1);
                Err(Refusal::Unsupported("there is no answer".to_string()))
            }
            Err(reason) => {
                self.notes().broken = Some(reason.clone());
                Err(Refusal::Unsupported(reason))
            }
        }
    }
}

impl Probe {
    /// The law and the pass, if there is such a probe.
    fn law(&self) -> Result<(Law, Pass), Error> {
        let law = laws::probes().into_iter().find(|law| law.name == self.law);
        let law = law.ok_or_else(|| Error::value("law", "the name of a probe", &self.law))?;
        Ok((law, self.pass.parse()?))
    }

    /// Its questions, on a case of the suite; or why there are none.
    pub fn questions(&self) -> Result<Vec<Question>, String> {
        let (law, case, pass) = self.parse(&[], None).map_err(|error| error.to_string())?;
        asked::questions(&law, case, pass, (None, None))
    }

    /// The law, the case and the pass; of the problems that somebody brought the case is one by name.
    fn parse(
        &self,
        given: &[Given],
        capabilities: Option<&Capabilities>,
    ) -> Result<(Law, Case, Pass), Error> {
        let (law, pass) = self.law()?;
        let case = match given.iter().find(|given| given.name == self.case) {
            Some(given) => given.case(pass, capabilities)?,
            None => {
                let spec: Spec = self.case.parse()?;
                if spec.is_large() {
                    return Err(Error::value("case", "one of small extents", &self.case));
                }
                spec.build()
            }
        };
        if !law.concerns(&case, pass) {
            return Err(Error::value("case", format!("one that {} is for", self.law), &self.case));
        }
        Ok((law, case, pass))
    }

    /// Judges the answers of a kernel, as one of a profile that takes what `capabilities` say, where it says
    /// anything; or why they cannot be judged.
    pub fn judge(
        &self,
        profile: impl FnOnce(Dtype) -> Profile,
        given: &[Given],
        capabilities: Option<&Capabilities>,
        files: &dyn Answers,
    ) -> Result<Verdict, String> {
        let parsed = self.parse(given, capabilities);
        let (law, case, pass) = parsed.map_err(|error| error.to_string())?;
        let algorithm = case.problem.algorithm();
        let omits = capabilities.map_or(Vec::new(), |x| x.omitted(algorithm, pass));
        let dtype = case.dtype;
        let exact = Exact::new(case, profile(dtype)).without(omits.clone());
        let replay = Replay { files, omits, asked: AtomicUsize::new(0), notes: Mutex::default() };
        let judgement = (law.check)(&Trial::new(&replay, &exact, pass));
        let asked = replay.asked.into_inner();
        let notes = replay.notes.into_inner().unwrap_or_else(PoisonError::into_inner);
        match notes.broken {
            Some(reason) => Err(reason),
            None => Ok(verdict(judgement, asked, &notes.unanswered)),
        }
    }
}

/// The verdict on a probe that asked so many questions, of which some stop at the first without an answer. A failure
/// stands before what has no answer.
fn verdict(judgement: Judgement, asked: usize, unanswered: &[usize]) -> Verdict {
    match judgement {
        Err(flaw) if flaw.clone().verdict().is_negative() => flaw.verdict(),
        _ if !unanswered.is_empty() => {
            let numbers: Vec<String> = unanswered.iter().map(usize::to_string).collect();
            let words = match numbers.split_last() {
                Some((last, [])) => format!("question {last} has"),
                Some((last, others)) => {
                    format!("questions {} and {last} have", others.join(", "))
                }
                None => String::new(),
            };
            Verdict::Undecided(format!("{words} no answer"))
        }
        Err(flaw) => flaw.verdict(),
        Ok(_) if asked == 0 => {
            Verdict::NotAsked("the profile leaves nothing that it could notice".to_string())
        }
        Ok(_) => Verdict::Pass,
    }
}
