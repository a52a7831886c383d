//! The reference as a function of named arrays.

use crate::tensor::Tensors;
use etalon_problem::{Attention, AttentionLse, Error, Pass, Problem, Role};
use etalon_reference::{attention, attention_lse};
use ndarray::{ArrayD, ArrayView, Dimension};
use std::collections::BTreeMap;

/// Arrays in f64 by name, each in row-major order.
pub type Values = BTreeMap<String, ArrayD<f64>>;

/// The operands of a pass in f64. Fails unless every operand that the pass cannot do without is
/// there, and every one that is has its shape.
pub fn values(problem: &Problem, pass: Pass, tensors: &Tensors) -> Result<Values, Error> {
    problem.check()?;
    let mut values = Values::new();
    for operand in problem.operands(pass) {
        match (tensors.get(operand.name), operand.role) {
            (_, Role::Output) | (None, Role::OptionalCotangent) => {}
            (None, Role::Input | Role::Cotangent) => {
                return Err(Error::Missing {
                    operand: operand.name.to_string(),
                    reason: format!("{} {pass} needs it", problem.algorithm()),
                });
            }
            (Some(tensor), _) => {
                Error::expect_shape(operand.name, &operand.shape, &tensor.shape)?;
                values.insert(operand.name.to_string(), tensor.to_f64(operand.name)?);
            }
        }
    }
    Ok(values)
}

/// The outputs of the reference's forward pass.
pub(super) fn forward(problem: &Problem, inputs: &Values) -> Result<Values, Error> {
    Ok(match problem {
        Problem::Attention(problem) => {
            let output = attention::forward(problem, &attention_inputs(inputs)?)?;
            named([("o", Some(output.o.into_dyn())), ("lse", Some(output.lse.into_dyn()))])
        }
        Problem::AttentionLse(problem) => {
            let output = attention_lse::forward(problem, &lse_inputs(inputs)?)?;
            named([("lse", Some(output.lse.into_dyn()))])
        }
    })
}

/// The outputs of the reference's backward pass.
pub(super) fn backward(problem: &Problem, inputs: &Values) -> Result<Values, Error> {
    match problem {
        Problem::Attention(problem) => attention_backward(problem, inputs),
        Problem::AttentionLse(problem) => lse_backward(problem, inputs),
    }
}

fn attention_backward(problem: &Attention, inputs: &Values) -> Result<Values, Error> {
    let cotangents =
        attention::Cotangents { dout: needed(inputs, "dout")?, dlse: view(inputs, "dlse")? };
    let found = attention::backward(problem, &attention_inputs(inputs)?, &cotangents)?;
    Ok(named([
        ("dq", Some(found.dq.into_dyn())),
        ("dk", Some(found.dk.into_dyn())),
        ("dv", Some(found.dv.into_dyn())),
        ("dsinks", found.dsinks.map(|x| x.into_dyn())),
        ("dbias", found.dbias.map(|x| x.into_dyn())),
    ]))
}

fn lse_backward(problem: &AttentionLse, inputs: &Values) -> Result<Values, Error> {
    let cotangents = attention_lse::Cotangents { dlse: needed(inputs, "dlse")? };
    let found = attention_lse::backward(problem, &lse_inputs(inputs)?, &cotangents)?;
    Ok(named([
        ("dq", Some(found.dq.into_dyn())),
        ("dk", Some(found.dk.into_dyn())),
        ("dsinks", found.dsinks.map(|x| x.into_dyn())),
        ("dbias", found.dbias.map(|x| x.into_dyn())),
    ]))
}

fn attention_inputs(inputs: &Values) -> Result<attention::Inputs<'_, f64>, Error> {
    Ok(attention::Inputs {
        q: needed(inputs, "q")?,
        k: needed(inputs, "k")?,
        v: needed(inputs, "v")?,
        sinks: view(inputs, "sinks")?,
        bias: view(inputs, "bias")?,
    })
}

fn lse_inputs(inputs: &Values) -> Result<attention_lse::Inputs<'_, f64>, Error> {
    Ok(attention_lse::Inputs {
        q: needed(inputs, "q")?,
        k: needed(inputs, "k")?,
        sinks: view(inputs, "sinks")?,
        bias: view(inputs, "bias")?,
    })
}

fn named<const N: usize>(list: [(&str, Option<ArrayD<f64>>); N]) -> Values {
    let rows = |array: ArrayD<f64>| array.as_standard_layout().into_owned();
    list.into_iter().filter_map(|(name, array)| Some((name.to_string(), rows(array?)))).collect()
}

/// An optional operand, if it is there.
fn view<'a, D: Dimension>(
    inputs: &'a Values,
    name: &str,
) -> Result<Option<ArrayView<'a, f64, D>>, Error> {
    let shape_error = |array: &ArrayD<f64>| {
        let axes = D::NDIM.unwrap_or_default();
        Error::value(format!("axes of {name}"), axes.to_string(), array.ndim())
    };
    inputs
        .get(name)
        .map(|array| array.view().into_dimensionality().map_err(|_| shape_error(array)))
        .transpose()
}

fn needed<'a, D: Dimension>(
    inputs: &'a Values,
    name: &str,
) -> Result<ArrayView<'a, f64, D>, Error> {
    view(inputs, name)?.ok_or_else(|| Error::Missing {
        operand: name.to_string(),
        reason: "the pass needs it".to_string(),
    })
}
