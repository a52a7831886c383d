//! Inputs of every derivation, and the errors that it returns.

use super::model::Model;
use crate::tensor::Values;
use etalon_problem::{Error, Operand, Pass, Problem, Role};
use etalon_reference::Tensors;
use etalon_reference::scalar::Real;
use std::collections::BTreeMap;

/// Arguments of the bounds of a pass, beside the problem.
pub(super) struct Inputs<'a> {
    pub pass: Pass,
    pub model: &'a Model,
    /// The inputs and cotangents of the pass.
    pub operands: &'a Values,
    /// The reference's outputs of the forward pass; only bounds of that and of the backward pass read
    /// them.
    pub forward: &'a Values,
}

impl<'a> Inputs<'a> {
    /// An operand, or an output of the forward pass; no row where it is absent.
    pub fn rows(&self, name: &str) -> Rows<'a> {
        let array = self.operands.get(name).or_else(|| self.forward.get(name));
        let rows = array.and_then(|array| {
            let extent = |axis: usize| array.shape().get(axis).copied().unwrap_or(1);
            let (heads, rows, width) = (extent(1), extent(2), extent(3));
            Some(Rows { data: array.as_slice()?, heads, rows, width })
        });
        rows.unwrap_or_default()
    }

    /// The errors that the reference itself finds, over numbers that know theirs: `number` makes one of
    /// an element of an operand, `error` reads that of a result. Both get the name of the tensor. The reference is
    /// [`evaluate`](etalon_reference::evaluate), or that of one algorithm.
    pub fn evaluated<T: Real>(
        &self,
        problem: &Problem,
        number: impl Fn(&str, f64) -> T,
        reference: impl Fn(&Tensors<T>) -> Result<Tensors<T>, Error>,
        error: impl Fn(&str, &T) -> f64,
    ) -> Result<Errors, Error> {
        let mut operands = Tensors::new();
        for (name, x) in self.operands {
            operands.insert(name.clone(), x.mapv(|x| number(name, x)));
        }
        let outputs = reference(&operands)?;
        let errors = |operand: &Operand| {
            let results = outputs.get(operand.name)?.iter();
            Some((operand.name, results.map(|x| error(operand.name, x)).collect()))
        };
        Ok(Errors::of(problem.operands(self.pass).iter().filter_map(errors)))
    }
}

/// A tensor in row-major order; one of shape `[B, H, N, D]`, or `[B, H, N]` with D = 1, row by row.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Rows<'a> {
    /// Every element.
    pub data: &'a [f64],
    heads: usize,
    rows: usize,
    /// D; 0 where the tensor is absent, whose rows have no element.
    pub width: usize,
}

impl<'a> Rows<'a> {
    /// Row `i` of a head of a batch element.
    pub fn row(&self, batch: usize, head: usize, i: usize) -> &'a [f64] {
        &self.data[((batch * self.heads + head) * self.rows + i) * self.width..][..self.width]
    }
}

/// Errors of outputs before they are stored.
pub(super) struct Errors {
    /// By name, in row-major order.
    pub lists: BTreeMap<&'static str, Vec<f64>>,
    /// As [`crate::bounds::Bounds::power`].
    pub power: Option<f64>,
    /// As [`crate::bounds::Bound::as_right`], by name.
    pub as_right: BTreeMap<&'static str, BTreeMap<usize, Vec<usize>>>,
}

impl Errors {
    /// These lists alone.
    pub fn of(lists: impl IntoIterator<Item = (&'static str, Vec<f64>)>) -> Self {
        let lists = lists.into_iter().collect();
        Errors { lists, power: None, as_right: BTreeMap::new() }
    }

    /// Errors of a pass without a row to compute: its outputs are 0, being sums of nothing, however
    /// many heads there are.
    pub fn none(problem: &Problem, pass: Pass) -> Self {
        let outputs = problem.operands(pass).into_iter().filter(|x| x.role == Role::Output);
        Errors::of(outputs.map(|x| (x.name, vec![0.0; x.len()])))
    }
}
