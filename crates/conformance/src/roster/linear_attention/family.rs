//! Families of elements and of log-decays: the data on which particular bugs show.

use super::cases::{Family, GateKind};
use crate::generate::Stream;
use etalon_problem::{Dtype, Operand};
use ndarray::{ArrayD, IxDyn};

impl GateKind {
    /// The log-decays of an operand.
    pub(super) fn values(self, operand: &Operand, seed: u64) -> ArrayD<f64> {
        let (stream, coins) = (Stream::new(seed, operand.name), Stream::new(seed, "gate coins"));
        let mut at = 0;
        ArrayD::from_shape_simple_fn(IxDyn(&operand.shape), || {
            at += 1;
            self.log_decay(stream.uniform(at), coins.below(at, 5))
        })
    }
}

impl Family {
    /// The elements of an operand, before they are rounded to its type.
    pub(super) fn values(self, operand: &Operand, dtype: Dtype, seed: u64) -> ArrayD<f64> {
        let (stream, coins) = (Stream::new(seed, operand.name), Stream::new(seed, "coins"));
        let mut at = 0;
        ArrayD::from_shape_fn(IxDyn(&operand.shape), |index| {
            at += 1;
            let (x, coin) = (stream.normal(at), coins.uniform(at));
            let column = ndarray::Dimension::slice(&index).last().copied().unwrap_or(0);
            self.element(x, coin, channel(column), dtype.min_positive())
        })
    }
}

/// The size of a channel: 2⁻³ to 2³, so that also f16 holds every gradient.
fn channel(column: usize) -> f64 {
    2f64.powi((column * 5 % 7) as i32 - 3)
}
