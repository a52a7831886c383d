//! Gate G1's bounds: how far a result may lie from the exact one, proven for every element from
//! the inputs and a declared profile. The derivation, with the numbers (N1) to (N20) that the
//! comments here use, is `docs/numerics.md`.
//!
//! The cost is that of about three forward passes; heads run in parallel. The work shares nothing
//! with the tiers that it judges: it knows visible pairs from [`etalon_problem::Mask::allows`].

/// The derivation.
///
#[doc = include_str!("../../../docs/numerics.md")]
#[doc = include_str!("../../../docs/assets/katex.html")]
pub mod numerics {}

mod backward;
mod forward;
mod model;
mod oracle;
mod row;

pub use oracle::{Values, values};

use crate::profile::Profile;
use crate::tensor::Tensors;
use etalon_problem::{Dtype, Error, Pass, Problem, Role};
use forward::Values as Outputs;
use model::Model;
use ndarray::{ArrayD, IxDyn};
use row::Operands;
use std::collections::BTreeMap;

/// One output: what it is exactly and how far off it may be.
#[derive(Debug, Clone)]
pub struct Bound {
    /// The reference's value, in f64, never rounded to the storage type.
    pub value: ArrayD<f64>,
    /// The bound of |result − value|. 0: the result is exact (the sign of zero is free).
    /// ∞: no requirement follows from the profile. Where the value is not finite, its class decides
    /// and the bound is 0.
    pub bound: ArrayD<f64>,
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
    let forward = oracle::exact(problem, Pass::Forward, inputs)?;
    let outputs = match pass {
        Pass::Backward => oracle::exact(problem, pass, inputs)?,
        _ => forward.clone(),
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
    let named = Named { problem, inputs, forward };
    let operands = Operands {
        scores: problem.scores(),
        q: named.input("q")?,
        k: named.input("k")?,
        sinks: named.optional("sinks", problem.scores().sinks)?,
        bias: named.optional("bias", problem.scores().bias.is_some())?,
    };
    let (errors, power) = match pass {
        Pass::Forward => named.forward(&operands, &model)?,
        Pass::Backward => (named.backward(operands, &model)?, None),
        Pass::DoubleBackward | Pass::Jvp => {
            return Err(Error::Unsupported {
                what: format!("a bound of {} {pass}", problem.algorithm()),
                reason: "only forward and backward have proven bounds".to_string(),
            });
        }
    };
    finish(problem, pass, &model, &errors, outputs, power)
}

/// Errors of outputs before they are stored, by name.
type ErrorLists = BTreeMap<&'static str, Vec<f64>>;

/// The operands and results that the bounds are functions of.
struct Named<'a> {
    problem: &'a Problem,
    inputs: &'a Values,
    forward: &'a Values,
}

impl<'a> Named<'a> {
    fn input(&self, name: &str) -> Result<&'a [f64], Error> {
        elements(self.inputs, name)
    }

    fn optional(&self, name: &str, wanted: bool) -> Result<Option<&'a [f64]>, Error> {
        if wanted && self.inputs.contains_key(name) { self.input(name).map(Some) } else { Ok(None) }
    }

    /// v and o, which attention_lse has not.
    fn outputs(&self) -> Result<Option<Outputs<'a>>, Error> {
        let Problem::Attention(attention) = self.problem else { return Ok(None) };
        let (v, o) = (self.input("v")?, elements(self.forward, "o")?);
        Ok(Some(Outputs { v, o, dim: attention.value_dim }))
    }

    fn forward(
        &self,
        operands: &Operands<'_>,
        model: &Model,
    ) -> Result<(ErrorLists, Option<f64>), Error> {
        let values = self.outputs()?;
        let errors = forward::errors(operands, model, elements(self.forward, "lse")?, values);
        let told: Vec<f64> = errors.power.iter().copied().filter(|power| !power.is_nan()).collect();
        let strong = told.iter().filter(|&&power| power >= 4.0).count();
        let power = (!told.is_empty()).then(|| strong as f64 / told.len() as f64);
        Ok((BTreeMap::from([("o", errors.o), ("lse", errors.lse)]), power))
    }

    fn backward(&self, operands: Operands<'_>, model: &Model) -> Result<ErrorLists, Error> {
        let values = match self.outputs()? {
            Some(values) => Some((values, self.input("dout")?)),
            None => None,
        };
        let errors = backward::errors(&backward::Asked {
            operands,
            model,
            lse: elements(self.forward, "lse")?,
            dlse: self.optional("dlse", true)?,
            values,
        });
        Ok(BTreeMap::from([
            ("dq", errors.dq),
            ("dk", errors.dk),
            ("dv", errors.dv),
            ("dsinks", errors.dsinks),
            ("dbias", errors.dbias),
        ]))
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
    errors: &ErrorLists,
    mut outputs: Values,
    power: Option<f64>,
) -> Result<Bounds, Error> {
    let mut bounds = BTreeMap::new();
    for operand in problem.operands(pass).iter().filter(|operand| operand.role == Role::Output) {
        let missing = || Error::Missing {
            operand: operand.name.to_string(),
            reason: format!("{pass} returns it"),
        };
        let value = outputs.remove(operand.name).ok_or_else(missing)?;
        Error::expect_shape(operand.name, &operand.shape, value.shape())?;
        let errors = errors.get(operand.name).ok_or_else(missing)?;
        let bound = value.iter().zip(errors);
        let bound = bound.map(|(&x, &error)| model.finish(x, error, operand.precision)).collect();
        let bound = ArrayD::from_shape_vec(IxDyn(&operand.shape), bound).map_err(|_| missing())?;
        let largest = model.dtype(operand.precision).max();
        bounds.insert(operand.name.to_string(), Bound { value, bound, largest });
    }
    Ok(Bounds { outputs: bounds, power })
}
