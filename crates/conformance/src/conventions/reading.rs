//! A problem as a kernel reads it that is written for another convention, or has a mistake: what it changes,
//! and what it returns.

use super::forward::Saved;
use super::{Edit, Edits, gather};
use crate::tensor::Values;
use etalon_problem::{Axis, Error, Operand, Pass, Problem, Role};
use etalon_reference::{Arithmetic, evaluate_in};
use ndarray::{ArrayD, Axis as Along};
use std::sync::Arc;

/// A problem as a kernel reads it that was written for another convention, or has a mistake.
#[derive(Debug, Clone)]
pub struct Reading {
    /// Its name: that of a convention, or of an option or tensor and what happened to it.
    pub id: String,
    /// It in words.
    pub text: String,
    /// The option or tensor that is read otherwise, where it was derived from one.
    pub of: Option<&'static str>,
    /// The problem.
    pub problem: Problem,
    /// True if an input was taken from elsewhere, or lies otherwise in memory: readings that are tried last.
    pub is_late: bool,
    /// Edits of the inputs.
    pub(crate) edits: Edits,
    /// Edits of the outputs.
    pub(crate) finish: Edits,
    /// The outputs that it speaks of; empty: all.
    pub(crate) only: Vec<&'static str>,
    /// True if query head h uses key head h mod Hk.
    pub(crate) is_interleaved: bool,
    /// The key head of every query head of a problem with scores, where neighbours do not share them.
    pub(crate) key_heads: Option<Arc<[usize]>>,
    /// The tensors that its backward pass reads of the forward pass of the asked problem; `None`: of its own.
    pub(crate) saved: Option<Arc<Saved>>,
    /// The readings from whose results its own are made; `None`: it is evaluated itself.
    pub(crate) joined: Option<Joined>,
}

/// Makes results of those of several readings.
type Join = dyn Fn(&[Values]) -> Values + Send + Sync;

/// Results that are made, element by element, from those of several readings.
#[derive(Clone)]
pub(crate) struct Joined {
    pub of: Vec<Reading>,
    pub join: Arc<Join>,
}

impl Reading {
    /// A reading in which nothing is changed yet.
    pub(super) fn plain(
        id: impl Into<String>,
        text: impl Into<String>,
        problem: &Problem,
    ) -> Reading {
        Reading {
            id: id.into(),
            text: text.into(),
            of: None,
            problem: problem.clone(),
            is_late: false,
            edits: Vec::new(),
            finish: Vec::new(),
            only: Vec::new(),
            is_interleaved: false,
            key_heads: None,
            saved: None,
            joined: None,
        }
    }

    /// With an edit of an input.
    pub(super) fn edit(mut self, name: &str, edit: Edit) -> Self {
        self.edits.push((name.to_string(), edit));
        self
    }

    /// With the option or tensor that it was derived from.
    pub(super) fn of(mut self, name: &'static str) -> Self {
        self.of = Some(name);
        self
    }

    /// To be tried last.
    pub(super) fn late(mut self) -> Self {
        self.is_late = true;
        self
    }

    /// Of these outputs alone.
    pub(super) fn only(mut self, names: impl IntoIterator<Item = &'static str>) -> Self {
        self.only = names.into_iter().collect();
        self
    }

    /// Made from the results of others.
    pub(super) fn joined(
        mut self,
        of: impl IntoIterator<Item = Reading>,
        join: impl Fn(&[Values]) -> Values + Send + Sync + 'static,
    ) -> Self {
        self.joined = Some(Joined { of: of.into_iter().collect(), join: Arc::new(join) });
        self
    }

    /// The sum of the results of others, each times a number.
    pub(super) fn sum(self, of: impl IntoIterator<Item = (f64, Reading)>) -> Self {
        let (numbers, of): (Vec<f64>, Vec<Reading>) = of.into_iter().unzip();
        self.joined(of, move |terms| {
            let of = |name: &String| {
                let terms = terms.iter().zip(&numbers);
                let terms = terms.map(|(x, number)| Some(x.get(name)?.mapv(|x| number * x)));
                terms.reduce(|x, y| Some(x? + y?)).flatten()
            };
            let names = terms.first().into_iter().flat_map(|x| x.keys());
            names.filter_map(|name| Some((name.clone(), of(name)?))).collect()
        })
    }

    /// True if nothing but the problem may be another one.
    fn is_plain(&self) -> bool {
        self.edits.is_empty()
            && self.finish.is_empty()
            && self.only.is_empty()
            && !self.is_interleaved
            && self.key_heads.is_none()
            && self.saved.is_none()
            && self.joined.is_none()
    }

    /// True if it is another one than the problem.
    pub(super) fn differs(&self, problem: &Problem) -> bool {
        !self.is_plain() || self.problem != *problem
    }

    /// True if another one has the same results, as far as problems tell.
    pub(super) fn is_same(&self, other: &Reading) -> bool {
        self.is_plain() && other.is_plain() && self.problem == other.problem
    }

    /// Number of evaluations of the pass that it takes, about.
    pub(crate) fn evaluations(&self) -> f64 {
        match &self.joined {
            Some(joined) => joined.of.iter().map(Reading::evaluations).sum(),
            // The forward pass of it, too.
            None => {
                if self.saved.is_some() {
                    1.4
                } else {
                    1.0
                }
            }
        }
    }

