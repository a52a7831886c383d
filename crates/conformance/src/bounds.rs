//! Gate G1's bounds: how far a result may lie from the exact one, proven for every element from
//! the inputs and a declared profile. [`etalon_problem::docs::numerics`] has the derivation, with
//! the numbers (N1) to (N84) that the comments here use.
//!
//! The cost is that of about three forward passes; heads run in parallel. The work shares nothing
//! with the tiers that it judges: it knows visible pairs from [`etalon_problem::Mask::allows`].

mod attention;
mod lazy_attention;
mod linear_attention;
mod linear_cross_entropy;
mod model;
mod oracle;
mod uncertain;

pub use oracle::{Values, values};

use crate::profile::Profile;
use crate::tensor::{Stored, Tensors};
use crate::tiers;
use etalon_problem::{Algorithm, Dtype, Error, Pass, Problem, Role};
use model::Model;
use ndarray::{ArrayD, IxDyn};
use std::collections::BTreeMap;
use uncertain::Uncertain;

/// One output: what it is exactly and how far off it may be.
#[derive(Debug, Clone)]
pub struct Bound {
    /// The reference's value, in f64, never rounded to the storage type.
    pub value: ArrayD<f64>,
    /// The bound of |result − value|. 0: the result is exact (the sign of zero is free).
    /// ∞: no requirement follows from the profile. Where the value is not finite, its class decides
    /// and the bound is 0.
    pub bound: ArrayD<f64>,
    /// How the reference's value is stored: f64, or whole numbers.
    pub stored: Stored,
    /// The largest finite number of its storage type: a result whose value and bound reach beyond
    /// it may overflow.
    pub largest: f64,
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
/// pass by name, in any floating-point type; `dtype` is the storage type of the judged kernel.
pub fn bounds(
    problem: &Problem,
    pass: Pass,
    dtype: Dtype,
    profile: &Profile,
    inputs: &Tensors,
) -> Result<Bounds, Error> {
    let forward = match pass {
        Pass::Step => Values::new(), // its operands are not those of a forward pass
        _ => oracle::exact(problem, Pass::Forward, inputs)?,
    };
    let outputs = match pass {
        Pass::Forward => forward.clone(),
        _ => oracle::exact(problem, pass, inputs)?,
    };
    let inputs = values(problem, pass, inputs)?;
    from_reference(problem, pass, dtype, profile, &inputs, &forward, outputs)
}

/// As [`bounds`], for callers that have evaluated the reference already: `forward` holds the
/// outputs of its forward pass, `outputs` those of `pass`.
pub fn from_reference(
    problem: &Problem,
    pass: Pass,
    dtype: Dtype,
    profile: &Profile,
    inputs: &Values,
    forward: &Values,
    outputs: Values,
) -> Result<Bounds, Error> {
    problem.check()?;
    let model = Model::new(profile, dtype);
    let asked = Asked { pass, model: &model, inputs, forward };
    let errors = match problem {
        Problem::Attention(_) | Problem::AttentionLse(_)
            if matches!(pass, Pass::DoubleBackward | Pass::Jvp) =>
        {
            carried(problem, &asked)
        }
        Problem::LinearCrossEntropy(_) if pass == Pass::DoubleBackward => carried(problem, &asked),
        Problem::Attention(problem) => {
            attention::errors(&problem.scores, Some(problem.value_dim), &asked)
        }
        Problem::AttentionLse(problem) => attention::errors(&problem.scores, None, &asked),
        Problem::LinearAttention(problem) => linear_attention::errors(problem, &asked),
        Problem::LazyAttention(problem) => lazy_attention::errors(problem, &asked),
        Problem::LinearCrossEntropy(problem) => linear_cross_entropy::errors(problem, &asked),
    }?;
    finish(problem, pass, &model, errors, outputs)
}

/// The errors of a pass whose kernels all compute the reference's formulas, whatever the order of
/// their sums: the reference itself, over numbers that carry their error.
fn carried(problem: &Problem, asked: &Asked<'_>) -> Result<Errors, Error> {
    if asked.model.stores_low() {
        return Err(Error::Unsupported {
            what: format!("a bound of {} {}", problem.algorithm(), asked.pass),
            reason: format!("`{}` stores weights in a low precision", asked.model.profile.name),
        });
    }
    match asked.model.profile.accumulator {
        Dtype::F64 => carried_in::<true>(problem, asked),
        _ => carried_in::<false>(problem, asked),
    }
}

fn carried_in<const F64: bool>(problem: &Problem, asked: &Asked<'_>) -> Result<Errors, Error> {
    let outputs = tiers::softmax_in::<Uncertain<F64>>(problem, asked.pass, asked.inputs)?;
    let operands = problem.operands(asked.pass);
    let outputs = outputs.iter().filter_map(|(name, values)| {
        let operand = operands.iter().find(|operand| operand.name == name)?;
        Some((operand.name, values.iter().map(|x| x.error(asked.model.eta)).collect()))
    });
    Ok(Errors { lists: outputs.collect(), power: None })
}

/// Errors of outputs before they are stored.
struct Errors {
    /// By name, in row-major order.
    lists: BTreeMap<&'static str, Vec<f64>>,
    /// As [`Bounds::power`].
    power: Option<f64>,
}

/// What the bounds are functions of, beside the problem.
struct Asked<'a> {
    pass: Pass,
    model: &'a Model,
    inputs: &'a Values,
    /// The reference's outputs of the forward pass.
    forward: &'a Values,
}

