//! Gate G1's bounds: how far a result may lie from the exact one, proven for every element from
//! the inputs and a declared profile. [`etalon_problem::docs::numerics`] has the derivation, with
//! the numbers (N1) to (N96) that the comments here use.
//!
//! The cost is that of about three forward passes; heads run in parallel. The work shares nothing
//! with the tiers that it judges: it knows visible pairs from [`etalon_problem::Mask::allows`].

mod attention;
mod cap;
mod heads;
mod inputs;
mod lazy_attention;
mod linear_attention;
mod linear_cross_entropy;
mod model;
mod reach;
mod scores;
mod sum;
pub mod trace;
mod uncertain;

pub use crate::tensor::{Values, values};
pub use model::NoBound;

use crate::profile::Profile;
use crate::tensor::{Stored, Tensors};
use crate::types::{SAVED, Types};
use etalon_problem::{Dtype, Error, LinearCrossEntropy, Operand, Pass, Problem, Role};
use etalon_reference::{Arithmetic, evaluate_in};
use inputs::{Errors, Inputs};
use model::Model;
use ndarray::{Array2, ArrayD, IxDyn};
use std::collections::BTreeMap;

/// An output: the exact values, and how far off a result may be.
#[derive(Debug, Clone)]
pub struct Bound {
    /// The reference's value, in f64, never rounded to the storage type.
    pub value: ArrayD<f64>,
    /// The bound of |result − value|. 0: the result is exact (the sign of zero is free).
    /// ∞: no requirement follows from the profile. Where the value is not finite, its class decides
    /// and the bound is 0.
    pub bound: ArrayD<f64>,
    /// Storage of the reference's value: f64, or whole numbers.
    pub stored: Stored,
    /// The largest finite number of its storage type: a result whose value and bound reach beyond
    /// it may overflow.
    pub largest: f64,
    /// Number of elements without a bound, by the reason.
    pub no_bound: BTreeMap<NoBound, usize>,
    /// Of whole numbers whose bound is ∞, since rounding decides: which are as right as the value, by the place of
    /// the element in row-major order.
    pub as_right: BTreeMap<usize, Vec<usize>>,
}

/// The bounds of every output of a pass.
#[derive(Debug, Clone)]
pub struct Bounds {
    /// By the output's name.
    pub outputs: BTreeMap<String, Bound>,
    /// Attention's forward pass only: the share of rows with two or more visible keys in which
    /// forgetting the last of them moves some element by at least four bounds.
    pub power: Option<f64>,
}

/// Evaluates the reference and derives the bounds of `pass`. `inputs` holds the operands of the
/// pass by name, in any floating-point type; `types` are those in which the judged kernel stores its results.
///
/// Fails where the reference does, and for a pass without a derivation for the profile.
pub fn bounds(
    problem: &Problem,
    pass: Pass,
    types: impl Into<Types>,
    profile: &Profile,
    inputs: &Tensors,
) -> Result<Bounds, Error> {
    let types = types.into();
    if pass == Pass::ForwardBackward {
        let of = |pass| bounds(problem, pass, &types, profile, inputs);
        let (mut both, backward) = (of(Pass::Forward)?, of(Pass::Backward)?);
        both.outputs.extend(backward.outputs);
        return Ok(both);
    }
    let exact = |pass| evaluate_in(Arithmetic::F64, problem, pass, &values(problem, pass, inputs)?);
    let outputs = exact(pass)?;
    let forward = if pass == Pass::Backward { exact(Pass::Forward)? } else { outputs.clone() };
    let operands = values(problem, pass, inputs)?;
    let model = Model::new(profile, &types);
    let inputs = Inputs { pass, model: &model, operands: &operands, forward: &forward };
    refuse_narrow(problem, pass, &types)?;
    finish(problem, pass, &model, &types, errors(problem, &inputs)?, outputs)
}

