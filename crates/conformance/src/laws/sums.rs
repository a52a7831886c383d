//! Sums of results with the rounding that these may carry: what the identities compare.

use super::flaw::{Flaw, Judgement};
use super::tensors::not_returned;
use super::trial::Trial;
use crate::bounds::{Bound, Bounds};
use crate::tensor::{Tensor, Tensors};
use etalon_problem::Pass;
use ndarray::{ArrayD, ArrayViewD};

/// A sum with the rounding that the results in it may carry.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sum {
    pub value: f64,
    pub slack: f64,
}

impl Sum {
    /// Adds `x · factor`, where x errs by `bound`. The f64 additions here cost 2⁻⁵³ of each term
    /// and each partial sum: 2⁻⁴⁰ covers 4096 of them.
    /// What may be anything makes the sum anything.
    pub fn add(&mut self, x: f64, factor: f64, bound: f64) {
        if bound == f64::INFINITY {
            self.slack = f64::INFINITY;
            return;
        }
        self.value += x * factor;
        if factor != 0.0 {
            self.slack += bound * factor.abs() + (x * factor).abs() * 0.5f64.powi(40);
        }
    }

    /// Adds `factor · ⟨x, y⟩`, where the elements of x err by those of `bound`.
    pub fn add_product(
        &mut self,
        [x, bound]: [ArrayViewD<'_, f64>; 2],
        y: ArrayViewD<'_, f64>,
        factor: f64,
    ) {
        for ((x, bound), y) in x.iter().zip(&bound).zip(&y) {
            self.add(*x, factor * y, *bound);
        }
    }

    /// Fails unless both are one number, as far as the bounds say.
    pub fn meets(self, other: Sum, what: &str) -> Judgement {
        let slack = self.slack + other.slack;
        let distance = (self.value - other.value).abs();
        if distance == 0.0 || slack == f64::INFINITY {
            return Ok(None);
        }
        match distance / slack {
            margin if margin <= 1.0 => Ok(Some(margin)),
            _ => Err(Flaw::Fail(format!(
                "{what}: {:e} and {:e} differ by more than {slack:e}",
                self.value, other.value
            ))),
        }
    }
}

/// A result with its bound.
#[derive(Debug, Clone)]
pub(crate) struct Known {
    pub value: ArrayD<f64>,
    pub bound: ArrayD<f64>,
}

impl Known {
    /// A result of the trial's pass or, if that has none of this name, of the tier's own forward pass:
    /// an identity of both then ties the two passes together. None where neither has it.
    pub fn find(trial: &Trial<'_>, name: &str) -> Result<Option<Self>, Flaw> {
        let is_own = trial.clean()?.contains_key(name);
        let pass = if is_own { trial.pass } else { Pass::Forward };
        let tensor = trial.clean_in(pass)?.get(name);
        tensor.map(|tensor| Known::new(name, tensor, trial.bounds_in(pass)?)).transpose()
    }

    /// As [`Known::find`], of a result that every case of the law has.
    pub fn of(trial: &Trial<'_>, name: &str) -> Result<Self, Flaw> {
        Known::find(trial, name)?.ok_or_else(|| match trial.tier.returns(name) {
            true => Flaw::Vacuous(format!("no {name}")),
            false => not_returned(name),
        })
    }

    /// A result with one of some bounds.
    pub fn new(name: &str, tensor: &Tensor, bounds: &Bounds) -> Result<Self, Flaw> {
        Ok(Known { value: tensor.to_f64(name)?, ..Known::exact(&bounds.outputs[name]) })
    }

    /// An exact result; where it is not finite, identities say nothing.
    pub fn exact(exact: &Bound) -> Self {
        let mut bound = exact.bound.clone();
        bound.zip_mut_with(&exact.value, |bound, value| {
            if !value.is_finite() {
                *bound = f64::INFINITY;
            }
        });
        Known { value: exact.value.clone(), bound }
    }

    /// The values and the bounds.
    pub fn views(&self) -> [ArrayViewD<'_, f64>; 2] {
        [self.value.view(), self.bound.view()]
    }
}

/// An input or a cotangent of the case, if it has it.
pub(crate) fn input(inputs: &Tensors, name: &str) -> Result<Option<ArrayD<f64>>, Flaw> {
    Ok(inputs.get(name).map(|x| x.to_f64(name)).transpose()?)
}