impl<'a> Asked<'a> {
    fn input(&self, name: &str) -> Result<&'a [f64], Error> {
        elements(self.inputs, name)
    }

    fn optional(&self, name: &str) -> Result<Option<&'a [f64]>, Error> {
        if self.inputs.contains_key(name) { self.input(name).map(Some) } else { Ok(None) }
    }

    fn output(&self, name: &str) -> Result<&'a [f64], Error> {
        elements(self.forward, name)
    }

    /// The error of a pass without a derivation.
    fn underived(&self, algorithm: Algorithm) -> Error {
        Error::Unsupported {
            what: format!("a bound of {algorithm} {}", self.pass),
            reason: "it has no derivation yet".to_string(),
        }
    }
}

fn elements<'a>(values: &'a Values, name: &str) -> Result<&'a [f64], Error> {
    values.get(name).and_then(|values| values.as_slice()).ok_or_else(|| Error::Missing {
        operand: name.to_string(),
        reason: "the bounds are a function of it".to_string(),
    })
}

/// Joins the reference's outputs with their errors (N4).
fn finish(
    problem: &Problem,
    pass: Pass,
    model: &Model,
    mut errors: Errors,
    mut outputs: Values,
) -> Result<Bounds, Error> {
    let mut bounds = BTreeMap::new();
    for operand in problem.operands(pass).iter().filter(|operand| operand.role == Role::Output) {
        let missing = || Error::Missing {
            operand: operand.name.to_string(),
            reason: format!("{pass} returns it"),
        };
        let value = outputs.remove(operand.name).ok_or_else(missing)?;
        Error::expect_shape(operand.name, &operand.shape, value.shape())?;
        let errors = errors.lists.remove(operand.name).ok_or_else(missing)?;
        let bound = value.iter().zip(errors);
        let bound = bound.map(|(&x, error)| model.finish(x, error, operand.precision)).collect();
        let bound = ArrayD::from_shape_vec(IxDyn(&operand.shape), bound).map_err(|_| missing())?;
        let largest = model.dtype(operand.precision).map_or(f64::INFINITY, Dtype::max);
        let stored = Stored::of(operand.precision, Dtype::F64);
        bounds.insert(operand.name.to_string(), Bound { value, bound, stored, largest });
    }
    Ok(Bounds { outputs: bounds, power: errors.power })
}