/// The size of every gradient of a logit of linear cross-entropy (C16), and how far that of a kernel of the
/// profile may be off, both `[T][V]`; of ignored tokens 0. ∞: no requirement follows from the profile.
///
/// Fails unless the problem is sound and every operand is there in its shape. A target that is no class is
/// that of none.
pub fn logit_gradients(
    problem: &LinearCrossEntropy,
    dtype: Dtype,
    profile: &Profile,
    inputs: &Tensors,
) -> Result<[Array2<f64>; 2], Error> {
    let pass = Pass::Backward;
    let operands = values(&problem.clone().into(), pass, inputs)?;
    let (model, forward) = (Model::new(profile, &dtype.into()), Values::new());
    let inputs = Inputs { pass, model: &model, operands: &operands, forward: &forward };
    Ok(linear_cross_entropy::logit_gradients(problem, &inputs))
}

/// The errors of the outputs before they are stored.
fn errors(problem: &Problem, inputs: &Inputs<'_>) -> Result<Errors, Error> {
    let second_order = matches!(inputs.pass, Pass::DoubleBackward | Pass::Jvp);
    if problem.scores().is_some_and(|scores| scores.row_shape().contains(&0)) {
        return Ok(Errors::none(problem, inputs.pass));
    }
    Ok(match problem {
        Problem::LinearAttention(problem) => linear_attention::errors(problem, inputs)?,
        _ if second_order => uncertain::errors(problem, inputs)?,
        Problem::Attention(problem) => attention::errors(&problem.scores, inputs),
        Problem::AttentionLse(problem) => attention::errors(&problem.scores, inputs),
        Problem::LazyAttention(problem) => lazy_attention::errors(problem, inputs),
        Problem::LinearCrossEntropy(problem) => linear_cross_entropy::errors(problem, inputs),
    })
}

/// Fails where a pass of second order reads what a forward pass stored in a narrower type than usual: what
/// that costs is derived for the backward pass alone.
fn refuse_narrow(problem: &Problem, pass: Pass, types: &Types) -> Result<(), Error> {
    let second_order = matches!(pass, Pass::DoubleBackward | Pass::Jvp);
    let narrow = |x: &&Operand| types.narrows(x.name, x.precision);
    let forward = problem.operands(Pass::Forward);
    let saved = forward.iter().filter(|x| SAVED.contains(&x.name));
    match saved.filter(|_| second_order).find(narrow) {
        Some(operand) => Err(Error::Unsupported {
            what: format!("a bound of {} {pass}", problem.algorithm()),
            reason: format!("`{}` is stored in {}", operand.name, types.of(operand)),
        }),
        None => Ok(()),
    }
}

/// Joins the reference's outputs with their errors (N4).
fn finish(
    problem: &Problem,
    pass: Pass,
    model: &Model,
    types: &Types,
    mut errors: Errors,
    mut outputs: Values,
) -> Result<Bounds, Error> {
    let mut bounds = BTreeMap::new();
    let mut as_right = std::mem::take(&mut errors.as_right);
    for operand in problem.operands(pass).iter().filter(|operand| operand.role == Role::Output) {
        let missing = || Error::Missing {
            operand: operand.name.to_string(),
            reason: format!("{pass} returns it"),
        };
        let value = outputs.remove(operand.name).ok_or_else(missing)?;
        Error::expect_shape(operand.name, &operand.shape, value.shape())?;
        let errors = errors.lists.remove(operand.name).ok_or_else(missing)?;
        let mut no_bound = BTreeMap::new();
        let as_right = as_right.remove(operand.name).unwrap_or_default();
        let bound = value.iter().zip(errors).enumerate().map(|(at, (&x, error))| {
            let bound = model.finish(x, error, types.of(operand));
            if bound == f64::INFINITY && !as_right.contains_key(&at) {
                let reason = model.no_bound(error).unwrap_or(NoBound::Sum);
                *no_bound.entry(reason).or_default() += 1;
            }
            bound
        });
        let bound = bound.collect();
        let bound = ArrayD::from_shape_vec(IxDyn(&operand.shape), bound).map_err(|_| missing())?;
        let largest = types.of(operand).dtype().map_or(f64::INFINITY, Dtype::max);
        let stored = Stored::of(operand.precision, Dtype::F64);
        let bound = Bound { value, bound, stored, largest, no_bound, as_right };
        bounds.insert(operand.name.to_string(), bound);
    }
    Ok(Bounds { outputs: bounds, power: errors.power })
}
