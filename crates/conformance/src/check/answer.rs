//! Outputs beside their exact values.

use super::Element;
use crate::bounds::{Bound, Bounds};
use crate::conventions::pick;
use crate::gates::margins;
use crate::tensor::Tensors;
use etalon_problem::{Axis, Error, Operand};
use ndarray::{ArrayD, Dimension};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Every output that is judged.
pub(super) struct Answer<'a> {
    pub outputs: Vec<Judged<'a>>,
}

/// An output, or some of its entries, with exact values and margins.
pub(super) struct Judged<'a> {
    pub operand: Cow<'a, Operand>,
    pub bound: Cow<'a, Bound>,
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
                let (operand, bound) = (Cow::Borrowed(operand), Cow::Borrowed(bound));
                Judged { operand, bound, got, margins }
            }))
        };
        let outputs: Result<Vec<_>, Error> = operands.iter().filter_map(judged).collect();
        Ok(Answer { outputs: outputs? })
    }
}

impl Judged<'_> {
    /// The same, borrowed.
    pub fn borrowed(&self) -> Judged<'_> {
        Judged {
            operand: Cow::Borrowed(self.operand.as_ref()),
            bound: Cow::Borrowed(self.bound.as_ref()),
            got: self.got.clone(),
            margins: self.margins.clone(),
        }
    }

    /// The entries `picks` of each axis.
    pub fn select(&self, picks: &[Vec<usize>]) -> Judged<'static> {
        let of = |x: &ArrayD<f64>| pick(x, picks);
        let shape = picks.iter().map(Vec::len).collect();
        let operand = Operand { shape, ..self.operand.as_ref().clone() };
        let Bound { value, bound, stored, largest, as_right, .. } = self.bound.as_ref();
        let others = picked(as_right, value.shape(), picks);
        let (value, bound, no_bound) = (of(value), of(bound), BTreeMap::new());
        let (stored, largest) = (*stored, *largest);
        let bound = Bound { value, bound, stored, largest, no_bound, as_right: others };
        let got = of(&self.got);
        let margins = margins(&bound, &got);
        Judged { operand: Cow::Owned(operand), bound: Cow::Owned(bound), got, margins }
    }

    /// Elements of a row: of an array without columns each element is a row of its own.
    pub fn width(&self) -> usize {
        let columns = |axis: &&Axis| {
            matches!(axis, Axis::Dim | Axis::ValueDim | Axis::Keys | Axis::Distances)
        };
        let of_rows = self.operand.axes.len() > 1;
        let last = self.operand.axes.last().filter(columns).filter(|_| of_rows);
        last.and_then(|_| self.operand.shape.last().copied()).unwrap_or(1).max(1)
    }

    /// Number of elements that are off.
    pub fn off(&self) -> usize {
        self.margins.iter().filter(|margin| **margin > 1.0).count()
    }

    /// The rows in which an element is off, in row-major order.
    pub fn own_rows(&self) -> Vec<bool> {
        self.margins.chunks(self.width()).map(|row| row.iter().any(|x| *x > 1.0)).collect()
    }

    /// The element with the largest margin.
    pub fn worst(&self) -> Option<Element> {
        let all = self.margins.iter().copied().enumerate();
        let (at, _) = all.reduce(|worst, next| if next.1 > worst.1 { next } else { worst })?;
        self.element(at)
    }

    /// The element with this number in row-major order.
    pub fn element(&self, at: usize) -> Option<Element> {
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
}

/// Of lists by place in an array of this shape those of the entries `picks`, by their new places.
fn picked(
    lists: &BTreeMap<usize, Vec<usize>>,
    shape: &[usize],
    picks: &[Vec<usize>],
) -> BTreeMap<usize, Vec<usize>> {
    if lists.is_empty() {
        return BTreeMap::new();
    }
    let mut places = 0..;
    let places =
        ArrayD::from_shape_simple_fn(shape, || places.next().map_or(0.0, |at: u32| at.into()));
    let places = pick(&places, picks);
    let list = |(to, from): (usize, &f64)| Some((to, lists.get(&(*from as usize))?.clone()));
    places.iter().enumerate().filter_map(list).collect()
}
