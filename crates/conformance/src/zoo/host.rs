//! The host as a tier: a small tiled implementation in f32, sound or with one bug.

use super::job::{Bug, Job, PLAIN, Style};
use super::mutant::{Change, Mutant};
use super::rows::{Results, Rows};
use crate::bounds::values;
use crate::roster;
use crate::roster::linear_cross_entropy::filter::{BOUNDS_OF_DH, BOUNDS_OF_DW, TILES};
use crate::tensor::{Stored, Tensor, Tensors};
use crate::tier::{Choice, Filtered, Refusal, Request, Tier};
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Algorithm, Dtype, Error, Operand, Pass, Role};
use etalon_reference::{Arithmetic, evaluate_in};
use ndarray::ArrayD;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The host as a tier, sound or with one bug.
#[derive(Debug)]
pub struct Host {
    style: Style,
    pub(super) mutant: Option<Mutant>,
    runs: AtomicUsize,
}

impl Host {
    /// A sound host.
    pub fn sound(style: Style) -> Self {
        Host { style, mutant: None, runs: AtomicUsize::new(0) }
    }

    /// The plain host with a bug.
    pub fn mutant(mutant: Mutant) -> Self {
        Host { style: PLAIN, mutant: Some(mutant), runs: AtomicUsize::new(0) }
    }

    /// The algorithms that it computes: those of its bug, or all.
    pub(super) fn of(&self) -> &'static [Algorithm] {
        self.mutant.map_or(&Algorithm::ALL, |mutant| mutant.of)
    }

    /// Mutants of the first order are not asked for the second, nor is anybody for that of lazy attention.
    fn has_second_order(&self, algorithm: Algorithm) -> bool {
        algorithm != Algorithm::LazyAttention
            && self.mutant.is_none_or(|x| matches!(x.change, Some(Change::SecondOrder(_))))
    }

    /// A request as it stands. What a forward pass saves comes from the host's own.
    fn job(&self, request: &Request<'_>, run: usize) -> Result<Job, Error> {
        let &Request { problem, pass, inputs, .. } = request;
        let inputs = values(problem, pass, inputs)?;
        let mut job = Job {
            style: self.style,
            bug: self.mutant.map(|mutant| Bug(mutant.name)),
            drops_tail: false,
            run,
            problem: problem.clone(),
            pass,
            filter: None,
            inputs: inputs.iter().map(|(name, x)| (name.clone(), self.rows(x))).collect(),
        };
        let later = matches!(pass, Pass::Backward | Pass::DoubleBackward);
        if job.problem.scores().is_some() && later {
            let forward = Request { pass: Pass::Forward, ..*request };
            for (name, x) in self.answer(&forward, run)? {
                job.inputs.insert(name.clone(), self.rows(&x.to_f64(&name)?));
            }
        }
        Ok(job)
    }

    fn answer(&self, request: &Request<'_>, run: usize) -> Result<Tensors, Error> {
        let mut job = self.job(request, run)?;
        let change = self.mutant.and_then(|mutant| mutant.change);
        change.into_iter().for_each(|change| change.before(&mut job));
        let mut results = match request.pass {
            Pass::DoubleBackward | Pass::Jvp => second_order(request)?,
            _ => roster::results(&job)?,
        };
        change.into_iter().for_each(|change| change.after(&job, &mut results));
        if let (Some(Change::SecondOrder(change)), Pass::DoubleBackward) = (change, request.pass) {
            change(&mut results, roster::results(&job)?);
        }
        Ok(self.stored(request, results))
    }

    /// Results of linear_cross_entropy with a filter.
    fn filter(&self, request: &Request<'_>, filter: Filter, run: usize) -> Result<Filtered, Error> {
        let mut job = Job { filter: Some(filter), ..self.job(request, run)? };
        let change = self.mutant.and_then(|mutant| mutant.change);
        change.into_iter().for_each(|change| change.before(&mut job));
        let mut results = roster::results(&job)?;
        change.into_iter().for_each(|change| change.after(&job, &mut results));
        let mut list = |name| -> Vec<f64> {
            let rows = results.remove(name);
            rows.into_iter().flat_map(|rows| rows.data).map(f64::from).collect()
        };
        let (dh, dw, tiles) = (list(BOUNDS_OF_DH), list(BOUNDS_OF_DW), list(TILES));
        let tiles = (tiles[0] as usize, tiles[1] as usize);
        let (outputs, classes) = (self.stored(request, results), self.style.tile);
        Ok(Filtered { outputs, dh, dw, tiles, classes })
    }

    /// True if any host has a choice: it takes no hint, but has a filter.
    pub(super) fn chooses(choice: Choice) -> bool {
        choice == Choice::Filter
    }

    fn stored(&self, request: &Request<'_>, mut results: Results) -> Tensors {
        let operands = request.problem.operands(request.pass);
        let outputs = operands.iter().filter(|operand| operand.role == Role::Output);
        results.values_mut().for_each(|rows| self.keep(rows));
        outputs.map(|operand| store(operand, &results, request.dtype)).collect()
    }

    fn rows(&self, x: &ArrayD<f64>) -> Rows {
        let mut rows = Rows::of(x);
        self.keep(&mut rows);
        rows
    }

    /// Every number as the style keeps it.
    fn keep(&self, rows: &mut Rows) {
        rows.data.iter_mut().for_each(|x| *x = self.style.kept(*x));
    }
}

