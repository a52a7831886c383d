//! Outputs beside their exact values, and how far one set of results is from another.

use super::Element;
use crate::bounds::{Bound, Bounds};
use crate::gates::margins;
use crate::tensor::{Tensors, Values};
use etalon_problem::{Axis, Error, Operand};
use ndarray::{ArrayD, Dimension};

/// Every output that is judged.
pub(super) struct Answer<'a> {
    pub outputs: Vec<Judged<'a>>,
}

/// An output with its exact values and margins.
pub(super) struct Judged<'a> {
    pub operand: &'a Operand,
    pub bound: &'a Bound,
    pub got: ArrayD<f64>,
    /// In row-major order.
    pub margins: Vec<f64>,
}

impl<'a> Answer<'a> {
    /// Outputs, which must be those of the bounds.
    pub fn new(
        operands: &'a [Operand],
        exact: &'a Bounds,
        outputs: &Tensors,
    ) -> Result<Self, Error> {
        let judged = |operand: &'a Operand| {
            let (bound, got) = (exact.outputs.get(operand.name)?, outputs.get(operand.name)?);
            Some(got.numbers(operand.name).map(|got| {
                let margins = margins(bound, &got);
                Judged { operand, bound, got, margins }
            }))
        };
        let outputs: Result<Vec<_>, Error> = operands.iter().filter_map(judged).collect();
        Ok(Answer { outputs: outputs? })
    }

    /// What other results leave of the difference from the exact ones, over all outputs, in the rows that
    /// are off, or in which the other results are: rms(got − other) / rms(got − exact). None where an
    /// output is missing.
    pub fn left(&self, other: &Values) -> Option<f64> {
        let (mut own, mut left) = (0.0, 0.0);
        for output in &self.outputs {
            let other = other.get(output.operand.name)?;
            let rows = output.rows_off(other)?;
            let (error, rest) = output.differences(other, &rows);
            own += error;
            left += rest;
        }
        share(left, own)
    }
}

/// √(left / own), if it is a number.
fn share(left: f64, own: f64) -> Option<f64> {
    let share = (left / own).sqrt();
    share.is_finite().then_some(share)
}

impl Judged<'_> {
    /// Elements of a row: of an array without columns each element is a row of its own.
    pub fn width(&self) -> usize {
        let columns = |axis: &&Axis| {
            matches!(axis, Axis::Dim | Axis::ValueDim | Axis::Keys | Axis::Distances)
        };
        let of_rows = self.operand.axes.len() > 1;
        let last = self.operand.axes.last().filter(columns).filter(|_| of_rows);
        last.and_then(|_| self.operand.shape.last().copied()).unwrap_or(1).max(1)
    }

    /// How many elements are off.
    pub fn off(&self) -> usize {
        self.margins.iter().filter(|margin| **margin > 1.0).count()
    }

    /// The rows in which an element is off, in row-major order.
    pub fn own_rows(&self) -> Vec<bool> {
        self.margins.chunks(self.width()).map(|row| row.iter().any(|x| *x > 1.0)).collect()
    }

    /// The rows in which an element is off, here or in other results. None of another shape.
    fn rows_off(&self, other: &ArrayD<f64>) -> Option<Vec<bool>> {
        if other.shape() != self.got.shape() {
            return None;
        }
        let others = margins(self.bound, other);
        let others = others.chunks(self.width()).map(|row| row.iter().any(|x| *x > 1.0));
        Some(self.own_rows().into_iter().zip(others).map(|(own, other)| own || other).collect())
    }

    /// The element with the largest margin.
    pub fn worst(&self) -> Option<Element> {
        let all = self.margins.iter().copied().enumerate();
        let (at, _) = all.reduce(|worst, next| if next.1 > worst.1 { next } else { worst })?;
        let (index, &got) = self.got.indexed_iter().nth(at)?;
        let (exact, bound) = (self.bound.value[&index], self.bound.bound[&index]);
        Some(Element { index: index.slice().to_vec(), got, exact, bound })
    }

    /// rms of the errors over rms of the exact results.
    pub fn error(&self) -> f64 {
        let pairs = self.got.iter().zip(&self.bound.value);
        let finite = pairs.filter(|(got, exact)| got.is_finite() && exact.is_finite());
        let (mut errors, mut exacts) = (0.0, 0.0);
        for (got, exact) in finite {
            errors += (got - exact) * (got - exact);
            exacts += exact * exact;
        }
        if errors == 0.0 { 0.0 } else { f64::sqrt(errors / exacts) }
    }

    /// Σ (got − exact)² and Σ (got − other)² over some rows, in units of the mean square of the exact
    /// results.
    fn differences(&self, other: &ArrayD<f64>, rows: &[bool]) -> (f64, f64) {
        let value = &self.bound.value;
        let squares = value.iter().filter(|x| x.is_finite()).map(|x| x * x).sum::<f64>();
        let unit = (squares / value.len().max(1) as f64).sqrt();
        let unit = if unit > 0.0 { unit } else { 1.0 };
        let width = self.width();
        let all = self.got.iter().zip(value).zip(other).enumerate();
        let wanted = all.filter(|(at, _)| rows[at / width]);
        wanted.fold((0.0, 0.0), |(own, left), (_, ((&got, &exact), &other))| {
            (own + apart(got, exact, unit), left + apart(got, other, unit))
        })
    }

    /// What other values leave of the difference from the exact ones, in the rows that are off.
    pub fn left(&self, other: &ArrayD<f64>) -> Option<f64> {
        let (own, left) = self.differences(other, &self.own_rows());
        share(left, own)
    }
}

/// The squared difference of two numbers; of two that are not both finite, 1 or 0.
fn apart(x: f64, y: f64, unit: f64) -> f64 {
    if x == y || (x.is_nan() && y.is_nan()) {
        return 0.0;
    }
    if x.is_finite() && y.is_finite() { ((x - y) / unit).powi(2) } else { 1.0 }
}
