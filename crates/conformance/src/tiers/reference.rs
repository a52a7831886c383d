//! The reference as a tier, and as the oracle.

use super::door;
use crate::algorithms::judged;
use crate::tensor::{Stored, Tensor, Tensors, Values, values};
use crate::tier::{Answer, Hints, Request, Tier};
use etalon_problem::{Algorithm, Dtype, Error, LazyAttention, Operand, Pass, Problem, Role};
use etalon_reference::scalar::{Quad, Real};
use etalon_reference::{
    attention, attention_lse, evaluate, lazy_attention, linear_attention, linear_cross_entropy,
};
use ndarray::{Array4, ArrayD};
use std::collections::BTreeMap;
use std::marker::PhantomData;

/// The reference: f64 whatever the storage type of the inputs, rounded once at the end to the
/// type in which the request wants its outputs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reference;

impl Tier for Reference {
    fn name(&self) -> String {
        "reference".to_string()
    }

    fn offers(&self, algorithm: Algorithm, pass: Pass, _: Dtype) -> Result<(), String> {
        has(algorithm, pass)
    }

    fn run(&self, request: &Request<'_>) -> Answer {
        let recompute = Hints { recompute: true, ..request.hints };
        door::answer(&Request { hints: recompute, ..*request }, &etalon_reference::run)
    }
}

/// The reference's formulas in another arithmetic, judged like any tier: in f32 they show what the
/// bounds leave to a plain kernel, in double-double that the f64 oracle is not the one that errs.
#[derive(Debug, Clone, Copy)]
pub struct ReferenceIn<T> {
    name: &'static str,
    arithmetic: PhantomData<T>,
}

impl ReferenceIn<f32> {
    /// In f32, for every storage type but f64.
    pub fn single() -> Self {
        ReferenceIn { name: "reference/f32", arithmetic: PhantomData }
    }
}

impl ReferenceIn<Quad> {
    /// In double-double, for f64.
    pub fn double_double() -> Self {
        ReferenceIn { name: "reference/double-double", arithmetic: PhantomData }
    }
}

/// Whether these tiers leave an algorithm to others, which compute it for their own sake.
fn has_other_tiers(algorithm: Algorithm) -> bool {
    matches!(algorithm, Algorithm::Attention | Algorithm::AttentionLse)
}

impl<T: Arithmetic> Tier for ReferenceIn<T> {
    fn name(&self) -> String {
        self.name.to_string()
    }

    fn offers(&self, algorithm: Algorithm, pass: Pass, dtype: Dtype) -> Result<(), String> {
        if has_other_tiers(algorithm) {
            return Err("the simd tier exercises these bounds".to_string());
        }
        let f64_wanted = size_of::<T>() > size_of::<f64>();
        match (dtype == Dtype::F64, f64_wanted) {
            (true, false) => Err("it computes in f32".to_string()),
            (false, true) => Err("it is for f64".to_string()),
            _ if !judged(algorithm).contains(&pass) => {
                Err("it has no bounds that this would exercise".to_string())
            }
            _ => has(algorithm, pass),
        }
    }

    fn is_meant_for(&self, algorithm: Algorithm, pass: Pass) -> bool {
        let storage = crate::cases::storage(algorithm);
        storage.iter().any(|&dtype| self.offers(algorithm, pass, dtype).is_ok())
    }

    fn run(&self, request: &Request<'_>) -> Answer {
        match self.offers(request.problem.algorithm(), request.pass, request.dtype) {
            Ok(()) => answer::<T>(request),
            Err(reason) => Answer::Unsupported(reason),
        }
    }
}

fn has(algorithm: Algorithm, pass: Pass) -> Result<(), String> {
    match algorithm.passes().contains(&pass) {
        true => Ok(()),
        false => Err(format!("{algorithm} has no {pass}")),
    }
}

fn answer<T: Arithmetic>(request: &Request<'_>) -> Answer {
    if let Err(reason) = has(request.problem.algorithm(), request.pass) {
        return Answer::Unsupported(reason);
    }
    let outputs = match outputs::<T>(request) {
        Ok(outputs) => outputs,
        Err(error) => return Answer::Error(error.to_string()),
    };
    let operands = request.problem.operands(request.pass);
    let operands = operands.iter().filter(|operand| operand.role == Role::Output);
    let round = |operand: &Operand| {
        let stored = Stored::of(operand.precision, request.dtype);
        (operand.name.to_string(), Tensor::store(&outputs[operand.name], stored))
    };
    Answer::Outputs(operands.map(round).collect())
}