    /// Results of a kernel of the reading for a pass, of these inputs of the asked problem.
    pub fn results(&self, pass: Pass, inputs: &Values) -> Result<Values, Error> {
        self.made(|reading| reading.evaluated(pass, inputs))
    }

    /// Its results, where those of readings that are no others' are evaluated in some way.
    pub(crate) fn made<E>(
        &self,
        evaluate: impl Fn(&Reading) -> Result<Values, E> + Copy,
    ) -> Result<Values, E> {
        let mut results = match &self.joined {
            None => evaluate(self)?,
            Some(joined) => {
                let terms: Result<Vec<Values>, E> =
                    joined.of.iter().map(|reading| reading.made(evaluate)).collect();
                (joined.join)(&terms?)
            }
        };
        if !self.only.is_empty() {
            results.retain(|name, _| self.only.iter().any(|own| own == name));
        }
        Ok(results)
    }

    /// Its results, where it is not made of others.
    pub(crate) fn evaluated(&self, pass: Pass, inputs: &Values) -> Result<Values, Error> {
        self.problem.check()?;
        let operands = self.problem.operands(pass);
        let mut own = Values::new();
        for operand in operands.iter().filter(|operand| operand.role.is_given()) {
            let heads = self.heads(operand, false);
            let mut edits = self.edits_of(operand.name);
            edits.extend(&heads);
            let x = gather(inputs.get(operand.name), &edits, None);
            own.extend(x.map(|x| (operand.name.to_string(), x)));
        }
        let mut problem = self.problem.clone();
        if let (Some(heads), Some(scores)) = (&self.key_heads, problem.scores_mut()) {
            scores.extents.key_heads = heads.len();
        }
        if let Some(saved) = &self.saved {
            saved.read(&problem, None, &mut own)?;
        }
        let mut results = evaluate_in(Arithmetic::F64, &problem, pass, &own)?;
        for operand in operands.iter().filter(|operand| operand.role == Role::Output) {
            let Some(x) = results.get_mut(operand.name) else { continue };
            if let (Some(heads), Some(axis)) = (&self.key_heads, operand.position(Axis::KeyHeads)) {
                *x = summed(x, axis, heads, operand.shape[axis]);
            }
            let heads = self.heads(operand, true);
            let mut edits: Vec<&Edit> = heads.iter().filter(|_| self.is_interleaved).collect();
            edits.extend(self.finish_of(operand.name));
            if !edits.is_empty() {
                *x = gather(Some(x), &edits, None).unwrap_or_else(|| x.clone());
            }
        }
        Ok(results)
    }

    /// Heads of a tensor in the order in which they are grouped, or back.
    fn heads(&self, operand: &Operand, back: bool) -> Option<Edit> {
        let (axis, order) = match &self.key_heads {
            Some(heads) => (operand.position(Axis::KeyHeads)?, heads.clone()),
            None if self.is_interleaved => {
                (query_heads(operand)?, interleaved(&self.problem, back).into())
            }
            None => return None,
        };
        Some(Edit::Take { axis, order, beyond: f64::NAN })
    }

    /// The key head of a query head, of so many in a group.
    pub(crate) fn key_head(&self, head: usize, key_heads: usize, group: usize) -> usize {
        match &self.key_heads {
            Some(heads) => heads.get(head).copied().unwrap_or(head / group),
            None if self.is_interleaved => head % key_heads,
            None => head / group,
        }
    }

    /// Edits of an input.
    pub(crate) fn edits_of(&self, name: &str) -> Vec<&Edit> {
        self.edits.iter().filter(|(own, _)| own == name).map(|(_, edit)| edit).collect()
    }

    /// Edits of an output.
    pub(crate) fn finish_of(&self, name: &str) -> Vec<&Edit> {
        self.finish.iter().filter(|(own, _)| own == name).map(|(_, edit)| edit).collect()
    }
}

impl std::fmt::Debug for Joined {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&self.of).finish()
    }
}

/// The sums of the entries of an axis that go into each of so many.
fn summed(x: &ArrayD<f64>, axis: usize, into: &[usize], entries: usize) -> ArrayD<f64> {
    let mut shape = x.shape().to_vec();
    shape[axis] = entries;
    let mut sums = ArrayD::zeros(shape);
    for (x, &entry) in x.axis_iter(Along(axis)).zip(into) {
        let mut sum = sums.index_axis_mut(Along(axis), entry);
        sum += &x;
    }
    sums
}

/// One result alone.
pub(super) fn alone(name: &str, x: ArrayD<f64>) -> Values {
    [(name.to_string(), x)].into_iter().collect()
}

/// The axis of all query heads of a tensor, if it has one.
fn query_heads(operand: &Operand) -> Option<usize> {
    let own = |axis: &Axis| matches!(axis, Axis::QueryHeads | Axis::QueryHeadsOr1);
    operand.axes.iter().position(own).filter(|&at| operand.shape[at] > 1)
}

/// The query heads in the order in which they would share key heads as neighbours, where head h uses key
/// head h mod Hk; or back.
fn interleaved(problem: &Problem, back: bool) -> Vec<usize> {
    let [query, key] = [Axis::QueryHeads, Axis::KeyHeads].map(|axis| problem.extent(axis));
    let group = query / key.max(1);
    let place = |h: usize| match back {
        true => h % key * group + h / key,
        false => h % group * key + h / group,
    };
    (0..query).map(place).collect()
}
