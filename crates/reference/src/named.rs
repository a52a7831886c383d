//! Operands and results by name, and the structs whose fields they are.

use crate::scalar::Real;
use crate::tensor::full;
use etalon_problem::tensors::{Borrowed, ByPrecision, Operands, Owned, Results};
use etalon_problem::{Error, Pass, Precision, Problem, Role, Table, check_operands, find};
use ndarray::{ArrayD, ArrayViewD};
use std::collections::BTreeMap;

/// Tensors by name. Whole numbers stand as numbers of `T`.
pub type Tensors<T> = BTreeMap<String, ArrayD<T>>;

/// Borrowed tensors with their names.
pub type NamedViews<'a, T> = Vec<(&'a str, ArrayViewD<'a, T>)>;

/// The fields of a struct of operands with their shapes, if they are there.
pub type Shapes = Vec<(&'static str, Option<Vec<usize>>)>;

/// Every number through `f`. Tensors are inserted one by one: a map that is collected sorts its entries first, and
/// that sort would be compiled for every type of number.
pub fn convert<T: Copy, U>(tensors: &Tensors<T>, f: fn(T) -> U) -> Tensors<U> {
    let mut converted = Tensors::new();
    for (name, x) in tensors {
        converted.insert(name.clone(), x.mapv(f));
    }
    converted
}

/// Fails unless operands with these shapes are all that a pass needs, and none that it does not have.
pub(crate) fn check(table: &Table, given: &[Shapes]) -> Result<(), Error> {
    let given: Vec<_> = given.iter().flatten().map(|(name, x)| (*name, x.as_deref())).collect();
    check_operands(table, &given)
}

/// The results that a pass always has, which hold 0 until they are written.
pub(crate) fn zeros<T: Real, R: Results<T>>(table: &Table) -> Result<R, Error> {
    R::collect(&mut |name, precision| {
        let operand = find(&table.operands, name).filter(|operand| operand.role == Role::Output);
        let Some(shape) = operand.map(|operand| operand.shape.as_slice()) else { return Ok(None) };
        Ok(Some(match precision {
            Precision::Storage => ByPrecision::Storage(full(name, shape, T::ZERO)?),
            Precision::Wide => ByPrecision::Wide(full(name, shape, T::ZERO)?),
            Precision::Integer => ByPrecision::Integer(full(name, shape, 0)?),
        }))
    })
}

/// [`check`], then [`zeros`].
pub(crate) fn checked<T: Real, R: Results<T>>(table: &Table, given: &[Shapes]) -> Result<R, Error> {
    check(table, given)?;
    zeros(table)
}

/// A struct of operands, by name.
pub trait Named<'a, T: Real>: Operands<'a, T> {
    /// The operands of these names; whole numbers are found in `integers`. Fails where one is missing
    /// that the algorithm cannot do without, or has another number of axes.
    fn from_named(tensors: &'a Tensors<T>, integers: &'a Tensors<i64>) -> Result<Self, Error> {
        Self::collect(&mut |name, precision| {
            Some(match precision {
                Precision::Storage => ByPrecision::Storage(tensors.get(name)?.view()),
                Precision::Wide => ByPrecision::Wide(tensors.get(name)?.view()),
                Precision::Integer => ByPrecision::Integer(integers.get(name)?.view()),
            })
        })
    }

    /// The names with the shapes of those that are there.
    fn shapes(&self) -> Shapes {
        let mut shapes = Shapes::new();
        self.each(&mut |name, x| shapes.push((name, x.map(|x| x.shape().to_vec()))));
        shapes
    }

    /// The operands that are there and hold numbers of `T`.
    fn named(&self) -> NamedViews<'_, T> {
        let mut named = Vec::new();
        self.each(&mut |name, x| match x {
            Some(Borrowed::Storage(x) | Borrowed::Wide(x)) => named.push((name, x)),
            Some(Borrowed::Integer(_)) | None => {}
        });
        named
    }
}

impl<'a, T: Real, S: Operands<'a, T>> Named<'a, T> for S {}

/// Tensors by name, from which the structs of operands are taken.
pub(crate) struct ByName<'a, T> {
    pub tensors: &'a Tensors<T>,
    integers: Tensors<i64>,
}

impl<'a, T: Real> ByName<'a, T> {
    /// The operands of a pass. Fails unless the problem is sound and the tensors are all that the pass needs, each in
    /// its shape, and no other.
    pub fn checked(problem: &Problem, pass: Pass, tensors: &'a Tensors<T>) -> Result<Self, Error> {
        let shapes = tensors.iter().map(|(name, x)| (name.as_str(), Some(x.shape())));
        problem.checked_table(pass)?.check_all(&shapes.collect::<Vec<_>>())?;
        Ok(ByName::new(problem, tensors))
    }

    /// Of these tensors, those that hold whole numbers are the problem's.
    pub fn new(problem: &Problem, tensors: &'a Tensors<T>) -> Self {
        let mut integers = Tensors::new();
        for operand in problem.operands(Pass::Forward) {
            if let (Precision::Integer, Some(x)) = (operand.precision, tensors.get(operand.name)) {
                let whole = x.mapv(|number| number.to_f64() as i64);
                integers.insert(operand.name.to_string(), whole);
            }
        }
        ByName { tensors, integers }
    }

    /// The operands of a struct.
    pub fn get<'s, S: Named<'s, T>>(&'s self) -> Result<S, Error> {
        S::from_named(self.tensors, &self.integers)
    }
}

/// The results that are there, by name.
pub(crate) fn into_named<T: Real>(results: impl Results<T>) -> Tensors<T> {
    let mut tensors = Tensors::new();
    results.into_each(&mut |name, x: Owned<T>| {
        let x = match x {
            ByPrecision::Storage(x) | ByPrecision::Wide(x) => x,
            ByPrecision::Integer(x) => x.mapv(|number| T::from_f64(number as f64)),
        };
        tensors.insert(name.to_string(), x);
    });
    tensors
}

/// The results of these names.
pub(crate) fn from_named<T: Real, R: Results<T>>(mut tensors: Tensors<T>) -> Result<R, Error> {
    R::collect(&mut |name, precision| {
        let Some(x) = tensors.remove(name) else { return Ok(None) };
        Ok(Some(match precision {
            Precision::Storage => ByPrecision::Storage(x),
            Precision::Wide => ByPrecision::Wide(x),
            Precision::Integer => ByPrecision::Integer(x.mapv(|number| number.to_f64() as i64)),
        }))
    })
}
