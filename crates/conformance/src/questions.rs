//! Probes as files: what a probe asks of a kernel, and its judgement of answers that were written elsewhere.
//!
//! A probe is a law ([`Kind::Probe`]) on a case. A recorder in the place of a kernel hears its
//! questions, and a replay answers them again from a folder, so that nothing of a probe is written
//! twice.

use crate::cases::{Depth, Spec, specs};
use crate::laws::{self, Exact, Kind, Law, Trial};
use crate::profile::Profile;
use crate::report::Verdict;
use crate::tensor::{Data, Tensor, Tensors};
use crate::tier::{Refusal, Request, Tier};
use crate::tiers::Reference;
use etalon_problem::{Algorithm, Dtype, Error, Mask, Pass, Problem};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// A probe: a law on a pass of a case, in words, as they stand in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Probe {
    /// The law, by name.
    pub law: String,
    /// The case, by name.
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

    /// The inputs with the arrays that the mask names.
    pub fn tensors(&self) -> Tensors {
        let mut tensors = self.inputs.clone();
        let Some(scores) = self.problem.scores() else { return tensors };
        scores.mask.clone().visit_mut(&mut |mask| match mask {
            Mask::Segments { query, key } => {
                for ids in [query, key] {
                    let data = Data::I64(ids.data.to_vec());
                    tensors.insert(ids.name.clone(), Tensor { shape: ids.shape.clone(), data });
                }
            }
            Mask::Array(array) => {
                let data = Data::Bool(array.data.to_vec());
                tensors.insert(array.name.clone(), Tensor { shape: array.shape.clone(), data });
            }
            _ => {}
        });
        tensors
    }
}

/// As many cases of each law and pass at the most, each with a value of an axis that those before lack.
const CASES: usize = 6;

/// The probes of some algorithms in a storage type, with their questions: no two ask the same.
pub fn probes(algorithms: &[Algorithm], dtype: Dtype, seed: u64) -> Vec<(Probe, Vec<Question>)> {
    let probes: Vec<Law> = laws::all().into_iter().filter(|law| law.kind == Kind::Probe).collect();
    let mut found: Vec<(Probe, Vec<Question>)> = Vec::new();
    for &algorithm in algorithms {
        let specs = specs(algorithm, Depth::Core, seed).filter(|spec| !spec.is_large());
        let cases: Vec<_> = specs.map(|spec| Spec { dtype, ..spec }.build()).collect();
        let of_algorithm = probes.iter().filter(|law| law.of.contains(&algorithm));
        for (law, &pass) in
            of_algorithm.flat_map(|law| law.passes.iter().map(move |pass| (law, pass)))
        {
            let mut seen = BTreeSet::new();
            let mut left = CASES;
            let concerned = cases.iter().filter(|case| law.concerns(case, pass));
            for case in concerned.take(law.looks.unwrap_or(usize::MAX)) {
                let values = case.spec.values();
                if left == 0 || values.iter().all(|value| seen.contains(value)) {
                    continue;
                }
                let probe = Probe {
                    law: law.name.to_string(),
                    case: case.name.clone(),
                    pass: pass.to_string(),
                };
                let questions = questions(law, case.spec, pass);
                let known = |other: &(Probe, Vec<Question>)| {
                    other.0.law == probe.law && other.1 == questions
                };
                if !questions.is_empty() && !found.iter().any(known) {
                    seen.extend(values);
                    left -= 1;
                    found.push((probe, questions));
                }
            }
        }
    }
    found
}

/// What a probe asks of a kernel that answers rightly.
fn questions(law: &Law, spec: Spec, pass: Pass) -> Vec<Question> {
    let exact = Exact::new(spec.build(), Profile::strict(spec.dtype));
    let recorder = Recorder { heard: Mutex::new(Vec::new()) };
    // What the law says of the reference does not matter here: that it asked does.
    let _ = (law.check)(&Trial::new(&recorder, &exact, pass));
    recorder.heard.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// The reference, which hears what it is asked.
struct Recorder {
    heard: Mutex<Vec<Question>>,
}

impl Tier for Recorder {
    fn name(&self) -> String {
        "recorder".to_string()
    }

    fn offers(&self, algorithm: Algorithm, pass: Pass, dtype: Dtype) -> Result<(), String> {
        Reference.offers(algorithm, pass, dtype)
    }

    fn run(&self, request: &Request<'_>) -> Result<Tensors, Refusal> {
        let heard = &mut self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        heard.push(Question::of(request));
        Reference.run(request)
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
    asked: AtomicUsize,
    /// What is wrong with the files.
    broken: Mutex<Option<String>>,
}

impl Tier for Replay<'_> {
    fn name(&self) -> String {
        "files".to_string()
    }

    fn offers(&self, _: Algorithm, _: Pass, _: Dtype) -> Result<(), String> {
        Ok(())
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
            Ok(None) => Err(Refusal::Unsupported("there is no answer".to_string())),
            Err(reason) => {
                *self.broken.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason.clone());
                Err(Refusal::Unsupported(reason))
            }
        }
    }
}

impl Probe {
    /// The law, the case and the pass, if there is such a probe.
    fn parse(&self) -> Result<(Law, Spec, Pass), Error> {
        let (spec, pass): (Spec, Pass) = (self.case.parse()?, self.pass.parse()?);
        let law = laws::find(&self.law).filter(|law| law.kind == Kind::Probe);
        let law = law.ok_or_else(|| Error::value("law", "the name of a probe", &self.law))?;
        if spec.is_large() || !law.concerns(&spec.build(), pass) {
            return Err(Error::value("case", format!("one that {} is for", self.law), &self.case));
        }
        Ok((law, spec, pass))
    }

    /// Judges the answers of a kernel, as one of a profile; or why they cannot be judged.
    pub fn judge(
        &self,
        profile: impl FnOnce(Dtype) -> Profile,
        files: &dyn Answers,
    ) -> Result<Verdict, String> {
        let (law, spec, pass) = self.parse().map_err(|error| error.to_string())?;
        let exact = Exact::new(spec.build(), profile(spec.dtype));
        let replay = Replay { files, asked: AtomicUsize::new(0), broken: Mutex::new(None) };
        let verdict = match (law.check)(&Trial::new(&replay, &exact, pass)) {
            Ok(_) => Verdict::Pass,
            Err(flaw) => flaw.verdict(),
        };
        match replay.broken.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(reason) => Err(reason),
            None => Ok(verdict),
        }
    }
}