/// The exact outputs of a request, in f64: nothing is rounded to the storage type.
pub fn oracle(request: &Request<'_>) -> Result<Tensors, Error> {
    let outputs = outputs::<f64>(request)?;
    let operands = request.problem.operands(request.pass);
    let exact = |(name, values): (String, ArrayD<f64>)| {
        let operand = operands.iter().find(|operand| operand.name == name);
        let stored = operand.map(|operand| Stored::of(operand.precision, Dtype::F64));
        let stored = stored.unwrap_or(Stored::Float(Dtype::F64));
        (name, Tensor::store(&values, stored))
    };
    Ok(outputs.into_iter().map(exact).collect())
}

/// What some arithmetic is asked for. Every algorithm in every arithmetic is code of its own, and
/// what is not asked for need not be compiled.
trait Arithmetic: Real {
    /// The outputs of a pass.
    fn outputs(problem: &Problem, pass: Pass, inputs: &Values) -> Result<Arrays<Self>, Error>;
}

impl Arithmetic for f64 {
    fn outputs(problem: &Problem, pass: Pass, inputs: &Values) -> Result<Values, Error> {
        evaluate(problem, pass, inputs)
    }
}

impl Arithmetic for f32 {
    fn outputs(problem: &Problem, pass: Pass, inputs: &Values) -> Result<Arrays<f32>, Error> {
        judged_in(problem, pass, inputs)
    }
}

impl Arithmetic for Quad {
    fn outputs(problem: &Problem, pass: Pass, inputs: &Values) -> Result<Arrays<Quad>, Error> {
        judged_in(problem, pass, inputs)
    }
}

/// The outputs of a request in the arithmetic of T, each then the nearest f64.
fn outputs<T: Arithmetic>(request: &Request<'_>) -> Result<Values, Error> {
    let inputs = values(request.problem, request.pass, request.inputs)?;
    let outputs = T::outputs(request.problem, request.pass, &inputs)?;
    Ok(outputs.into_iter().map(|(name, values)| (name, values.mapv(Real::to_f64))).collect())
}

/// The judged passes of the algorithms that no other tier computes.
fn judged_in<T: Real>(problem: &Problem, pass: Pass, inputs: &Values) -> Result<Arrays<T>, Error> {
    let x = in_arithmetic(inputs);
    match problem {
        Problem::LinearAttention(problem) => linear_attention::evaluate(problem, pass, &x),
        Problem::LazyAttention(problem) => lazy_attention::evaluate(problem, pass, &x),
        Problem::LinearCrossEntropy(problem) => linear_cross_entropy::evaluate(problem, pass, &x),
        other => Err(other.algorithm().no_pass(pass)),
    }
}

/// A pass of attention, attention_lse or linear_cross_entropy in any arithmetic.
pub(crate) fn softmax_in<T: Real>(
    problem: &Problem,
    pass: Pass,
    inputs: &Values,
) -> Result<Arrays<T>, Error> {
    let x = in_arithmetic(inputs);
    match problem {
        Problem::Attention(problem) => attention::evaluate(problem, pass, &x),
        Problem::AttentionLse(problem) => attention_lse::evaluate(problem, pass, &x),
        Problem::LinearCrossEntropy(problem) => linear_cross_entropy::evaluate(problem, pass, &x),
        other => Err(other.algorithm().no_pass(pass)),
    }
}

fn in_arithmetic<T: Real>(inputs: &Values) -> Arrays<T> {
    let wide = |(name, values): (&String, &ArrayD<f64>)| (name.clone(), values.mapv(T::from_f64));
    inputs.iter().map(wide).collect()
}

/// Arrays by name.
pub(crate) type Arrays<T> = BTreeMap<String, ArrayD<T>>;

/// Which pairs of lazy attention are active, or so near to it that |P + τ/n| ≤ margin · (P + |τ/n|).
pub(crate) fn decisions(
    problem: &LazyAttention,
    inputs: &Tensors,
    margin: f64,
) -> Result<Array4<bool>, Error> {
    let x = values(&problem.clone().into(), Pass::Forward, inputs)?;
    let inputs = lazy_attention::Inputs::from_named(&x)?;
    let mut decisions = lazy_attention::active_pairs(problem, &inputs)?;
    let bound = |pair: &lazy_attention::Pair<f64>| margin * (pair.weight + pair.offset.abs());
    for pair in lazy_attention::ambiguous(problem, &inputs, bound)? {
        decisions[[pair.batch, pair.head, pair.query, pair.key]] = true;
    }
    Ok(decisions)
}
