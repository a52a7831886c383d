//! What every derivation starts from, and what it returns.

use super::model::Model;
use crate::tensor::Values;
use etalon_problem::{Error, Pass};
use std::collections::BTreeMap;

/// What the bounds of a pass are functions of, beside the problem.
pub(super) struct Inputs<'a> {
    pub pass: Pass,
    pub model: &'a Model,
    /// The inputs and cotangents of the pass.
    pub operands: &'a Values,
    /// The reference's outputs of the forward pass.
    pub forward: &'a Values,
}

impl<'a> Inputs<'a> {
    /// An operand, or an output of the forward pass, that may be absent.
    pub fn get(&self, name: &str) -> Option<Rows<'a>> {
        let array = self.operands.get(name).or_else(|| self.forward.get(name))?;
        let extent = |axis: usize| array.shape().get(axis).copied().unwrap_or(1);
        let (heads, rows, width) = (extent(1), extent(2), extent(3));
        Some(Rows { data: array.as_slice()?, heads, rows, width })
    }

    /// The same, where the pass cannot do without it.
    pub fn needed(&self, name: &str) -> Result<Rows<'a>, Error> {
        self.get(name).ok_or_else(|| Error::Missing {
            operand: name.to_string(),
            reason: "the bounds are a function of it".to_string(),
        })
    }
}

/// A tensor in row-major order; one of shape `[B, H, N, D]`, or `[B, H, N]` with D = 1, row by row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows<'a> {
    /// Every element.
    pub data: &'a [f64],
    heads: usize,
    rows: usize,
    /// D
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
}

impl From<BTreeMap<&'static str, Vec<f64>>> for Errors {
    fn from(lists: BTreeMap<&'static str, Vec<f64>>) -> Self {
        Errors { lists, power: None }
    }
}
