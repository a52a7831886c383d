//! Ids: the name of what a vector is.

use crate::cases::Spec;
use crate::laws;
use crate::questions::{Probe, Question};
use etalon_problem::{Algorithm, Dtype, Error, Pass};
use std::fmt;
use std::str::FromStr;

/// The name of a vector: algorithm, pass and storage type; the values of its case that are not the first of their
/// axis; and of a probe the law and the number of its question.
///
/// ```
/// use etalon_conformance::vector_set::Id;
///
/// let id: Id = "attention.backward.f32.mask=causal.shape=row".parse()?;
/// assert_eq!(id.to_string(), "attention.backward.f32.mask=causal.shape=row");
/// assert!("attention.backward.f32.mask=diagonal".parse::<Id>().is_err());
/// # Ok::<(), etalon_problem::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Id {
    spec: Spec,
    pass: Pass,
    probe: Option<(String, usize)>,
}

impl Id {
    /// The vector of a pass at the point of a case, with draws of its own.
    pub fn new(spec: &Spec, pass: Pass) -> Result<Self, Error> {
        let values = others(spec);
        let values: Vec<(&str, &str)> = values.iter().filter_map(|x| x.split_once('=')).collect();
        Ok(Id { spec: drawn(spec.algorithm, spec.dtype, &values)?, pass, probe: None })
    }

    /// The question of that number, from 1, of a probe at the same point.
    pub fn asking(&self, law: &str, number: usize) -> Self {
        Id { probe: Some((law.to_string(), number)), ..self.clone() }
    }

    /// The case of the suite with the same problem and elements.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The pass.
    pub fn pass(&self) -> Pass {
        self.pass
    }

    /// The probe, and the number of its question from 1, if it is one.
    pub fn probe(&self) -> Option<(Probe, usize)> {
        let (law, number) = self.probe.as_ref()?;
        let (case, pass) = (self.spec.to_string(), self.pass.to_string());
        Some((Probe { law: law.clone(), case, pass }, *number))
    }

    /// The problem and its inputs.
    pub fn question(&self) -> Result<Question, String> {
        let Some((probe, number)) = self.probe() else {
            let problem = self.spec.problem();
            let inputs = self.spec.tensors(&problem, self.pass);
            return Ok(Question { problem, pass: self.pass, dtype: self.spec.dtype, inputs });
        };
        let questions = probe.questions()?;
        let all = questions.len();
        let own = number.checked_sub(1).and_then(|at| questions.into_iter().nth(at));
        own.ok_or_else(|| format!("{self}: {} asks {all} questions", probe.law))
    }
}

/// The values of a case that are not the first of their axis, as in `mask=causal`.
fn others(spec: &Spec) -> Vec<String> {
    let first: Vec<String> =
        spec.choices().iter().map(|(axis, names)| format!("{axis}={}", names[0])).collect();
    let own = spec.values().into_iter().zip(first);
    own.filter(|(own, first)| own != first).map(|(own, _)| own).collect()
}

/// The case at a point, with draws that follow from the algorithm and from these values alone: an axis that the
/// algorithm gets later changes none, nor does the storage type.
fn drawn(algorithm: Algorithm, dtype: Dtype, values: &[(&str, &str)]) -> Result<Spec, Error> {
    let words: Vec<String> =
        values.iter().map(|(axis, value)| format!(".{axis}={value}")).collect();
    Spec::drawn_by(&format!("{algorithm}{}", words.concat()), (algorithm, dtype), values)
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Spec { algorithm, dtype, .. } = self.spec;
        write!(f, "{algorithm}.{}.{dtype}", self.pass)?;
        others(&self.spec).iter().try_for_each(|value| write!(f, ".{value}"))?;
        self.probe.iter().try_for_each(|(law, number)| write!(f, ".{law}={number}"))
    }
}

impl FromStr for Id {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong =
            || Error::value("id", "ALGORITHM.PASS.TYPE with values as in .mask=causal", text);
        let parts: Vec<&str> = text.split('.').collect();
        let [algorithm, pass, dtype, values @ ..] = &parts[..] else { return Err(wrong()) };
        let values = values.iter().map(|value| value.split_once('='));
        let mut values = values.collect::<Option<Vec<_>>>().ok_or_else(wrong)?;
        let is_probe = |x: &&(&str, &str)| laws::probes().iter().any(|law| law.name == x.0);
        let probe = match values.last().filter(is_probe) {
            Some(&(law, number)) => {
                values.pop();
                Some((law.to_string(), number.parse().map_err(|_| wrong())?))
            }
            None => None,
        };
        let spec = drawn(algorithm.parse()?, dtype.parse()?, &values)?;
        let id = Id { spec, pass: pass.parse()?, probe };
        // One vector has one id.
        if id.to_string() == text { Ok(id) } else { Err(wrong()) }
    }
}
