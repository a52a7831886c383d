//! The host as a tier: a small tiled implementation in f32, sound or with one bug.

use super::composed;
use super::job::{Job, PLAIN, Results, Rows, Style};
use super::mutant::Mutant;
use super::{attention, lazy_attention, linear_attention, linear_cross_entropy};
use crate::bounds::values;
use crate::tensor::{Stored, Tensor, Tensors};
use crate::tier::{Answer, Request, Tier};
use etalon_problem::{Algorithm, Dtype, Error, Operand, Pass, Problem, Role, TokenSequences};
use etalon_reference::{Arithmetic, evaluate_in};
use ndarray::{ArrayD, IxDyn};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The host as a tier, sound or with one bug.
#[derive(Debug)]
pub struct Host {
    style: Style,
    mutant: Option<Mutant>,
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
        self.mutant.map_or(&Algorithm::ALL, Mutant::of)
    }

    /// Mutants of the first order are not asked for the second.
    fn has_second_order(&self, algorithm: Algorithm) -> bool {
        matches!(algorithm, Algorithm::Attention | Algorithm::AttentionLse)
            && self.mutant.is_none_or(|mutant| mutant == Mutant::ConstantWeights)
    }

    /// A request as it stands. What a forward pass saves comes from the host's own.
    fn job(&self, request: &Request<'_>, run: usize) -> Result<Job, Error> {
        let &Request { problem, pass, inputs, .. } = request;
        let Host { style, mutant, .. } = *self;
        let inputs = values(problem, pass, inputs)?;
        let inputs = inputs.iter().map(|(name, x)| (name.clone(), Rows::of(x))).collect();
        let mut job = Job { style, mutant, run, problem: problem.clone(), pass, inputs };
        if let (Problem::LinearAttention(problem), Pass::Step) = (&mut job.problem, pass) {
            // A step is a forward pass of one token.
            problem.extents.tokens = 1;
            problem.sequences = TokenSequences::Dense;
            (problem.initial_state, problem.final_state) = (true, true);
            for name in ["q", "k", "v"] {
                let rows = job.inputs.get_mut(name);
                rows.into_iter().for_each(|x| x.shape.swap(2, 3));
            }
        }
        let saved = pass == Pass::Backward || job.takes_weights_for_constants();
        if job.problem.scores().is_some() && saved {
            let forward = Request { pass: Pass::Forward, ..*request };
            for (name, x) in self.answer(&forward, run)? {
                job.inputs.insert(name.clone(), Rows::of(&x.to_f64(&name)?));
            }
        }
        Ok(job)
    }

    fn answer(&self, request: &Request<'_>, run: usize) -> Result<Tensors, Error> {
        let mut job = self.job(request, run)?;
        composed::before(&mut job);
        let mut results = results(&job, request)?;
        composed::after(&job, &mut results);
        let operands = request.problem.operands(request.pass);
        let outputs = operands.iter().filter(|operand| operand.role == Role::Output);
        outputs.map(|operand| store(operand, &results, request.dtype)).collect()
    }
}

/// The results of a sound kernel, or of one with a bug inside.
fn results(job: &Job, request: &Request<'_>) -> Result<Results, Error> {
    if matches!(job.pass, Pass::DoubleBackward | Pass::Jvp) {
        return second_order(job, request);
    }
    Ok(match &job.problem {
        Problem::Attention(problem) => attention::results(job, &problem.scores),
        Problem::AttentionLse(problem) => attention::results(job, &problem.scores),
        Problem::LinearAttention(problem) => linear_attention::results(job, problem)?,
        Problem::LazyAttention(problem) => lazy_attention::results(job, problem),
        Problem::LinearCrossEntropy(problem) => linear_cross_entropy::results(job, problem),
    })
}

/// The second order and the tangents are the reference's, in f32, except where P is taken for a
/// constant.
fn second_order(job: &Job, request: &Request<'_>) -> Result<Results, Error> {
    let (problem, pass) = (request.problem, request.pass);
    let inputs = values(problem, pass, request.inputs)?;
    let outputs = evaluate_in(Arithmetic::F32, problem, pass, &inputs)?;
    let rows = |name: &str| Some(Rows::of(outputs.get(name)?));
    let operands = problem.operands(pass).into_iter();
    let mut results: Results = operands.filter_map(|x| Some((x.name, rows(x.name)?))).collect();
    if let (Some(scores), true) = (job.problem.scores(), job.takes_weights_for_constants()) {
        let mut first = attention::results(job, scores);
        let pairs = [("gq", "dq"), ("gk", "dk")].into_iter();
        results.extend(pairs.filter_map(|(second, name)| Some((second, first.remove(name)?))));
    }
    Ok(results)
}

fn store(operand: &Operand, results: &Results, dtype: Dtype) -> Result<(String, Tensor), Error> {
    let data = &results[operand.name].data;
    let values = data.iter().map(|&x| f64::from(x)).collect();
    let array = ArrayD::from_shape_vec(IxDyn(&operand.shape), values);
    let (expected, found) = (operand.shape.clone(), vec![data.len()]);
    let error = |_| Error::Shape { operand: operand.name.into(), expected, found };
    Ok((
        operand.name.to_string(),
        Tensor::store(&array.map_err(error)?, Stored::of(operand.precision, dtype)),
    ))
}

impl Tier for Host {
    fn name(&self) -> String {
        format!("zoo/{}", self.mutant.map_or(self.style.name, Mutant::name))
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

    fn run(&self, request: &Request<'_>) -> Answer {
        if let Err(reason) = self.offers(request.problem.algorithm(), request.pass, request.dtype) {
            return Answer::Unsupported(reason);
        }
        match self.answer(request, self.runs.fetch_add(1, Ordering::Relaxed)) {
            Ok(outputs) => Answer::Outputs(outputs),
            Err(error) => Answer::Error(error.to_string()),
        }
    }
}
