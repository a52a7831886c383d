//! Rows of equal scores of a problem with sinks or a bias: a sink of 0 is one key more, which has no value, and a
//! bias of −1000 takes a key out, so that a kernel which leaves out either counts wrongly.

use crate::laws::visible::Visible;
use crate::tensor::Tensors;
use etalon_problem::{Error, Operand};
use ndarray::ArrayD;

/// e to it is 0 in every type, and bf16 and f16 hold it.
const HIDDEN: f64 = -1000.0;

/// An element of sinks or of a bias by pairs. Every second head has a sink; a fifth of all pairs is hidden, other ones
/// in every head and row.
pub(super) fn beside(operand: &Operand, at: &[usize]) -> f64 {
    match (operand.name, at) {
        ("sinks", [head]) if head.is_multiple_of(2) => 0.0,
        ("sinks", _) => f64::NEG_INFINITY,
        (_, &[_, h, i, j]) if (i % 5 * i + 2 * j + h).is_multiple_of(5) => HIDDEN,
        _ => 0.0,
    }
}

/// The keys of a row that share its weight.
pub(super) struct Row {
    pub keys: Vec<usize>,
    /// Number of these keys, with the sink.
    pub n: usize,
    /// Their score.
    pub score: f64,
}

/// Sinks and a bias by pairs, if there are any.
pub(super) struct Equal {
    sinks: Option<ArrayD<f64>>,
    bias: Option<ArrayD<f64>>,
}

impl Equal {
    /// Sinks and bias of a question.
    pub fn of(inputs: &Tensors) -> Result<Self, Error> {
        let numbers = |name| inputs.get(name).map(|x| x.to_f64(name)).transpose();
        let bias = numbers("bias")?.filter(|bias| bias.ndim() == 4);
        Ok(Equal { sinks: numbers("sinks")?, bias })
    }

    /// A row where all scores are equal before the bias is added.
    pub fn row(&self, visible: &Visible, [b, h, i]: [usize; 3]) -> Row {
        let bias = |j: usize| match &self.bias {
            Some(bias) => bias[[b.min(bias.shape()[0] - 1), h.min(bias.shape()[1] - 1), i, j]],
            None => 0.0,
        };
        // Padding has no sink.
        let sinks = self.sinks.as_ref().filter(|_| visible.rows[[b, i]]);
        let sink = sinks.is_some_and(|sinks| sinks[[h]] == 0.0);
        let all: Vec<usize> = visible.keys([b, h, i]).collect();
        let score = if sink || all.iter().any(|&j| bias(j) == 0.0) { 0.0 } else { HIDDEN };
        let keys: Vec<usize> = all.into_iter().filter(|&j| bias(j) == score).collect();
        Row { n: keys.len() + usize::from(sink), keys, score }
    }
}
