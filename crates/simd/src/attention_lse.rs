#![doc = include_str!("../../../docs/attention_lse.md")]
#![doc = include_str!("../../../docs/assets/katex.html")]

mod backward;
mod double_backward;
mod forward;
mod plan;

pub use backward::{backward, backward_into};
pub use double_backward::{double_backward, double_backward_into, jvp, jvp_into};
pub use forward::{forward, forward_into};
pub use plan::plan;

use crate::heads::check_lists;
use etalon_problem::{AttentionLse, Error, Scores};
use ndarray::{
    Array1, Array3, Array4, ArrayView1, ArrayView3, ArrayView4, ArrayViewMut1, ArrayViewMut3,
    ArrayViewMut4,
};

/// The inputs of attention_lse, of any strides.
#[derive(Debug, Clone)]
pub struct Inputs<'a, T> {
    /// `[B, Hq, N, D]`.
    pub q: ArrayView4<'a, T>,
    /// `[B, Hk, M, D]`.
    pub k: ArrayView4<'a, T>,
    /// `[Hq]`, where the problem has sinks.
    pub sinks: Option<ArrayView1<'a, f32>>,
    /// `[B or 1, Hq or 1, N, M]`, where the problem has a bias.
    pub bias: Option<ArrayView4<'a, T>>,
}

impl<'a, T> Inputs<'a, T> {
    /// Inputs without sinks and bias.
    pub fn new(q: ArrayView4<'a, T>, k: ArrayView4<'a, T>) -> Self {
        Inputs { q, k, sinks: None, bias: None }
    }

    /// Adds the logit per head that has no value.
    pub fn sinks(mut self, sinks: ArrayView1<'a, f32>) -> Self {
        self.sinks = Some(sinks);
        self
    }

    /// Adds the bias of the scores.
    pub fn bias(mut self, bias: ArrayView4<'a, T>) -> Self {
        self.bias = Some(bias);
        self
    }

    fn check(&self, problem: &AttentionLse) -> Result<(), Error> {
        problem.check()?;
        let (sinks, bias) = (self.sinks.as_ref(), self.bias.as_ref());
        check_scores(&problem.scores, &self.q, &self.k, sinks, bias)
    }
}

/// Fails unless the operands of the scores have the shapes that follow from the problem.
pub(crate) fn check_scores<T>(
    scores: &Scores,
    q: &ArrayView4<'_, T>,
    k: &ArrayView4<'_, T>,
    sinks: Option<&ArrayView1<'_, f32>>,
    bias: Option<&ArrayView4<'_, T>>,
) -> Result<(), Error> {
    check_lists(scores)?;
    Error::expect_shape("q", &scores.q_shape(), q.shape())?;
    Error::expect_shape("k", &scores.k_shape(), k.shape())?;
    Error::expect_presence("sinks", "sinks", scores.sinks, sinks.is_some())?;
    Error::expect_presence("bias", "bias", scores.bias.is_some(), bias.is_some())?;
    if let Some(sinks) = sinks {
        Error::expect_shape("sinks", &[scores.extents.query_heads], sinks.shape())?;
    }
    match (bias, scores.bias_shape()) {
        (Some(bias), Some(shape)) => Error::expect_shape("bias", &shape, bias.shape()),
        _ => Ok(()),
    }
}

/// The output of attention_lse.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    /// `[B, Hq, N]`, natural logarithm, with the sink.
    pub lse: Array3<f32>,
    /// ∂lse/∂q, `[B, Hq, N, D]`: returned under [`crate::Mode::ForwardGradient`], and then all
    /// that the backward pass needs for dq.
    pub gradient: Option<Array4<f32>>,
}

/// Where the output of attention_lse is written; of any strides.
#[derive(Debug)]
pub struct OutputMut<'a> {
    /// `[B, Hq, N]`.
    pub lse: ArrayViewMut3<'a, f32>,
    /// `[B, Hq, N, D]`: ∂lse/∂q, if it is wanted.
    pub gradient: Option<ArrayViewMut4<'a, f32>>,
}

