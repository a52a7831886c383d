//! The host: a small tiled implementation in f32, in which every mutant is a line or two.

use super::mutant::Mutant;
use super::{attention, lazy_attention, linear_attention, linear_cross_entropy};
use crate::tensor::{Tensor, Tensors};
use crate::tier::{Answer, Request, Tier};
use etalon_problem::{Algorithm, Dtype, Error, Pass, Problem, Role};
use half::bf16;
use ndarray::{ArrayD, IxDyn};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How the softmax runs over the key tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Softmax {
    /// A running maximum; sums are rescaled whenever it grows.
    Streaming,
    /// As streaming, but rescaled only when the maximum grows by more than 5.
    Lazy,
    /// The maximum first, in a sweep of its own.
    TwoPass,
}

/// Ways to compute the same: none of them may trip a law.
#[derive(Debug, Clone, Copy)]
pub struct Style {
    /// Its name.
    pub name: &'static str,
    /// Keys in a tile.
    pub tile: usize,
    /// How the softmax runs.
    pub softmax: Softmax,
    /// exp as a power of two.
    pub base2: bool,
    /// Rows are visited from the last to the first, which turns the sums of dk and dv around.
    pub backwards: bool,
}

/// The plain host.
pub const PLAIN: Style =
    Style { name: "plain", tile: 16, softmax: Softmax::Streaming, base2: false, backwards: false };

/// Correct but different: the controls.
pub const CONTROLS: [Style; 6] = [
    PLAIN,
    Style { name: "tile-of-1", tile: 1, ..PLAIN },
    Style { name: "tile-of-128", tile: 128, ..PLAIN },
    Style { name: "two-pass", softmax: Softmax::TwoPass, tile: 48, ..PLAIN },
    Style { name: "lazy-rescale", softmax: Softmax::Lazy, ..PLAIN },
    Style { name: "base-2-reversed", base2: true, backwards: true, ..PLAIN },
];

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

    /// The algorithms that it computes: those of its bug, or all that have a host.
    pub(super) fn of(&self) -> &'static [Algorithm] {
        self.mutant.map_or(WITH_HOST, Mutant::of)
    }

    /// Mutants of the first order are not asked for the second.
    fn has_second_order(&self, algorithm: Algorithm) -> bool {
        matches!(algorithm, Algorithm::Attention | Algorithm::AttentionLse)
            && self.mutant.is_none_or(|mutant| mutant == Mutant::ConstantWeights)
    }

    fn answer(&self, request: &Request<'_>) -> Result<Tensors, Error> {
        let job = Job {
            style: self.style,
            mutant: self.mutant,
            run: self.runs.fetch_add(1, Ordering::Relaxed),
            request,
        };
        let results = match request.problem {
            Problem::Attention(_) | Problem::AttentionLse(_) => attention::results(&job),
            Problem::LinearAttention(problem) => linear_attention::results(problem, &job),
            Problem::LazyAttention(problem) => lazy_attention::results(problem, &job),
            Problem::LinearCrossEntropy(problem) => linear_cross_entropy::results(problem, &job),
        }?;
        let operands = request.problem.operands(request.pass);
        let outputs = operands.iter().filter(|operand| operand.role == Role::Output);
        let tensor = |operand: &etalon_problem::Operand| {
            let stored = etalon_problem::Stored::of(operand.precision, request.dtype);
            let values = results[operand.name].iter().map(|&x| f64::from(x)).collect();
            let (shape, found) = (operand.shape.clone(), vec![results[operand.name].len()]);
            let array = ArrayD::from_shape_vec(IxDyn(&shape), values);
            let error = |_| Error::Shape { operand: operand.name.into(), expected: shape, found };
            Ok((operand.name.to_string(), Tensor::store(&array.map_err(error)?, stored)))
        };
        outputs.map(tensor).collect()
    }
}

/// The algorithms that the host computes.
pub(super) const WITH_HOST: &[Algorithm] = &Algorithm::ALL;

/// The error of a request for an algorithm that it does not compute.
pub(super) fn no_host(algorithm: Algorithm) -> Error {
    Error::Unsupported {
        what: algorithm.to_string(),
        reason: "the zoo has no host for it".to_string(),
    }
}

/// A request to the host.
pub(super) struct Job<'a> {
    pub style: Style,
    pub mutant: Option<Mutant>,
    /// How many requests came before it.
    pub run: usize,
    pub request: &'a Request<'a>,
}

/// Results by name, in f32 and row-major order.
pub(super) type Results = BTreeMap<&'static str, Vec<f32>>;

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
            (_, Dtype::F64) => Err("the host sums in f32".into()),
            _ => Ok(()),
        }
    }

    fn run(&self, request: &Request<'_>) -> Answer {
        if let Err(reason) = self.offers(request.problem.algorithm(), request.pass, request.dtype) {
            return Answer::Unsupported(reason);
        }
        match self.answer(request) {
            Ok(outputs) => Answer::Outputs(outputs),
            Err(error) => Answer::Error(error.to_string()),
        }
    }
}

/// Through bf16 and back.
pub(super) fn through_bf16(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}
