//! The reference as a tier, and as the oracle.

use super::{door, filters, shards};
use crate::profile::Profile;
use crate::tensor::{Stored, Tensor, Tensors, Values, values};
use crate::tier::{Choice, Filtered, Hints, Refusal, Request, Tier};
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Algorithm, Dtype, Error, LazyAttention, Operand, Pass, Role};
use etalon_reference::{Arithmetic, Named, evaluate_in, lazy_attention};
use ndarray::Array4;

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

    fn run(&self, request: &Request<'_>) -> Result<Tensors, Refusal> {
        if shards::of(request).is_some() {
            return Ok(outputs(Arithmetic::F64, request, request.dtype)?);
        }
        let recompute = Hints { recompute: true, ..request.hints };
        let request = Request { hints: recompute, ..*request };
        door::outputs(&request, &etalon_reference::run)
    }

    fn keeps_subnormals(&self) -> bool {
        true
    }

    fn has(&self, choice: Choice) -> bool {
        matches!(choice, Choice::Places | Choice::Shards | Choice::Filter)
    }

    fn filtered(&self, request: &Request<'_>, filter: Filter) -> Result<Option<Filtered>, Refusal> {
        Ok(filtered(Arithmetic::F64, request, filter)?)
    }
}

/// The reference's formulas in another arithmetic, judged like any tier: in f32 they show what the
/// bounds leave to a plain kernel, in double-double that the f64 oracle is not the one that errs.
#[derive(Debug, Clone, Copy)]
pub struct ReferenceIn {
    name: &'static str,
    arithmetic: Arithmetic,
}

impl ReferenceIn {
    /// In f32, for every storage type but f64.
    pub const SINGLE: Self = ReferenceIn { name: "reference/f32", arithmetic: Arithmetic::F32 };
    /// In double-double, for f64.
    pub const DOUBLE_DOUBLE: Self =
        ReferenceIn { name: "reference/double-double", arithmetic: Arithmetic::DoubleDouble };
}

impl Tier for ReferenceIn {
    fn name(&self) -> String {
        self.name.to_string()
    }

    fn offers(&self, algorithm: Algorithm, pass: Pass, dtype: Dtype) -> Result<(), String> {
        // These are left to other tiers, which compute them for their own sake.
        if matches!(algorithm, Algorithm::Attention | Algorithm::AttentionLse) {
            return Err("the simd tier exercises these bounds".to_string());
        }
        match (dtype == Dtype::F64, self.arithmetic == Arithmetic::DoubleDouble) {
            (true, false) => Err("it computes in f32".to_string()),
            (false, true) => Err("it is for f64".to_string()),
            _ => has(algorithm, pass),
        }
    }

    fn is_meant_for(&self, algorithm: Algorithm, pass: Pass) -> bool {
        let storage = crate::cases::storage(algorithm);
        storage.iter().any(|&dtype| self.offers(algorithm, pass, dtype).is_ok())
    }

    fn has(&self, choice: Choice) -> bool {
        matches!(choice, Choice::Shards | Choice::Filter)
    }

    /// The functions of a C library err no more than those of the simd tier.
    fn profile(&self, dtype: Dtype) -> Profile {
        Profile::simd(dtype)
    }

    fn run(&self, request: &Request<'_>) -> Result<Tensors, Refusal> {
        Ok(outputs(self.arithmetic, request, request.dtype)?)
    }

    fn filtered(&self, request: &Request<'_>, filter: Filter) -> Result<Option<Filtered>, Refusal> {
        Ok(filtered(self.arithmetic, request, filter)?)
    }
}

/// Refuses a pass that an algorithm does not have.
pub(super) fn has(algorithm: Algorithm, pass: Pass) -> Result<(), String> {
    match algorithm.passes().contains(&pass) {
        true => Ok(()),
        false => Err(format!("{algorithm} has no {pass}")),
    }
}

/// The exact outputs of a request, in f64: nothing is rounded to the storage type.
pub fn oracle(request: &Request<'_>) -> Result<Tensors, Error> {
    outputs(Arithmetic::F64, request, Dtype::F64)
}

/// The outputs of a request in some arithmetic, each then rounded to where `dtype` stores it.
fn outputs(arithmetic: Arithmetic, request: &Request<'_>, dtype: Dtype) -> Result<Tensors, Error> {
    let &Request { problem, pass, inputs, .. } = request;
    let x = values(problem, pass, inputs)?;
    let outputs = match shards::of(request) {
        Some((own, shards)) => shards::reference(arithmetic, own, request, &x, &shards)?,
        None => evaluate_in(arithmetic, problem, pass, &x)?,
    };
    Ok(stored(request, &outputs, dtype))
}

/// Outputs rounded to where `dtype` stores them.
fn stored(request: &Request<'_>, outputs: &Values, dtype: Dtype) -> Tensors {
    let store = |x: &Operand| {
        let stored = Stored::of(x.precision, dtype);
        Some((x.name.to_string(), Tensor::store(outputs.get(x.name)?, stored)))
    };
    let operands = request.problem.operands(request.pass);
    operands.iter().filter(|x| x.role == Role::Output).filter_map(store).collect()
}

/// Results of a filtered pass in some arithmetic, if the request is for one that can be filtered.
fn filtered(
    arithmetic: Arithmetic,
    request: &Request<'_>,
    filter: Filter,
) -> Result<Option<Filtered>, Error> {
    let Some(problem) = filters::of(request) else { return Ok(None) };
    let x = values(request.problem, request.pass, request.inputs)?;
    let (outputs, found) = filters::reference(arithmetic, problem, &x, filter)?;
    Ok(Some(Filtered { outputs: stored(request, &outputs, request.dtype), ..found }))
}

/// Pairs of lazy attention that are active, or so near to it that |P + τ/n| ≤ margin · (P + |τ/n|).
pub(crate) fn decisions(
    problem: &LazyAttention,
    inputs: &Tensors,
    margin: f64,
) -> Result<Array4<bool>, Error> {
    let x = values(&problem.clone().into(), Pass::Forward, inputs)?;
    let no_integers = etalon_reference::Tensors::new();
    let inputs = lazy_attention::Inputs::from_named(&x, &no_integers)?;
    let mut decisions = lazy_attention::active_pairs(problem, &inputs)?;
    let bound = |pair: &lazy_attention::Pair<f64>| margin * (pair.weight + pair.offset.abs());
    for pair in lazy_attention::ambiguous(problem, &inputs, bound)? {
        decisions[[pair.batch, pair.head, pair.query, pair.key]] = true;
    }
    Ok(decisions)
}