/// The second order and the tangents are the reference's, in f32.
fn second_order(&Request { problem, pass, inputs, .. }: &Request<'_>) -> Result<Results, Error> {
    let outputs = evaluate_in(Arithmetic::F32, problem, pass, &values(problem, pass, inputs)?)?;
    let rows = |x: &Operand| Some((x.name, Rows::of(outputs.get(x.name)?)));
    Ok(problem.operands(pass).iter().filter_map(rows).collect())
}

fn store(operand: &Operand, results: &Results, dtype: Dtype) -> (String, Tensor) {
    let mut data = results[operand.name].data.iter();
    let next = || data.next().map_or(f64::NAN, |&x| f64::from(x));
    let array = ArrayD::from_shape_simple_fn(operand.shape.as_slice(), next);
    let stored = Stored::of(operand.precision, dtype);
    (operand.name.to_string(), Tensor::store(&array, stored))
}

impl Tier for Host {
    fn name(&self) -> String {
        format!("zoo/{}", self.mutant.map_or(self.style.name, |mutant| mutant.name))
    }

    fn offers(&self, algorithm: Algorithm, pass: Pass, dtype: Dtype) -> Result<(), String> {
        match (pass, dtype) {
            _ if !self.of().contains(&algorithm) => Err("it speaks of another algorithm".into()),
            (Pass::DoubleBackward | Pass::Jvp, _) if !self.has_second_order(algorithm) => {
                Err("the host has the first order only".into())
            }
            (Pass::Step, _) if !algorithm.passes().contains(&pass) => {
                Err("the algorithm has no steps".into())
            }
            (Pass::ForwardBackward, _) => Err("the host fuses no passes".into()),
            (_, Dtype::F64) => Err("the host sums in f32".into()),
            _ => Ok(()),
        }
    }

    fn has(&self, choice: Choice) -> bool {
        Host::chooses(choice)
    }

    fn is_slow(&self) -> bool {
        true
    }

    fn run(&self, request: &Request<'_>) -> Result<Tensors, Refusal> {
        Ok(self.answer(request, self.runs.fetch_add(1, Ordering::Relaxed))?)
    }

    fn filtered(&self, request: &Request<'_>, filter: Filter) -> Result<Option<Filtered>, Refusal> {
        let run = self.runs.fetch_add(1, Ordering::Relaxed);
        Ok(Some(self.filter(request, filter, run)?))
    }
}
