//! Arrays inside masks: ids of segments, and flags of pairs.

use super::cover::Cover;
use crate::{Error, Sequence};
use std::ops::Range;
use std::sync::Arc;

/// An array inside a problem. A problem file holds only its name; the tensor of that name beside
/// the file holds its elements, and [`crate::Problem::bind`] joins the two.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedArray<T> {
    /// The tensor's name in files.
    pub name: String,
    /// Its shape; empty until the array is bound.
    pub shape: Vec<usize>,
    /// Its elements in row-major order.
    pub data: Arc<[T]>,
}

impl<T> NamedArray<T> {
    /// An array with its elements in row-major order.
    pub fn new(name: impl Into<String>, shape: &[usize], data: impl Into<Arc<[T]>>) -> Self {
        NamedArray { name: name.into(), shape: shape.to_vec(), data: data.into() }
    }

    /// A name without elements, as a problem file holds it.
    pub fn unbound(name: impl Into<String>) -> Self {
        NamedArray { name: name.into(), shape: Vec::new(), data: Vec::new().into() }
    }

    /// The error of an array that was not found.
    pub(crate) fn missing(&self) -> Error {
        Error::Missing { operand: self.name.clone(), reason: "the mask names it".to_string() }
    }

    /// Fails unless the array is bound and has this shape.
    pub(super) fn check(&self, expected: &[usize]) -> Result<(), Error> {
        if self.shape.is_empty() {
            return Err(self.missing());
        }
        Error::expect_shape(&self.name, expected, &self.shape)?;
        if self.shape.iter().try_fold(1usize, |n, &e| n.checked_mul(e)) != Some(self.data.len()) {
            let expected = format!("an array with the elements of shape {:?}", self.shape);
            let found = format!("{} elements", self.data.len());
            return Err(Error::value(self.name.as_str(), expected, found));
        }
        Ok(())
    }
}

impl NamedArray<i64> {
    /// The ids of one batch element. The problem must have passed its check.
    pub fn ids(&self, batch: usize) -> &[i64] {
        let length = self.shape[1];
        &self.data[batch * length..(batch + 1) * length]
    }
}

impl NamedArray<bool> {
    /// One flag for each key of the arrays: whether query `i` of `sequence` may see it in query
    /// head `head`. The problem must have passed its check.
    pub fn row(&self, sequence: &Sequence, head: usize, i: usize) -> &[bool] {
        let [batches, heads, queries, keys] = [0, 1, 2, 3].map(|axis| self.shape[axis]);
        let batch = if batches == 1 { 0 } else { sequence.batch };
        let head = if heads == 1 { 0 } else { head };
        let start = ((batch * heads + head) * queries + sequence.query_start + i) * keys;
        &self.data[start..start + keys]
    }

    /// Part of the tile `rows` × `cols` that the array allows in a sequence and head. The problem must
    /// have passed its check.
    pub fn cover(
        &self,
        sequence: &Sequence,
        head: usize,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Cover {
        let cols = sequence.key_start + cols.start..sequence.key_start + cols.end;
        Cover::of_parts(rows.map(|i| cover_of(&self.row(sequence, head, i)[cols.clone()])))
    }
}

fn cover_of(flags: &[bool]) -> Cover {
    match (flags.contains(&true), flags.contains(&false)) {
        (true, true) => Cover::Some,
        (true, false) => Cover::All,
        (false, _) => Cover::None,
    }
}
