//! The second order by dual numbers, for any algorithm.
//!
//! A gradient dx is that of φ = Σ <dy, y> by x, whose second derivative is symmetric. The gradient
//! of <ddx, dx> by the inputs is therefore how the gradients move as the inputs move along ddx; that
//! of <cot_y, y> is how they move as dy moves along cot_y. One backward pass over dual numbers with
//! both gives the sum; and one forward pass gives the gradients by dy: how y moves. No formula but
//! those of the first order is used.

use crate::named::{ByName, NamedViews, Tensors, from_named};
use crate::scalar::{Dual, Real};
use crate::tensor::{tangent_of, with_tangent};
use etalon_problem::tensors::Results;
use etalon_problem::{Error, Pass, Problem};
use ndarray::{ArrayD, ArrayViewD};

/// A problem whose second order follows from its first.
pub(crate) trait FirstOrder: Clone + Into<Problem> {
    /// The outputs of a pass of the first order, by name. A tensor of the name of a number in the
    /// problem stands for it: it may carry a derivative.
    fn first_order<T: Real>(&self, pass: Pass, x: &ByName<'_, T>) -> Result<Tensors<T>, Error>;

    /// The outputs of any pass, by name.
    fn evaluate<T: Real>(&self, pass: Pass, x: &ByName<'_, T>) -> Result<Tensors<T>, Error> {
        match pass {
            Pass::DoubleBackward => {
                let x = x.tensors.iter().map(|(name, x)| (name.as_str(), x.view()));
                second_order(self, &x.collect::<Vec<_>>())
            }
            Pass::ForwardBackward => self.both(x),
            _ => self.first_order(pass, x),
        }
    }

    /// The outputs of the forward and of the backward pass, by name.
    fn both<T: Real>(&self, x: &ByName<'_, T>) -> Result<Tensors<T>, Error> {
        let mut outputs = self.first_order(Pass::Forward, x)?;
        outputs.extend(self.first_order(Pass::Backward, x)?);
        Ok(outputs)
    }

    /// The results of the double backward pass of these operands.
    fn double_backward<T: Real, R: Results<T>>(
        &self,
        operands: [NamedViews<'_, T>; 3],
    ) -> Result<R, Error> {
        from_named(second_order(self, &operands.concat())?)
    }
}

/// The results of a double backward pass of these operands.
fn second_order<T: Real>(
    algorithm: &impl FirstOrder,
    x: &[(&str, ArrayViewD<'_, T>)],
) -> Result<Tensors<T>, Error> {
    let problem: Problem = algorithm.clone().into();
    problem.check()?;
    let shapes: Vec<_> = x.iter().map(|(name, x)| (*name, Some(x.shape()))).collect();
    problem.table(Pass::DoubleBackward).check_all(&shapes)?;
    let get = |name: &str| x.iter().find(|(other, _)| *other == name).map(|(_, x)| x);
    let mut moving: Tensors<Dual<T>> = Tensors::new();
    for family in problem.families() {
        let [first, second, ..] = family.companions.unwrap_or_default();
        let (name, motion) = match family.input {
            true => (family.name, get(second)),
            false => (first, get(second)),
        };
        let scale = family.value.map(|value| ndarray::arr0(T::from_f64(value)).into_dyn());
        let value = scale.as_ref().map(|x| x.view()).or_else(|| get(name).map(|x| x.view()));
        let zeros = motion.filter(|_| value.is_none()).map(|x| x.mapv(|_| T::ZERO));
        if let Some(value) = value.or_else(|| zeros.as_ref().map(|x| x.view())) {
            moving.insert(name.to_string(), with_tangent(name, &value, motion)?);
        }
    }
    let mut outputs = algorithm.both(&ByName::new(&problem, &moving))?;
    let mut results = Tensors::new();
    for family in problem.families() {
        let Some([first, _, gradient, _]) = family.companions else { continue };
        let source = if family.input { first } else { family.name };
        if let Some(moved) = outputs.remove(source) {
            let tangent: ArrayD<T> = tangent_of(gradient, moved)?;
            results.insert(gradient.to_string(), tangent);
        }
    }
    Ok(results)
}