/// The cotangent of attention_lse's output, of any strides.
#[derive(Debug, Clone)]
pub struct Cotangents<'a> {
    /// `[B, Hq, N]`.
    pub dlse: ArrayView3<'a, f32>,
}

/// The gradients of attention_lse's inputs.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients<T> {
    /// `[B, Hq, N, D]`.
    pub dq: Array4<T>,
    /// `[B, Hk, M, D]`.
    pub dk: Array4<T>,
    /// `[Hq]`, where the problem has sinks.
    pub dsinks: Option<Array1<f32>>,
    /// The shape of the bias, where the problem has one.
    pub dbias: Option<Array4<T>>,
}

/// Where gradients are written; of any strides. A gradient that is not asked for is not paid for.
#[derive(Debug, Default)]
pub struct GradientsMut<'a, T> {
    /// `[B, Hq, N, D]`.
    pub dq: Option<ArrayViewMut4<'a, T>>,
    /// `[B, Hk, M, D]`.
    pub dk: Option<ArrayViewMut4<'a, T>>,
    /// `[Hq]`.
    pub dsinks: Option<ArrayViewMut1<'a, f32>>,
    /// The shape of the bias.
    pub dbias: Option<ArrayViewMut4<'a, T>>,
}

/// The cotangents of the gradients and of the output, of any strides. What is absent is zero.
#[derive(Debug, Clone, Default)]
pub struct SecondCotangents<'a, T> {
    /// By dq: `[B, Hq, N, D]`.
    pub ddq: Option<ArrayView4<'a, T>>,
    /// By dk: `[B, Hk, M, D]`.
    pub ddk: Option<ArrayView4<'a, T>>,
    /// By dsinks: `[Hq]`.
    pub ddsinks: Option<ArrayView1<'a, f32>>,
    /// By dbias: in the shape of the bias.
    pub ddbias: Option<ArrayView4<'a, T>>,
    /// By lse: `[B, Hq, N]`.
    pub cot_lse: Option<ArrayView3<'a, f32>>,
}

/// The gradients by everything that the backward pass reads.
#[derive(Debug, Clone, PartialEq)]
pub struct SecondGradients<T> {
    /// By q, (D10): `[B, Hq, N, D]`.
    pub gq: Array4<T>,
    /// By k, (D11): `[B, Hk, M, D]`.
    pub gk: Array4<T>,
    /// By dlse, (D13): `[B, Hq, N]`.
    pub gdlse: Array3<f32>,
    /// By the sinks, (D14): `[Hq]`, where the problem has them.
    pub gsinks: Option<Array1<f32>>,
    /// By the bias, (D15): in its shape, where the problem has one.
    pub gbias: Option<Array4<T>>,
}

/// Where second gradients are written; of any strides. Sweeps that none of them needs are left out.
#[derive(Debug, Default)]
pub struct SecondGradientsMut<'a, T> {
    /// `[B, Hq, N, D]`.
    pub gq: Option<ArrayViewMut4<'a, T>>,
    /// `[B, Hk, M, D]`.
    pub gk: Option<ArrayViewMut4<'a, T>>,
    /// `[B, Hq, N]`.
    pub gdlse: Option<ArrayViewMut3<'a, f32>>,
    /// `[Hq]`.
    pub gsinks: Option<ArrayViewMut1<'a, f32>>,
    /// The shape of the bias.
    pub gbias: Option<ArrayViewMut4<'a, T>>,
}

/// A direction in which the inputs move, of any strides. What is absent stands still.
#[derive(Debug, Clone, Default)]
pub struct Tangents<'a, T> {
    /// Of q: `[B, Hq, N, D]`.
    pub tq: Option<ArrayView4<'a, T>>,
    /// Of k: `[B, Hk, M, D]`.
    pub tk: Option<ArrayView4<'a, T>>,
    /// Of the sinks: `[Hq]`.
    pub tsinks: Option<ArrayView1<'a, f32>>,
    /// Of the bias: in its shape.
    pub tbias: Option<ArrayView4<'a, T>>,
}

/// How the output moves.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputTangents {
    /// Of lse, (J2): `[B, Hq, N]`.
    pub tlse: Array3<f32>,
}
