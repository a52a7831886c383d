//! The reference as a function of named arrays.

use crate::tensor::{Stored, Tensor, Tensors};
use crate::tier::{Hints, Request};
use crate::tiers;
use etalon_problem::{Dtype, Error, Pass, Precision, Problem, Role};
use ndarray::ArrayD;
use std::collections::BTreeMap;

/// Arrays in f64 by name, each in row-major order.
pub type Values = BTreeMap<String, ArrayD<f64>>;

/// The operands of a pass in f64 (integers too, exactly those up to 2⁵³). Fails unless every operand that the pass cannot do without is
/// there, and every one that is has its shape.
pub fn values(problem: &Problem, pass: Pass, tensors: &Tensors) -> Result<Values, Error> {
    problem.check()?;
    let mut values = Values::new();
    for operand in problem.operands(pass) {
        match (tensors.get(operand.name), operand.role) {
            (None, Role::OptionalCotangent) => {}
            (_, role) if !role.is_given() => {}
            (None, _) => {
                return Err(Error::Missing {
                    operand: operand.name.to_string(),
                    reason: format!("{} {pass} needs it", problem.algorithm()),
                });
            }
            (Some(tensor), _) => {
                Error::expect_shape(operand.name, &operand.shape, &tensor.shape)?;
                let numbers = match operand.precision {
                    Precision::Integer => integers(operand.name, tensor)?,
                    _ => tensor.to_f64(operand.name)?,
                };
                values.insert(operand.name.to_string(), numbers);
            }
        }
    }
    Ok(values)
}

fn integers(name: &str, tensor: &Tensor) -> Result<ArrayD<f64>, Error> {
    match tensor.stored() {
        Some(Stored::Integer) => tensor.numbers(name),
        _ => Err(Error::Dtype {
            operand: name.to_string(),
            expected: Stored::Integer.to_string(),
            found: tensor.type_name().to_string(),
        }),
    }
}

/// The outputs of a pass of the reference.
pub(super) fn exact(problem: &Problem, pass: Pass, inputs: &Tensors) -> Result<Values, Error> {
    let hints = Hints::default();
    let request = Request { problem, pass, dtype: Dtype::F64, inputs, hints };
    let outputs = tiers::oracle(&request)?;
    outputs.into_iter().map(|(name, x)| Ok((name.clone(), x.numbers(&name)?))).collect()
}
