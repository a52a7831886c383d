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
            let (x, coin) = (stream.uniform(at), coins.below(at, 5));
            let usual = -(0.0625 + 0.9375 * x);
            match (self, coin) {
                (GateKind::Usual, _) => usual,
                (GateKind::Weak, _) => -(0.5f64.powi(10) + x * 0.5f64.powi(6)),
                (GateKind::Strong, 0) => -1e4,
                (GateKind::Strong, 1) | (GateKind::Resets, 1) => 0.0,
                (GateKind::Strong, _) => -30.0 * x,
                (GateKind::Resets, 0) => f64::NEG_INFINITY,
                (GateKind::Resets, _) => usual,
            }
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
            match self {
                Family::Generic => x,
                Family::Positive => 1.0 + 0.25 * x, // |x| is at most 3.5
                Family::Range if coin < 0.05 => x * 0.5 * dtype.min_positive(),
                Family::Range => x * channel(column),
                Family::Zeros if coin < 0.4 => 0.0,
                Family::Zeros if coin < 0.5 => -0.0,
                Family::Zeros => x,
            }
        })
    }
}

/// The size of a channel: 2⁻³ to 2³, so that also f16 holds every gradient.
fn channel(column: usize) -> f64 {
    2f64.powi((column * 5 % 7) as i32 - 3)
}
