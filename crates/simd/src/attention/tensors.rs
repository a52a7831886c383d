//! The tensors of attention.

use crate::{Element, softmax};
use etalon_problem::{Attention, Error};
use ndarray::{
    Array1, Array3, Array4, ArrayView1, ArrayView3, ArrayView4, ArrayViewMut1, ArrayViewMut3,
    ArrayViewMut4,
};

/// The inputs of attention, of any strides.
#[derive(Debug, Clone)]
pub struct Inputs<'a, T> {
    /// `[B, Hq, N, D]`.
    pub q: ArrayView4<'a, T>,
    /// `[B, Hk, M, D]`.
    pub k: ArrayView4<'a, T>,
    /// `[B, Hk, M, E]`.
    pub v: ArrayView4<'a, T>,
    /// `[Hq]`, where the problem has sinks.
    pub sinks: Option<ArrayView1<'a, f32>>,
    /// `[B or 1, Hq or 1, N, M]`, where the problem has a bias.
    pub bias: Option<ArrayView4<'a, T>>,
}

impl<'a, T: Element> Inputs<'a, T> {
    /// Inputs without sinks and bias.
    pub fn new(q: ArrayView4<'a, T>, k: ArrayView4<'a, T>, v: ArrayView4<'a, T>) -> Self {
        Inputs { q, k, v, sinks: None, bias: None }
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
        problem: &'s Attention,
    ) -> Result<softmax::Inputs<'s>, Error> {
        problem.check()?;
        let inputs = softmax::Inputs {
            scores: &problem.scores,
            q: self.q.into(),
            k: self.k.into(),
            v: Some(self.v.into()),
            sinks: self.sinks,
            bias: self.bias.map(Into::into),
        };
        inputs.check(problem.value_dim)?;
        Ok(inputs)
    }
}

/// The outputs of attention.
#[derive(Debug, Clone, PartialEq)]
pub struct Output<T> {
    /// `[B, Hq, N, E]`.
    pub o: Array4<T>,
    /// `[B, Hq, N]`, natural logarithm, with the sink.
    pub lse: Array3<f32>,
}

impl<T> Output<T> {
    /// Borrowed.
    pub fn view(&self) -> OutputRef<'_, T> {
        OutputRef { o: self.o.view(), lse: self.lse.view() }
    }
}

/// The outputs of attention, borrowed, of any strides: what later passes take of the forward pass,
/// wherever it was written.
#[derive(Debug, Clone, Copy)]
pub struct OutputRef<'a, T> {
    /// `[B, Hq, N, E]`.
    pub o: ArrayView4<'a, T>,
    /// `[B, Hq, N]`, natural logarithm, with the sink.
    pub lse: ArrayView3<'a, f32>,
}

impl<'a, T> From<&'a Output<T>> for OutputRef<'a, T> {
    fn from(output: &'a Output<T>) -> Self {
        output.view()
    }
}

/// Where the outputs of attention are written; of any strides.
#[derive(Debug)]
pub struct OutputMut<'a, T> {
    /// `[B, Hq, N, E]`.
    pub o: ArrayViewMut4<'a, T>,
    /// `[B, Hq, N]`.
    pub lse: ArrayViewMut3<'a, f32>,
}

/// The cotangents of attention's outputs, of any strides.
#[derive(Debug, Clone)]
pub struct Cotangents<'a, T> {
    /// `[B, Hq, N, E]`.
    pub dout: ArrayView4<'a, T>,
    /// `[B, Hq, N]`; absent: zero.
    pub dlse: Option<ArrayView3<'a, f32>>,
}

impl<'a, T> Cotangents<'a, T> {
    /// The cotangent of o alone.
    pub fn new(dout: ArrayView4<'a, T>) -> Self {
        Cotangents { dout, dlse: None }
    }

    /// Adds the cotangent of lse.
    pub fn dlse(mut self, dlse: ArrayView3<'a, f32>) -> Self {
        self.dlse = Some(dlse);
        self
    }
}

/// The gradients of attention's inputs.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients<T> {
    /// `[B, Hq, N, D]`.
    pub dq: Array4<T>,
    /// `[B, Hk, M, D]`.
    pub dk: Array4<T>,
    /// `[B, Hk, M, E]`.
    pub dv: Array4<T>,
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
    /// `[B, Hk, M, E]`.
    pub dv: Option<ArrayViewMut4<'a, T>>,
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
            dv: self.dv.map(Into::into),
            dsinks: self.dsinks,
            dbias: self.dbias.map(Into::into),
        }
    }
}

/// The cotangents of the gradients and of the outputs, of any strides. An absent one is zero.
#[derive(Debug, Clone, Default)]
pub struct SecondCotangents<'a, T> {
    /// By dq: `[B, Hq, N, D]`.
    pub ddq: Option<ArrayView4<'a, T>>,
    /// By dk: `[B, Hk, M, D]`.
    pub ddk: Option<ArrayView4<'a, T>>,
    /// By dv: `[B, Hk, M, E]`.
    pub ddv: Option<ArrayView4<'a, T>>,
    /// By dsinks: `[Hq]`.
    pub ddsinks: Option<ArrayView1<'a, f32>>,
    /// By dbias: in the shape of the bias.
    pub ddbias: Option<ArrayView4<'a, T>>,
    /// By o: `[B, Hq, N, E]`.
    pub cot_o: Option<ArrayView4<'a, T>>,
    /// By lse: `[B, Hq, N]`.
    pub cot_lse: Option<ArrayView3<'a, f32>>,
}

impl<T: Element> SecondCotangents<'_, T> {
    pub(super) fn direction(&self) -> softmax::Direction<'_> {
        softmax::Direction {
            q: self.ddq.map(Into::into),
            k: self.ddk.map(Into::into),
            v: self.ddv.map(Into::into),
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
    /// By v, (D12): `[B, Hk, M, E]`.
    pub gv: Array4<T>,
    /// By dout, (D5): `[B, Hq, N, E]`.
    pub gdout: Array4<T>,
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
    /// `[B, Hk, M, E]`.
    pub gv: Option<ArrayViewMut4<'a, T>>,
    /// `[B, Hq, N, E]`.
    pub gdout: Option<ArrayViewMut4<'a, T>>,
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
            gv: self.gv.map(Into::into),
            gdout: self.gdout.map(Into::into),
            gdlse: self.gdlse,
            gsinks: self.gsinks,
            gbias: self.gbias.map(Into::into),
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
    /// Of v: `[B, Hk, M, E]`.
    pub tv: Option<ArrayView4<'a, T>>,
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
            v: self.tv.map(Into::into),
            sinks: self.tsinks,
            bias: self.tbias.map(Into::into),
        }
    }
}

/// The tangents of the outputs.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputTangents<T> {
    /// Of o, (J1): `[B, Hq, N, E]`.
    pub to: Array4<T>,
    /// Of lse, (J2): `[B, Hq, N]`.
    pub tlse: Array3<f32>,
}

/// Where the tangents of the outputs are written; of any strides. A tangent that is not asked for is
/// not paid for.
#[derive(Debug, Default)]
pub struct OutputTangentsMut<'a, T> {
    /// Of o: `[B, Hq, N, E]`.
    pub to: Option<ArrayViewMut4<'a, T>>,
    /// Of lse: `[B, Hq, N]`.
    pub tlse: Option<ArrayViewMut3<'a, f32>>,
}
