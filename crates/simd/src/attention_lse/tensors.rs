//! The tensors of attention_lse.

use crate::{Element, softmax};
use etalon_problem::{AttentionLse, Error};
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

impl<'a, T: Element> Inputs<'a, T> {
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

    /// The inputs of any element type, checked.
    pub(super) fn erased<'s>(
        &'s self,
        problem: &'s AttentionLse,
    ) -> Result<softmax::Inputs<'s>, Error> {
        problem.check()?;
        let inputs = softmax::Inputs {
            scores: &problem.scores,
            q: self.q.into(),
            k: self.k.into(),
            v: None,
            sinks: self.sinks,
            bias: self.bias.map(Into::into),
        };
        inputs.check(0)?;
        Ok(inputs)
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

impl Output {
    /// Borrowed.
    pub fn view(&self) -> OutputRef<'_> {
        let gradient = self.gradient.as_ref().map(|gradient| gradient.view());
        OutputRef { lse: self.lse.view(), gradient }
    }
}

/// The output of attention_lse, borrowed, of any strides: what later passes take of the forward pass,
/// wherever it was written.
#[derive(Debug, Clone, Copy)]
pub struct OutputRef<'a> {
    /// `[B, Hq, N]`, natural logarithm, with the sink.
    pub lse: ArrayView3<'a, f32>,
    /// ∂lse/∂q, `[B, Hq, N, D]`, if the forward pass wrote it: dq then needs no sweep.
    pub gradient: Option<ArrayView4<'a, f32>>,
}

impl<'a> From<&'a Output> for OutputRef<'a> {
    fn from(output: &'a Output) -> Self {
        output.view()
    }
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

impl<'a, T: Element> GradientsMut<'a, T> {
    pub(super) fn erased(self) -> softmax::Gradients<'a> {
        softmax::Gradients {
            dq: self.dq.map(Into::into),
            dk: self.dk.map(Into::into),
            dv: None,
            dsinks: self.dsinks,
            dbias: self.dbias.map(Into::into),
        }
    }
}

/// The cotangents of the gradients and of the output, of any strides. An absent one is zero.
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

impl<T: Element> SecondCotangents<'_, T> {
    pub(super) fn direction(&self) -> softmax::Direction<'_> {
        softmax::Direction {
            q: self.ddq.map(Into::into),
            k: self.ddk.map(Into::into),
            v: None,
            sinks: self.ddsinks,
            bias: self.ddbias.map(Into::into),
        }
    }
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

impl<'a, T: Element> SecondGradientsMut<'a, T> {
    pub(super) fn erased(self) -> softmax::SecondGradients<'a> {
        softmax::SecondGradients {
            gq: self.gq.map(Into::into),
            gk: self.gk.map(Into::into),
            gdlse: self.gdlse,
            gsinks: self.gsinks,
            gbias: self.gbias.map(Into::into),
            ..softmax::SecondGradients::default()
        }
    }
}

/// A direction of the inputs, of any strides. An absent tangent is zero.
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

impl<T: Element> Tangents<'_, T> {
    pub(super) fn direction(&self) -> softmax::Direction<'_> {
        softmax::Direction {
            q: self.tq.map(Into::into),
            k: self.tk.map(Into::into),
            v: None,
            sinks: self.tsinks,
            bias: self.tbias.map(Into::into),
        }
    }
}

/// The tangent of the output.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputTangents {
    /// Of lse, (J2): `[B, Hq, N]`.
    pub tlse: Array3<f32>,
}
